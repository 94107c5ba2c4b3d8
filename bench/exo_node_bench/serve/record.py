"""Collects the runs of a bench and makes its result."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from .answer import Answer
from .figures import BenchRun, counted_by, figures, output_tokens, ratios, same_answers
from .result import (
    AnswerTimes,
    BenchSettings,
    ClientMachine,
    DraftingUse,
    RatioResult,
    Result,
    RunResult,
    SameAnswers,
    ServerFacts,
    State,
    WorkloadFacts,
)
from .runs import BenchPlan
from .workloads import Calibration

_FINISHES: Final = frozenset({"stop", "length", "tool_calls"})
_KINDS: Final = frozenset({"native_mtp", "block_drafter", "prompt_lookup", "none"})
_POLICIES: Final = frozenset({"adaptive", "fixed"})


@dataclass(slots=True)
class Record:
    """A bench so far: facts at first, then a run after the other."""

    date: str
    client: ClientMachine
    settings: BenchSettings
    runs_planned: int
    servers: Sequence[ServerFacts] = ()
    state: State = "running"
    runs: list[BenchRun] = field(default_factory=list[BenchRun])
    _results: list[RunResult] = field(default_factory=list[RunResult])

    def add(self, run: BenchRun) -> None:
        self.runs.append(run)
        self._results.append(_result(run))

    def result(self) -> Result:
        return Result(
            date=self.date,
            state=self.state,
            runs_planned=self.runs_planned,
            client=self.client,
            settings=self.settings,
            servers=tuple(
                facts.model_copy(update={"drafting": drafting(self.runs, facts.name)})
                for facts in self.servers
            ),
            runs=tuple(self._results),
            ratios=tuple(self._ratios()),
            same_answers=tuple(
                SameAnswers(other=other.name, both=both, same=same)
                for other in self.servers[1:]
                for both, same in [same_answers(self.runs, self.servers[0].name, other.name)]
            ),
        )

    def _ratios(self) -> Iterator[RatioResult]:
        for other in self.servers[1:]:
            cells = ratios(self.runs, self.servers[0].name, other.name)
            for (workload, clients), of_cell in cells.items():
                for figure, ratio in of_cell.items():
                    yield RatioResult(
                        other=other.name,
                        workload=workload,
                        max_concurrency=clients,
                        figure=figure,
                        median=ratio.median,
                        least=ratio.least,
                        most=ratio.most,
                    )


def drafting(runs: Sequence[BenchRun], server: str) -> tuple[DraftingUse, ...]:
    """The kinds of drafting in a server's answers, the most frequent first."""
    ways = Counter(
        (
            _if_listed(d.drafter_kind, _KINDS),
            _if_listed(d.draft_policy, _POLICIES),
            d.num_draft_tokens,
        )
        for run in runs
        if run.server == server
        for answer in run.good
        if (d := answer.drafts)
    )
    return tuple(
        DraftingUse(
            drafter_kind=kind or "other", draft_policy=policy, num_draft_tokens=k, answers=n
        )
        for (kind, policy, k), n in ways.most_common()
    )


def settings_of(plan: BenchPlan, calibration: Calibration) -> BenchSettings:
    """The settings of a plan. Texts and lists of the extra body may be private."""
    return BenchSettings(
        workloads=tuple(
            WorkloadFacts(
                name=workload.name,
                prompt_tokens=workload.tokens,
                questions=len(workload.questions),
                turns=workload.turns,
                tool_tokens=workload.tool_tokens,
            )
            for workload in plan.workloads
        ),
        concurrency=plan.concurrencies,
        requests=plan.requests,
        repeats=plan.repeats,
        output_tokens=plan.output_tokens,
        limit_s=plan.limit_s,
        silence_s=plan.silence_s,
        temperature=plan.temperature,
        seed=plan.seed,
        prompt_tokens_by=calibration.source,
        extra_fields={n: value if _is_number(value) else None for n, value in plan.extra.items()},
    )


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)


def _result(run: BenchRun) -> RunResult:
    return RunResult(
        server=run.server,
        workload=run.workload,
        max_concurrency=run.concurrency,
        repeat=run.repeat,
        output_tokens_by=counted_by(run.good),
        figures=figures(run),
        failures=dict(Counter(a.failure.kind for a in run.answers if a.failure)),
        answers=tuple(map(_times, run.answers)),
    )


def _times(answer: Answer) -> AnswerTimes:
    finish = answer.finish_reason
    return AnswerTimes(
        turn=answer.turn,
        events_s=tuple(round(at - answer.started, 6) for at in answer.chunks),
        end_s=round(answer.ended - answer.started, 6),
        prompt_tokens=answer.usage.prompt_tokens if answer.usage else None,
        cached_tokens=answer.usage.cached_tokens if answer.usage else None,
        output_tokens=None if answer.failure else output_tokens(answer),
        finish_reason=(_if_listed(finish, _FINISHES) or "other") if finish else None,
        failure=answer.failure.kind if answer.failure else None,
    )


def _if_listed(text: str | None, words: frozenset[str]) -> str | None:
    """A word of a server, only if it is one of those that the API has."""
    return text if text in words else None
