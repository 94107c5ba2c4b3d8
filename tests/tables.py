"""Fakes of the loop's seams: a target and a drafter that are tables over a tiny vocabulary."""

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from exo_node.mtp.drafters import NoDrafter
from exo_node.mtp.loop import Generation
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import Block, Drafter, Drafts, Wait, Want, as_ids, as_row
from exo_node.mtp.steps import Step
from exo_node.mtp.task import Task
from exo_node.mtp.types import FinishReason, Round, Sampling

Logits = npt.NDArray[np.float32]
"""(positions, vocabulary, vocabulary): the logits after a token at a position."""

PROMPT = (1, 0, 2)


def random_table(vocabulary: int, seed: int, positions: int = 64, spread: float = 1.0) -> Logits:
    draws = np.random.default_rng(seed).normal(size=(positions, vocabulary, vocabulary))
    return (spread * draws).astype(np.float32)


def hidden_of(first: int, ids: Sequence[int]) -> mx.array:
    """(1, n, 2): a hidden that names its row, so that a drafter can tell what it was shown."""
    return mx.array([[[first + i, token] for i, token in enumerate(ids)]], dtype=mx.int32)


@dataclass
class TableVerifier:
    """The `Verifier` whose logits are rows of a table; it keeps what was written and called."""

    table: Logits
    overlaps: bool = False
    takes_back: bool = True
    waits: bool = False
    """Whether each forward first yields a `Wait` on a future that is done."""
    ids: list[int] = field(default_factory=list[int])
    calls: list[str] = field(default_factory=list[str])
    last_rows: int = 0

    def __post_init__(self) -> None:
        self._table = mx.array(self.table)

    @property
    def position(self) -> int:
        return len(self.ids)

    def forward(self, tokens: mx.array, *, want: Want) -> Generator[Wait, None, Block]:
        if self.waits:
            done: Future[None] = Future()
            done.set_result(None)
            yield Wait(done)
        ids, start = as_ids(tokens), self.position
        self.calls.append(f"forward {len(ids)} {want}")
        self.ids += ids
        self.last_rows = len(ids)
        logits = self._table[mx.arange(start, start + len(ids)), tokens]
        rows = {"all": logits, "last": logits[-1:], "none": logits[:0]}[want]
        return Block(rows, hidden_of(start, ids))

    def rollback(self, rows: int) -> None:
        assert self.takes_back
        assert 0 < rows <= self.last_rows, "only rows of the last forward can be taken back"
        self.calls.append(f"rollback {rows}")
        del self.ids[-rows:]
        self.last_rows = 0

    def arrays(self) -> list[mx.array]:
        return []


class TableDrafter:
    """The `Drafter` that draws from a table of its own; it keeps each (row, next token) seen."""

    rests = False

    def __init__(
        self, table: Logits, chooser: Sampler, k: int, *, says_finite: bool = False
    ) -> None:
        """`says_finite`: its drafts tell whether their logits were, so that it may be parked."""
        self.k = k
        self._says_finite = says_finite
        self.seen: list[tuple[int, int, int]] = []
        """(position, the id there, the id after it), as committed."""
        self.asked: list[int] = []
        self._table = mx.array(table)
        self._sampler = chooser

    def draft(self, k: int, position: int) -> Drafts:
        assert 0 < k <= self.k
        assert position == self.seen[-1][0] + 2, "drafts continue after the last committed token"
        self.asked.append(k)
        token = as_row([self.seen[-1][2]])
        drafts: list[Drafts] = []
        for at in range(position, position + k):
            drafts.append(self._sampler.draft(self._table[at - 1, token], at, drafts))
            token = drafts[-1].tokens
        rows = [d.log_probabilities for d in drafts if d.log_probabilities is not None]
        ids = [d.support for d in drafts if d.support is not None]
        finite = [d.finite for d in drafts if self._says_finite and d.finite is not None]
        tokens = mx.concatenate([d.tokens for d in drafts])
        return Drafts(
            tokens, *(mx.concatenate(each) if each else None for each in (rows, ids, finite))
        )

    def observe(self, hidden: mx.array | None, tokens: mx.array) -> None:
        assert hidden is not None
        named: list[list[int]] = hidden[0].tolist()  # pyright: ignore[reportAssignmentType]
        after = as_ids(tokens)
        assert len(named) == len(after)
        self.seen += [(at, token, then) for (at, token), then in zip(named, after, strict=True)]

    def catch_up(self) -> None:
        pass

    def arrays(self) -> list[mx.array]:
        return []


@dataclass
class EndAt:
    """The `Ending` of an answer at its `count`-th token, or at the first of `tokens`."""

    count: int = 1_000_000
    tokens: Sequence[int] = ()
    pushed: list[int] = field(default_factory=list[int])

    def push(self, token: int) -> FinishReason | None:
        self.pushed.append(token)
        return "stop" if len(self.pushed) == self.count or token in self.tokens else None


@dataclass(frozen=True, slots=True)
class Told:
    """What one run of the loop gave, and the fakes it left behind."""

    steps: tuple[Step, ...]
    reason: FinishReason
    verifier: TableVerifier
    drafter: Drafter

    @property
    def rounds(self) -> tuple[Round, ...]:
        return tuple(step for step in self.steps if isinstance(step, Round))

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for round_ in self.rounds for token in round_.tokens)


def tell(
    target: Logits,
    draft: Logits | None = None,
    k: int = 0,
    *,
    sampling: Sampling | None = None,
    entropy: int = 0,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 12,
    prefill_chunk: int = 256,
    replay: Sequence[Round] = (),
    ending: EndAt | None = None,
    says_finite: bool = False,
    **verifier: Any,
) -> Told:
    """Runs the real loop over tables to its end; `draft` None decodes plainly."""
    chooser = Sampler(sampling or Sampling(), entropy)
    fake = TableVerifier(target, **verifier)
    drafter = (
        NoDrafter() if draft is None else TableDrafter(draft, chooser, k, says_finite=says_finite)
    )
    task = Task(prompt, max_tokens, prefill_chunk, replay)
    generation = Generation(task, fake, drafter, chooser, ending or EndAt()).steps()
    steps: list[Step] = []
    while True:
        try:
            steps.append(next(generation))
        except StopIteration as end:
            return Told(tuple(steps), end.value, fake, drafter)
