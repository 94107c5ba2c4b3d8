"""The last event of an answer: its statistics, with the reasons for how it was computed."""

from dataclasses import dataclass
from typing import Any

from ....mtp.types import FinishReason, GenerationStats
from ..executor import LocalExecutor
from ..pipeline_executor import PipelineExecutor
from ..reading.link import ReadOutcome
from ..request import Request
from .drafting import DraftControl
from .events import AnswerEnd, AnswerEvents
from .lookup_control import LookupControl
from .model_measurements import ModelMeasurements


@dataclass(frozen=True, slots=True, eq=False)
class FinalStats:
    """Makes the final statistics of each answer of an engine. Compute thread."""

    executor: LocalExecutor | PipelineExecutor
    drafting: DraftControl
    lookup: LookupControl
    measurements: ModelMeasurements
    kernels: tuple[str, ...]
    reads_any: bool
    """Whether other kinds of machines may have read rows of prompts."""

    def end_of(self, answer: AnswerEvents, request: Request, why: FinishReason) -> AnswerEnd:
        """The last event of an answer. Settles what later answers use: the head's rest, and the
        acceptance that is kept."""
        parameters, text, measured = answer.request, answer.text, self.measurements
        self.drafting.park(request.drafts.parked_at)
        depth_reason = self.note_depth(request) if parameters.k else ""
        stats = GenerationStats(
            drafter_kind=self.drafting.kind,
            num_draft_tokens=parameters.k,
            drafting_reason=parameters.drafting.drafting_reason or self.drafting.parked_reason,
            acceptance_rule=parameters.sampling.rule_of(request.most_drafts),
            prompt_tokens=len(parameters.prompt),
            draft_policy=parameters.policy,
            head_parked=bool(self.drafting.parked_reason),
            depth_reason=depth_reason,
            resumes=parameters.attempt - 1,
            kernels=self.kernels,
            cached_tokens=request.cached_rows,
            cached_tier=request.cached_tier,
            batching_reason=request.batching_reason,
            lookup_reason=request.drafts.lookup_reason
            or self.lookup.reason(
                parameters,
                began=request.drafts.lookup is not None,
                shared=answer.stats.shares_without_copies,
            ),
            loop_reason="" if request.loop_guard is None else request.loop_guard.reason,
            **self._read_stats(request),
        )
        stats = answer.stats.finish(stats)
        if parameters.drafting.adaptive_draft:
            self.drafting.profile.save()
        identity = measured.identity if parameters.k else "off"
        if identity == "off" and request.drafts.lookup is not None:
            identity = "bitwise"  # else its lengths would not be used
        if isinstance(self.executor, PipelineExecutor):
            measured.batch_identity = self.executor.batch_identity
        batch_identity = measured.batch_identity if stats.batched_tokens else "off"
        return AnswerEnd(why, text.finish(), stats, identity, batch_identity, text.stopped_by)

    def note_depth(self, request: Request) -> str:
        """Notes why rounds of a request draft as many tokens as they do, and returns it."""
        assert isinstance(self.executor, LocalExecutor), "a stage of a split model drafts nothing"
        reasons = self.drafting.comparison.reason, self.executor.depth_reason(request)
        self.drafting.depth_reason = "; ".join(filter(None, reasons))
        return self.drafting.depth_reason

    def _read_stats(self, request: Request) -> dict[str, Any]:
        """The figures of a prompt that others might read, and whether its bits are of one kind of
        machine."""
        readers = request.parameters.readers
        outcome = ReadOutcome() if readers is None else readers.outcome
        reason, is_mixed = outcome.reason, outcome.other_kind
        if is_mixed:
            reason += "; another kind of machine read a part, as EXO_READERS=any allows"
        elif self.reads_any and request.cached_rows:
            is_mixed = True
            reason = f"{reason}; " * bool(reason) + (
                "cached rows may be of another kind of machine, as EXO_READERS=any allows"
            )
        return {
            "read_by": tuple(outcome.nodes),
            "read_s": outcome.seconds,
            "read_bytes": outcome.bytes,
            "read_reason": reason,
            "resume_exact": not is_mixed,
        }
