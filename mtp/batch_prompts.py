"""Chunks of several prompts in one forward, each behind its own request's rows."""

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .batch_caches import BatchTapedCache, LoneCache, Positions, batched, can_read_together, own
from .parts import Parts
from .seams import FORWARD_FAULTS, Block, Wait, Want


class PromptTarget(Protocol):
    """A model that gives hidden states, so that logits are computed for the wanted rows only."""

    def hidden_batch(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        """Ids (B, n) appended -> (B, n, H)."""
        ...

    def forward(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block:
        """One request's."""
        ...

    def logits_of(self, hidden: mx.array) -> mx.array:
        """(1, n, H) -> (n, V)."""
        ...


SHARED: Final = "a forward that several prompts shared failed"


class PromptsBroken(Exception):
    """A forward that several prompts shared failed."""


@dataclass(slots=True, eq=False)
class _Ask:
    tokens: mx.array
    caches: Sequence[Any]
    position: int
    want: Want
    block: Block | None = None
    broken: bool = False
    came: "Future[None]" = field(default_factory=lambda: Future[None]())


class PromptBatch:
    """Meets the forwards over prompts that are wanted at the same time.

    The first one that asks gives the others a turn to ask, then computes for as many as fit into
    one chunk. All methods run on the compute thread.
    """

    def __init__(self, target: PromptTarget, rows: int, parts: Parts) -> None:
        """`rows`: of one forward at most, padding among them."""
        self._target = target
        self._parts = parts
        self._rows = rows
        self._asks: list[_Ask] = []

    def forward(
        self, tokens: mx.array, caches: Sequence[Any], position: int, want: Want
    ) -> Generator[Wait, None, Block]:
        """As `Verifier.forward`, for rows of a prompt. Raises PromptsBroken."""
        ask = _Ask(tokens, caches, position, want)
        self._asks.append(ask)
        try:
            if self._asks[0] is ask:
                yield Wait.a_turn()
            else:
                yield Wait(ask.came, reads=False)
                if ask.block is None and not ask.broken:
                    yield Wait.a_turn(reads=True)  # it leads the next forward, which is a chunk
            if ask.broken:
                raise PromptsBroken(SHARED)
            if ask.block is None:
                yield from self._run(ask)
            assert ask.block is not None
            return ask.block
        finally:
            if ask in self._asks:
                self._asks.remove(ask)
                self._promote()

    def _run(self, first: _Ask) -> Generator[Wait]:
        """Computes for as many as fit; they go on where `first` is cancelled between two parts."""
        group = self._group(first)
        self._asks = [ask for ask in self._asks if ask not in group]
        try:
            if len(group) == 1:
                first.block = self._target.forward(first.tokens, first.caches, want=first.want)
            else:
                self._read(group)
            yield from self._parts.computed([ask.caches for ask in group])
        except FORWARD_FAULTS as fault:
            for ask in group:
                ask.block = None  # nobody knows what the caches hold
            if len(group) > 1:
                raise PromptsBroken(SHARED) from fault
            raise
        finally:
            for ask in group[1:]:
                ask.broken = ask.block is None
                ask.came.set_result(None)
            self._promote()

    def _group(self, first: _Ask) -> list[_Ask]:
        group, widest = [first], first.tokens.shape[0]
        for ask in self._asks:
            wide = max(widest, ask.tokens.shape[0])
            alike = (ask.position == 0) == (first.position == 0)
            if ask is not first and alike and wide * (len(group) + 1) <= self._rows:
                group.append(ask)
                widest = wide
        return group if can_read_together(first.caches) else [first]

    def _read(self, group: Sequence[_Ask]) -> None:
        hidden = read_together(
            self._target,
            [ask.tokens for ask in group],
            [ask.caches for ask in group],
            [ask.position for ask in group],
        )
        for ask, rows in zip(group, hidden, strict=True):
            wanted = rows[:, :0] if ask.want == "none" else rows[:, -1:]
            ask.block = Block(self._target.logits_of(wanted), rows)

    def _promote(self) -> None:
        if self._asks and not self._asks[0].came.done():
            self._asks[0].came.set_result(None)


def read_together(
    target: PromptTarget,
    tokens: Sequence[mx.array],
    caches: Sequence[Sequence[Any]],
    positions: Sequence[int],
) -> list[mx.array]:
    """Appends each (n,) of `tokens` to its own `caches`, which hold `positions` rows; lazy.

    All of the caches are empty or none is. The hidden (1, n, H) of each.
    """
    counts = [ids.shape[0] for ids in tokens]
    width = max(counts)
    padded = mx.stack([mx.pad(ids, [(0, width - ids.shape[0])]) for ids in tokens])
    places = Positions(positions)
    together = batched(caches, places)
    for cache in together:
        if isinstance(cache, BatchTapedCache):
            # mlx-lm's way to leave out what is right of a request's end; each layer counts its own.
            cache.lengths = mx.array(counts, dtype=mx.int32)
    hidden = target.hidden_batch(padded, together)
    places.moved(counts)
    for index, theirs in enumerate(caches):
        for mine, cache in zip(theirs, together, strict=True):
            _fill(mine, cache.of(index))
    return [hidden[index : index + 1, :count] for index, count in enumerate(counts)]


def _fill(mine: Any, read: LoneCache) -> None:
    own(read)
    if isinstance(read, ArraysCache):
        mine.cache = read.cache
    else:
        mine.keys, mine.values, mine.offset = read.keys, read.values, read.offset
