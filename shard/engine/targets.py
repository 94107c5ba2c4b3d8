"""The target model: ids in, logits and perhaps hidden states out."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx import nn

from ...mtp.family import ImageFamily
from ...mtp.placed_rope import RopePositions
from ...mtp.seams import ForwardOutput, Want


class PromptReader(Protocol):
    """A whole model, or its first layers, as prefill uses it."""

    rope_positions: RopePositions
    """The positions that its ropes take in the next forward."""

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[object],
        *,
        want: Want,
        embeddings: mx.array | None = None,
    ) -> ForwardOutput:
        """Appends ids (rows,) of one request to its caches; lazy. `embeddings` (1, rows, H): in
        place of those of the ids."""
        ...


class Target(PromptReader, Protocol):
    """A whole model as decoding uses it."""

    def forward_batch(
        self, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array | None]:
        """Appends ids (B, rows): logits (B, rows, V) and perhaps hidden (B, rows, H); lazy."""
        ...


class HiddenStates(Protocol):
    """A model that gives hidden states; a `Family` is one."""

    def hidden(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        """Appends ids (B, rows) to the caches -> (B, rows, H)."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """(B, rows, H) of `hidden` -> (B, rows, V)."""
        ...


class FamilyTarget:
    """A model that gives hidden states: logits are computed for the needed rows only."""

    def __init__(
        self,
        family: HiddenStates,
        rope_positions: RopePositions | None = None,
        padding: int = 0,
    ) -> None:
        """`padding`: the id of rows behind a prompt's end; 0: no other row sees them anyway."""
        self._family = family
        self.padding = padding
        self.rope_positions = rope_positions or RopePositions()

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[object],
        *,
        want: Want,
        embeddings: mx.array | None = None,
    ) -> ForwardOutput:
        if embeddings is None:
            hidden = self._family.hidden(tokens[None], caches)
        else:
            hidden = cast("ImageFamily", self._family).hidden_of(embeddings, caches)
        rows = hidden if want == "all" else hidden[:, -1:]
        return ForwardOutput(self._family.logits(rows)[0], hidden)

    def forward_batch(
        self, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array | None]:
        hidden = self._family.hidden(tokens, caches)
        return self._family.logits(hidden), hidden

    def hidden_batch(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        """Appends ids (B, rows): hidden (B, rows, H)."""
        return self._family.hidden(tokens, caches)

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Hidden (1, rows, H) of `hidden_batch` -> logits (rows, V)."""
        return self._family.logits(hidden)[0]


class WholeTarget:
    """Any other model: one call gives logits."""

    def __init__(self, model: nn.Module, rope_positions: RopePositions | None = None) -> None:
        self._model: Any = model
        self.rope_positions = rope_positions or RopePositions()

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[object],
        *,
        want: Want,
        embeddings: mx.array | None = None,
    ) -> ForwardOutput:
        ids = tokens[None]
        if embeddings is not None:
            if want == "last" and self.rope_positions.places is None and ids.shape[1] > 1:
                # As below; a prompt ends with text.
                self._model(ids[:, :-1], cache=caches, input_embeddings=embeddings[:, :-1])
                ids, embeddings = ids[:, -1:], embeddings[:, -1:]
            logits = self._model(ids, cache=caches, input_embeddings=embeddings)[0]
            return ForwardOutput(logits[:0] if want == "none" else logits, None)
        if want == "last" and ids.shape[1] > 1:
            # Logits of every row of a chunk would cost more than one more row does.
            self._model(ids[:, :-1], cache=caches)
            ids = ids[:, -1:]
        logits = self._model(ids, cache=caches)[0]  # lazy: free unless they are read
        return ForwardOutput(logits[:0] if want == "none" else logits, None)

    def forward_batch(
        self, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array | None]:
        return self._model(tokens, cache=caches), None
