"""A loaded model under test by `exo-node verify`, which uses the engine of requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx import nn

from ....mtp.caches.rollback import fixed_kinds, rollback
from ....mtp.probe import Subject
from ....mtp.sampler import Sampler
from ....mtp.seams import ForwardOutput, Want, as_row
from ....mtp.targets import Target
from ....mtp.types import Round, Sampling
from ...engine.drafter import DraftModel
from ...engine.round_forms import COUNTS_ON_DEVICE
from ...kernels.install import used
from ...model.draft_pair import targets_of
from ...model.load import Loaded
from ..bare_engine import bare_engine, bare_request, rounds_of

HEADLESS_K = 3
"""The largest K of measured blocks for a model that does not draft."""


@dataclass(frozen=True, slots=True)
class ModelUnderTest:
    """A model to check. `max_k`: the most drafts; `no_drafts`: the reason for no `draft_model`.

    `drafters`: all that may draft, of which `draft_model` does.
    """

    target: Target
    make_caches: Callable[[], list[Any]]
    vocabulary: int
    dtype: mx.Dtype
    chunk: int
    max_k: int
    draft_model: DraftModel | None = None
    no_drafts: str = ""
    special_tokens: tuple[int, ...] = ()
    runs_ahead: bool = False
    """Whether a node issues rounds before earlier ones are read."""
    modules: Sequence[nn.Module] = ()
    """The parts of the target."""
    drafters: Mapping[str, DraftModel] = field(default_factory=dict[str, DraftModel])

    @property
    def by_drafter(self) -> Mapping[str, "ModelUnderTest"]:
        """The same with each drafter, by its kind; by no name if there is one or none."""
        if len(self.drafters) < 2:
            return {"": self}
        return {kind: replace(self, draft_model=each) for kind, each in self.drafters.items()}

    @property
    def depths(self) -> range:
        """The numbers of drafts that are checked."""
        return range(1, self.max_k + 1)

    def probed(self, context_length: int) -> Subject:
        """The same as probes take it."""
        parts = self.target, self.make_caches, self.vocabulary, context_length
        return Subject(*parts, lambda: 0.0, modules=self.modules)

    @property
    def no_rollback(self) -> str:
        """The reason why rows cannot be rolled back; empty if they can."""
        kinds = fixed_kinds(self.make_caches())
        return f"rows cannot be taken back from its caches ({', '.join(kinds)})" if kinds else ""


class Forwards:
    """Forwards of one request, each computed before the next one."""

    def __init__(self, subject: ModelUnderTest, prompt: Sequence[int]) -> None:
        self.caches = subject.make_caches()
        self._target = subject.target
        self.prompt = self._forward(prompt, "last")
        """The result of the prompt's forward."""

    def logits(self, ids: Sequence[int]) -> mx.array:
        """Runs a forward of ids (n,); returns logits (n, V)."""
        return self._forward(ids, "all").logits

    def rollback(self, rows: int) -> None:
        """Drops the last `rows` rows of the last forward."""
        rollback(self.caches, rows)

    def _forward(self, ids: Sequence[int], want: Want) -> ForwardOutput:
        block = self._target.forward(as_row(ids), self.caches, want=want)
        mx.eval(block.logits)
        return block


def subject_of(loaded: Loaded, dtype: mx.Dtype, chunk: int, max_k: int) -> ModelUnderTest:
    """The model under test of a loaded stage. `max_k` 0 (no drafts): checks up to HEADLESS_K."""
    head, stage = loaded.head, loaded.model
    family, target = targets_of(stage, head)
    drafters = DraftModel.each_of(family, head) if max_k else {}
    model = next(iter(drafters.values()), None)
    return ModelUnderTest(
        target=target,
        make_caches=stage.make_caches,
        vocabulary=loaded.expected.vocabulary,
        dtype=dtype,
        chunk=chunk,
        max_k=max_k or HEADLESS_K,
        draft_model=model,
        no_drafts="" if model else loaded.head_state,
        special_tokens=loaded.codec.special_tokens if loaded.codec else (),
        runs_ahead=set(used(loaded.kernels)) >= COUNTS_ON_DEVICE,
        modules=stage.own_modules(outer=True),
        drafters={str(kind): each for kind, each in drafters.items()},
    )


def answers_together(
    subject: ModelUnderTest,
    prompts: Sequence[Sequence[int]],
    k: int,
    tokens: int,
    *,
    sampling: Sampling | None = None,
    top: int | None = None,
) -> list[tuple[Round, ...]]:
    """The rounds of answers of exactly `tokens` tokens, computed in one batch.

    Greedy without `sampling`. `top` as in `Request.top_logprobs`.
    """
    engine = bare_engine(
        subject.target,
        subject.make_caches,
        subject.draft_model,
        chunk=subject.chunk,
        runs_ahead=subject.runs_ahead,
    )
    requests = [
        bare_request(
            prompt,
            tokens,
            subject.chunk,
            k,
            sampler=Sampler(sampling or Sampling(), 1, subject.special_tokens, prompt),
            top_logprobs=top,
        )
        for prompt in prompts
    ]
    return rounds_of(engine, requests)


def answer(
    subject: ModelUnderTest,
    prompt: Sequence[int],
    k: int,
    tokens: int,
    *,
    sampling: Sampling | None = None,
    top: int | None = None,
) -> tuple[Round, ...]:
    """The rounds of one answer, as `answers_together` computes it."""
    (rounds,) = answers_together(subject, [prompt], k, tokens, sampling=sampling, top=top)
    return rounds
