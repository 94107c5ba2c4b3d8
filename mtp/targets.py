"""The target model: ids in, logits and perhaps hidden states out."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx import nn

from .families.family import Family
from .families.placed_rope import RopePositions
from .seams import ForwardOutput, Want


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
        """`padding`: the id of rows after a prompt's end, which no other row sees."""
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
            hidden = cast("Family", self._family).hidden_of(tokens[None], embeddings, caches)
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


class LayerTaps:
    """Layers of a loaded model whose outputs can be collected while a forward is built."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Replaces each layer's class by one that computes the same."""
        self._outputs: list[list[mx.array]] | None = None
        for index, layer in enumerate(layers):
            layer.__class__ = self._tapped(type(layer), index)
        self._count = len(layers)

    @contextmanager
    def collected(self) -> Generator[list[list[mx.array]]]:
        """Collects outputs (B, rows, H), by layer and in the order of the calls."""
        self._outputs = outputs = [list[mx.array]() for _ in range(self._count)]
        try:
            yield outputs
        finally:
            self._outputs = None

    def note(self, index: int, out: Any) -> None:
        """Adds a layer's output, which some return in a tuple, if outputs are collected."""
        if self._outputs is not None:
            hidden = cast("tuple[Any]", out)[0] if isinstance(out, tuple) else out
            self._outputs[index].append(hidden)

    def _tapped(self, stock: type[nn.Module], index: int) -> type[nn.Module]:
        taps = self

        class Tapped(stock):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                out = cast(Any, super()).__call__(*args, **kwargs)
                taps.note(index, out)
                return out

        Tapped.__name__ = stock.__name__
        return Tapped


class TappedTarget:
    """A target whose hidden states are made of the outputs of some of its layers."""

    def __init__(
        self,
        target: "FamilyTarget | WholeTarget",
        taps: LayerTaps,
        join: Callable[[Sequence[mx.array]], mx.array],
        *,
        with_hidden: bool = False,
    ) -> None:
        """`join`: outputs (B, rows, H) of the tapped layers -> (B, rows, H). `with_hidden`: after
        the target's own hidden states."""
        self.plain, self._taps, self._join = target, taps, join
        self._with_hidden = with_hidden
        self.rope_positions = target.rope_positions

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[object],
        *,
        want: Want,
        embeddings: mx.array | None = None,
    ) -> ForwardOutput:
        with self._taps.collected() as outputs:
            out = self.plain.forward(tokens, caches, want=want, embeddings=embeddings)
        return ForwardOutput(out.logits, self._hidden(out.hidden, outputs))

    def forward_batch(
        self, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array | None]:
        with self._taps.collected() as outputs:
            logits, hidden = self.plain.forward_batch(tokens, caches)
        return logits, self._hidden(hidden, outputs)

    def _hidden(self, own: mx.array | None, outputs: Sequence[list[mx.array]]) -> mx.array:
        joined = self._join([mx.concatenate(each, axis=1) for each in outputs])
        if not self._with_hidden:
            return joined
        assert own is not None, "a family gives hidden states"
        return mx.concatenate([own, joined.astype(own.dtype)], axis=-1)


class Layers(Protocol):
    """A whole model's layers, and what comes after them."""

    def hidden(
        self,
        tokens: mx.array,
        entering: None,
        caches: Sequence[Any],
        embeddings: mx.array | None = None,
        *,
        is_lazy: bool,
    ) -> mx.array:
        """Appends ids (B, rows) to the caches -> (B, rows, H). `is_lazy`: it computes nothing."""
        ...

    def logits(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Hidden (1, rows, H) of ids (1, rows) -> (1, rows, V)."""
        ...


class WholeTarget:
    """Any other model: one call gives logits."""

    def __init__(
        self,
        model: nn.Module,
        rope_positions: RopePositions | None = None,
        layers: Layers | None = None,
    ) -> None:
        """`layers`: those of `model` if a prompt's end is read through them, as stages read it."""
        self._model: Any = model
        self.rope_positions = rope_positions or RopePositions()
        self._layers = layers

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[object],
        *,
        want: Want,
        embeddings: mx.array | None = None,
    ) -> ForwardOutput:
        ids, positions = tokens[None], self.rope_positions
        if want == "last" and self._layers is not None:
            hidden = self._layers.hidden(ids, None, caches, embeddings, is_lazy=True)
            return ForwardOutput(self._layers.logits(ids[:, -1:], hidden[:, -1:])[0], None)
        if want == "last" and ids.shape[1] > 1 and positions.places is None:
            # Logits of every row of a chunk would cost more than one more row does. A prompt with
            # images ends with text.
            _ = self._logits(ids[:, :-1], caches, embeddings)
            ids = ids[:, -1:]
            embeddings = None if embeddings is None else embeddings[:, -1:]
        logits = self._logits(ids, caches, embeddings)[0]  # lazy: free unless they are read
        return ForwardOutput(logits[:0] if want == "none" else logits, None)

    @property
    def reads_ends(self) -> bool:
        """Whether a prompt's last row is read with those before it; else apart."""
        return self._layers is not None

    def forward_batch(
        self, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array | None]:
        return self._logits(tokens, caches), None

    def _logits(
        self, ids: mx.array, caches: Sequence[object], embeddings: mx.array | None = None
    ) -> mx.array:
        """`embeddings`: of the ids and perhaps of more after them."""
        if embeddings is None:
            return self._model(ids, cache=caches)
        own = embeddings[:, : ids.shape[1]]
        return self._model(ids, cache=caches, input_embeddings=own)
