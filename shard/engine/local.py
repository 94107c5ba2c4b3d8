"""The verifier of a placement of one stage: the whole model in this process."""

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx import nn

from ...mtp.batch_prompts import PromptBatch
from ...mtp.family import Family
from ...mtp.parts import Parts
from ...mtp.rollback import cache_arrays, can_roll_back
from ...mtp.seams import Block, Wait, Want
from ..pipeline.request_state import RequestState


class Target(Protocol):
    """A whole model: ids in, logits and perhaps hidden out."""

    def forward(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block:
        """Ids (rows,) appended to the caches; lazy."""
        ...

    def forward_batch(
        self, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array | None]:
        """Ids (B, rows): logits (B, rows, V) and perhaps hidden (B, rows, H); lazy."""
        ...


class FamilyTarget:
    """A model whose family gives hidden states: logits are computed for the wanted rows only."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def forward(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block:
        hidden = self._family.hidden(tokens[None], caches)
        rows = hidden if want == "all" else hidden[:, -1:]
        return Block(self._family.logits(rows)[0], hidden)

    def forward_batch(
        self, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array | None]:
        hidden = self._family.hidden(tokens, caches)
        return self._family.logits(hidden), hidden

    def hidden_batch(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        """Ids (B, rows) -> (B, rows, H)."""
        return self._family.hidden(tokens, caches)

    def logits_of(self, hidden: mx.array) -> mx.array:
        """(1, rows, H) of `hidden_batch` -> (rows, V)."""
        return self._family.logits(hidden)[0]


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

    def forward_batch(
        self, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array | None]:
        return self._model(tokens, cache=caches), None


class LocalVerifier:
    """One request's caches over a shared target."""

    overlaps = True

    def __init__(
        self,
        target: Target,
        caches: Sequence[object],
        position: int = 0,
        prompts: PromptBatch | None = None,
        parts: Parts | None = None,
    ) -> None:
        """`caches` are the answer's alone and end with it; they hold `position` rows.

        `prompts`: where forwards over its prompt meet those of others; None: nowhere.
        `parts`: how those that meet nobody let others pass; None: they do not.
        """
        self._prompts = prompts
        self._parts = parts
        self._target = target
        self._caches = caches
        self.state = RequestState(list(caches), position)
        self.takes_back = can_roll_back(caches)

    @property
    def position(self) -> int:
        return self.state.position

    def hand_over(self) -> list[Any]:
        """The caches, which another one goes on with; none are here until `take_over`."""
        caches, self._caches, self.state.caches = list(self._caches), [], []
        return caches

    def take_over(self, caches: Sequence[Any], position: int) -> None:
        """Goes on behind `position` rows."""
        self._caches, self.state.caches = caches, list(caches)
        self.state.position, self.state.last_rows = position, 0

    def forward(self, tokens: mx.array, *, want: Want) -> Generator[Wait, None, Block]:
        if self._prompts is not None and want != "all":
            block = yield from self._prompts.forward(tokens, self._caches, self.position, want)
        else:
            block = self._target.forward(tokens, self._caches, want=want)
            if self._parts is not None and want != "all":
                yield from self._parts.computed([self._caches])
        self.state.wrote((tokens.shape[0],))
        return block

    def rollback(self, rows: int) -> None:
        self.state.go_back(self._caches, self.position - rows)

    def arrays(self) -> list[mx.array]:
        return cache_arrays(self._caches)
