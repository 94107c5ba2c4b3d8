"""A stage's view of a model's layers: its own ones, and proxies that skip the others."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx import nn


@dataclass(slots=True)
class LayerCalls:
    """How a model calls its layers, recorded while it builds the graph of one row."""

    caches: int
    """The number of caches of one request."""
    extra_outputs: int = -1
    """Outputs of a layer beside hidden states, as a tuple, or -1 if it returns an array."""
    caches_by_call: list[tuple[int, frozenset[int]]] = field(
        default_factory=list[tuple[int, frozenset[int]]]
    )
    """Each call in order: the layer, and the indices of the caches that it got."""

    def fault(self, layers: int) -> str:
        """The reason why layers cannot be skipped one by one; empty if they can."""
        order = [index for index, _ in self.caches_by_call]
        if not order:
            return "it runs parts of its layers itself and calls no layer"
        if len(order) > len(set(order)):
            return "it runs its layers more than once for a token"
        return "" if order == list(range(layers)) else "it does not run its layers in order"


class Slot:
    """The input and output of a view during one call of the model."""

    input: mx.array | None = None
    output: mx.array | None = None
    is_lazy: bool = False
    """Whether no layer is computed while the graph is built."""


class _LayerProxy(nn.Module):
    """A stand-in with a layer's attributes and class, but not its parameters."""

    def __init__(self, layer: nn.Module, **parts: Any) -> None:
        super().__init__()
        # Past nn.Module's bookkeeping, so that the layer's lazy weights are not parameters here.
        for name, value in {"_layer": layer, **parts}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_layer"), name)

    @property
    def __class__(self) -> type[nn.Module]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The layer's class: models test it with isinstance."""
        return self._layer.__class__


class _SkippedLayer(_LayerProxy):
    """A proxy of a layer that another stage owns: passes its input on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _outputs(_input_of(args, kwargs), self._more)


class _WatchedLayer(_LayerProxy):
    """A skipped layer that records which of a request's caches it gets.

    The first one is called (nothing is computed) to learn what layers of this model return.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls: LayerCalls = self._calls
        arguments = {id(value) for value in (*args, *kwargs.values())}
        own_caches = frozenset(j for j, cache in enumerate(self._caches) if id(cache) in arguments)
        calls.caches_by_call.append((self._index, own_caches))
        if self._index == 0:
            out = self._layer(*args, **kwargs)
            calls.extra_outputs = (
                len(cast("tuple[Any, ...]", out)) - 1 if isinstance(out, tuple) else -1
            )
            return cast(Any, out)
        return _outputs(_input_of(args, kwargs), calls.extra_outputs)


def _input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> mx.array:
    """The hidden states: the first argument, by position or (GPT-J) by keyword."""
    return args[0] if args else next(iter(kwargs.values()))


def _outputs(x: mx.array, extra_outputs: int) -> Any:
    return x if extra_outputs < 0 else (x, *[None] * extra_outputs)


class _TappedLayer(_LayerProxy):
    """A layer that takes its input from the slot (`enter`) or puts its output there (`leave`)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slot: Slot = self._slot
        enter, leave = self._ends
        if enter and args:
            args = (slot.input, *args[1:])
        elif enter:
            kwargs = {**kwargs, next(iter(kwargs)): slot.input}
        out = self._layer(*args, **kwargs)
        if leave:
            slot.output = _hidden_of(out)
        return out


@dataclass(slots=True)
class LayerRecords:
    """Inputs and outputs of a whole model's layers in one call, by layer."""

    inputs: dict[int, mx.array] = field(default_factory=dict[int, mx.array])
    outputs: dict[int, mx.array] = field(default_factory=dict[int, mx.array])


class _RecordedLayer(_LayerProxy):
    """A layer whose input and output are recorded."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        records: LayerRecords = self._records
        out = self._layer(*args, **kwargs)
        records.inputs[self._index] = _input_of(args, kwargs)
        records.outputs[self._index] = _hidden_of(out)
        return out


class _EagerLayer(_LayerProxy):
    """A layer that is computed while the graph of the layers after it is being built.

    Nothing else hides that time on a stage: it cannot build a graph before it has the input.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._layer(*args, **kwargs)
        slot: Slot = self._slot
        if not slot.is_lazy:
            mx.async_eval(_hidden_of(out))
        return out


def _hidden_of(out: Any) -> mx.array:
    """A layer's hidden states. Some return a tuple with shared keys and values or an offset."""
    return cast("tuple[mx.array]", out)[0] if isinstance(out, tuple) else out


def watched_layers(
    layers: Sequence[nn.Module], caches: Sequence[object], calls: LayerCalls
) -> list[nn.Module]:
    """Proxies that skip the layers and fill `calls`."""
    return [
        _WatchedLayer(layer, _index=i, _calls=calls, _caches=caches)
        for i, layer in enumerate(layers)
    ]


def recorded_layers(layers: Sequence[nn.Module], records: LayerRecords) -> list[nn.Module]:
    """The layers with their inputs and outputs written to `records`."""
    return [_RecordedLayer(layer, _index=i, _records=records) for i, layer in enumerate(layers)]


def stage_view(
    layers: Sequence[nn.Module], first: int, end: int, slot: Slot, extra_outputs: int
) -> list[nn.Module]:
    """The layers as stage [first, end) calls them.

    For no layers, the last one only passes on the slot's input.
    """
    own = range(first, end)
    proxies = [
        x if i in own else _SkippedLayer(x, _more=extra_outputs) for i, x in enumerate(layers)
    ]
    if not own:
        proxies[-1] = _TappedLayer(proxies[-1], _slot=slot, _ends=(True, False))
        return proxies
    if first:
        proxies[first] = _TappedLayer(proxies[first], _slot=slot, _ends=(True, first == end - 1))
    if not first or first != end - 1:
        proxies[end - 1] = _TappedLayer(proxies[end - 1], _slot=slot, _ends=(False, True))
    # After own layers 1, 2, 4, ..: building is faster than computing, so few evaluations hide it.
    for i in range(first, end - 1):
        count = i - first + 1
        if count & (count - 1) == 0:
            proxies[i] = _EagerLayer(proxies[i], _slot=slot)
    return proxies
