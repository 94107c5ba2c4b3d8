"""A loaded model as `exo-node verify` examines it: through the engine's own verifiers and loop."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ....mtp.ahead import AHEAD_BY, Ahead
from ....mtp.batch import Batch
from ....mtp.batch_drafter import BatchHead
from ....mtp.depth import FixedDepth
from ....mtp.drafters import NativeDrafter, NoDrafter
from ....mtp.family import draft_logits, family_of
from ....mtp.fixed_rows import FixedRows
from ....mtp.loop import Generation
from ....mtp.rollback import fixed_kinds
from ....mtp.sampler import Sampler
from ....mtp.seams import Block, Drafter, Verifier, Want, as_row
from ....mtp.steps import Steps
from ....mtp.task import Task
from ....mtp.types import FinishReason, Round, Sampling
from ...engine.batching import Batching
from ...engine.local import FamilyTarget, LocalVerifier, Target, WholeTarget
from ...kernels.install import used
from ...model.load import Loaded

MakeDrafter = Callable[[Sampler, int], NativeDrafter]
HEADLESS_K = 3
"""Blocks are measured up to here where the model drafts nothing itself."""


@dataclass(frozen=True, slots=True)
class ModelUnderTest:
    """`max_k` is the most drafts to check; `make_drafter` is None because of `no_drafts`."""

    target: Target
    make_caches: Callable[[], list[Any]]
    vocabulary: int
    dtype: mx.Dtype
    chunk: int
    max_k: int
    make_drafter: MakeDrafter | None
    batch_head: BatchHead | None = None
    no_drafts: str = ""
    special_tokens: tuple[int, ...] = ()
    runs_ahead: bool = False
    """Whether a node builds rounds while others run."""

    @property
    def depths(self) -> range:
        return range(1, self.max_k + 1)

    @property
    def no_rollback(self) -> str:
        """Why rows cannot be taken back; empty where they can."""
        kinds = fixed_kinds(self.make_caches())
        return f"rows cannot be taken back from its caches ({', '.join(kinds)})" if kinds else ""

    def verifier(self, fixed_rows: int = 0) -> Verifier:
        local = LocalVerifier(self.target, self.make_caches())
        return FixedRows(local, fixed_rows) if fixed_rows else local

    def ahead(self, verifier: Verifier, drafter: Drafter, sampler: Sampler) -> Ahead | None:
        """What builds an answer's rounds ahead, where a node would."""
        fits = isinstance(verifier, LocalVerifier) and type(drafter) is NativeDrafter
        if not self.runs_ahead or self.batch_head is None or not fits or not sampler.is_free:
            return None
        return Ahead(self.target, self.batch_head, cast("LocalVerifier", verifier), sampler)


class _Endless:
    """The `StopCondition` of an answer that only its budget ends."""

    def push(self, token: int) -> FinishReason | None:
        del token
        return None


def subject_of(loaded: Loaded, dtype: mx.Dtype, chunk: int, max_k: int) -> ModelUnderTest:
    """`max_k` 0: as far as the model drafts nothing, HEADLESS_K."""
    head, stage = loaded.head, loaded.model
    family = family_of(stage.model, None if head is None else head.hidden_kind)
    make_drafter: MakeDrafter | None = None
    batch_head: BatchHead | None = None
    if family is not None and head is not None and max_k:
        embed, logits = family.embed, draft_logits(family, head)
        batch_head = BatchHead(head, embed, logits)

        def made(sampler: Sampler, k: int) -> NativeDrafter:
            return NativeDrafter(head, embed, logits, sampler, k, overlap=True)

        make_drafter = made
    return ModelUnderTest(
        target=WholeTarget(stage.model) if family is None else FamilyTarget(family),
        make_caches=stage.make_caches,
        vocabulary=loaded.vocabulary,
        dtype=dtype,
        chunk=chunk,
        max_k=max_k or HEADLESS_K,
        make_drafter=make_drafter,
        batch_head=batch_head,
        no_drafts="" if make_drafter else loaded.head_state,
        special_tokens=loaded.codec.special_tokens if loaded.codec else (),
        runs_ahead=set(used(loaded.kernels)) >= AHEAD_BY,
    )


def forward(verifier: Verifier, ids: Sequence[int], want: Want = "all") -> Block:
    """One forward of a verifier that never waits, computed."""
    try:
        wait = next(verifier.forward(as_row(ids), want=want))
    except StopIteration as end:
        block: Block = end.value
        mx.eval(block.logits)
        return block
    raise AssertionError(f"a local verifier waits for {wait}")


def answer(
    subject: ModelUnderTest,
    prompt: Sequence[int],
    k: int,
    tokens: int,
    *,
    sampling: Sampling | None = None,
    fixed_rows: int = 0,
    top: int | None = None,
    watch: Callable[[NativeDrafter], Drafter] = lambda drafter: drafter,
) -> tuple[Round, ...]:
    """The rounds of an answer of exactly `tokens` tokens, through the loop that requests take.

    `watch` may wrap the drafter; `top` as in `Task.top_logprobs`.
    """
    sampler = Sampler(sampling or Sampling(), 1, subject.special_tokens, prompt)
    drafter: Drafter = NoDrafter()
    if k:
        assert subject.make_drafter is not None
        drafter = watch(subject.make_drafter(sampler, k))
    task = Task(prompt, tokens, subject.chunk, top_logprobs=top)
    verifier = subject.verifier(fixed_rows)
    ahead = None if top is not None else subject.ahead(verifier, drafter, sampler)
    steps = Generation(task, verifier, drafter, sampler, _Endless(), ahead=ahead).steps()
    return tuple(step for step in steps if isinstance(step, Round))


def answer_together(
    subject: ModelUnderTest, prompts: Sequence[Sequence[int]], k: int, tokens: int
) -> list[tuple[Round, ...]]:
    """As `answer`, greedily and all at the same time, through the batch that requests take."""
    batching = Batching(Batch(subject.target, subject.batch_head, time.perf_counter))
    found: list[list[Round]] = [[] for _ in prompts]
    running = {index: _seated(subject, batching, p, k, tokens) for index, p in enumerate(prompts)}
    while running:
        for index in list(running):
            step = next(running[index], None)
            if step is None:
                del running[index]
            elif isinstance(step, Round):
                found[index].append(step)
    return [tuple(rounds) for rounds in found]


def _seated(
    subject: ModelUnderTest, batching: Batching, prompt: Sequence[int], k: int, tokens: int
) -> Steps:
    sampler = Sampler(Sampling(), 1, subject.special_tokens, prompt)

    drafter: Drafter = NoDrafter()
    if k:
        assert subject.make_drafter is not None
        drafter = subject.make_drafter(sampler, k)
    verifier = LocalVerifier(subject.target, subject.make_caches())
    task, depth = Task(prompt, tokens, subject.chunk), FixedDepth(k)
    return batching.steps(batching.seat(task, verifier, drafter, sampler, _Endless(), depth))


def ids_of(rounds: Sequence[Round]) -> tuple[int, ...]:
    return tuple(token for each in rounds for token in each.tokens)
