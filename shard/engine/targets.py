"""A whole model in this process: ids in, logits and perhaps hidden states out."""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx import nn

from ...mtp.family import Family
from ...mtp.seams import Block, Want


class PromptReader(Protocol):
    """A model, or its first layers: the ids of one request in."""

    def forward(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block:
        """Ids (rows,) appended to the caches; lazy."""
        ...


class Target(PromptReader, Protocol):
    """A whole model: ids in, logits and perhaps hidden out."""

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
