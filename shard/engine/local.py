"""The verifier of a placement of one stage: the whole model in this process."""

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx import nn

from ...mtp.family import Family
from ...mtp.rollback import cache_arrays, can_roll_back, rollback
from ...mtp.seams import Block, Wait, Want


class Target(Protocol):
    """A whole model: ids in, logits and perhaps hidden out."""

    def forward(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block:
        """Ids (rows,) appended to the caches; lazy."""
        ...


class FamilyTarget:
    """A model whose family gives hidden states: logits are computed for the wanted rows only."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def forward(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block:
        hidden = self._family.hidden(tokens[None], caches)
        rows = hidden if want == "all" else hidden[:, -1:]
        return Block(self._family.logits(rows)[0], hidden)


class WholeTarget:
    """Any other model: one call gives logits."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model

    def forward(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block:
        ids = tokens[None]
        if want == "last" and ids.shape[1] > 1:
            # Logits of every row of a chunk would cost more than one more row does.
            self._model(ids[:, :-1], cache=caches)
            ids = ids[:, -1:]
        logits = self._model(ids, cache=caches)[0]  # lazy: those that nobody reads cost nothing
        return Block(logits[:0] if want == "none" else logits, None)


class LocalVerifier:
    """One request's caches over a shared target."""

    overlaps = True
    remote = False

    def __init__(self, target: Target, caches: Sequence[object]) -> None:
        """`caches` are the answer's alone and end with it."""
        self._target = target
        self._caches = caches
        self._rows = 0
        self.takes_back = can_roll_back(caches)

    @property
    def position(self) -> int:
        return self._rows

    def forward(self, tokens: mx.array, *, want: Want) -> Generator[Wait, None, Block]:
        self._rows += tokens.shape[0]
        return self._target.forward(tokens, self._caches, want=want)
        yield  # a generator that never waits: everything is in this process

    def again(self, token: mx.array) -> Generator[Wait, None, Block]:
        raise AssertionError("nothing is kept here of an earlier attempt")

    def repeat(self, tokens: mx.array, schedule: Sequence[int]) -> None:
        raise AssertionError("a drafter here needs the hidden of each forward")

    def rollback(self, rows: int) -> None:
        rollback(self._caches, rows)
        self._rows -= rows

    def arrays(self) -> list[mx.array]:
        return cache_arrays(self._caches)
