"""What a stage puts in the place of a model's layers: own ones, and others that are passed over."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx import nn


@dataclass(slots=True)
class Handing:
    """How a model calls its layers, seen in the graph of one row."""

    caches: int
    """Of one request, in all."""
    more: int = -1
    """What a layer gives beside hidden states, as a tuple; -1: it gives an array."""
    taken: list[tuple[int, frozenset[int]]] = field(
        default_factory=list[tuple[int, frozenset[int]]]
    )
    """Each call in order: the layer, and which caches it was given."""

    def fault(self, layers: int) -> str:
        """Why the layers cannot be passed over one by one; empty where they can."""
        order = [index for index, _ in self.taken]
        if not order:
            return "it runs parts of its layers itself and calls no layer"
        if len(order) > len(set(order)):
            return "it runs its layers more than once for a token"
        return "" if order == list(range(layers)) else "it does not run its layers in order"


class Slot:
    """What goes into and comes out of a view during one call of the model."""

    entering: mx.array | None = None
    leaving: mx.array | None = None
    computes: bool = True


class _InPlace(nn.Module):
    """Stands where a layer does: that layer for whoever asks, but for its parameters."""

    def __init__(self, layer: nn.Module, **parts: Any) -> None:
        super().__init__()
        # Past nn.Module's bookkeeping, so that the layer's lazy weights are not parameters here.
        for name, value in {"_layer": layer, **parts}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_layer"), name)

    @property
    def __class__(self) -> type[nn.Module]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Models ask with isinstance of which kind a layer is."""
        return self._layer.__class__


class _PassedOver(_InPlace):
    """In place of a layer that another stage owns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _handed(_entering(args, kwargs), self._more)


class _Watched(_InPlace):
    """A layer that is passed over, and notes which of a request's caches it is given.

    The first one is called (nothing is computed), to see what layers of this model hand on.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handing: Handing = self._handing
        given = {id(value) for value in (*args, *kwargs.values())}
        took = frozenset(j for j, cache in enumerate(self._caches) if id(cache) in given)
        handing.taken.append((self._index, took))
        if self._index == 0:
            out = self._layer(*args, **kwargs)
            handing.more = len(cast("tuple[Any, ...]", out)) - 1 if isinstance(out, tuple) else -1
            return cast(Any, out)
        return _handed(_entering(args, kwargs), handing.more)


def _entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> mx.array:
    """Hidden states come first, by position or (GPT-J) by a name of the class's own."""
    return args[0] if args else next(iter(kwargs.values()))


def _handed(x: mx.array, more: int) -> Any:
    return x if more < 0 else (x, *[None] * more)


class _Tapped(_InPlace):
    """A layer whose input is what the slot holds (`enter`) or whose output goes there (`leave`)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slot: Slot = self._slot
        enter, leave = self._ends
        if enter and args:
            args = (slot.entering, *args[1:])
        elif enter:
            kwargs = {**kwargs, next(iter(kwargs)): slot.entering}
        out = self._layer(*args, **kwargs)
        if leave:
            slot.leaving = _hidden_of(out)
        return out


@dataclass(slots=True)
class Notes:
    """What went into and came out of layers of a whole model in one call, by layer."""

    entered: dict[int, mx.array] = field(default_factory=dict[int, mx.array])
    left: dict[int, mx.array] = field(default_factory=dict[int, mx.array])


class _Noted(_InPlace):
    """A layer whose input and output are noted."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        notes: Notes = self._notes
        out = self._layer(*args, **kwargs)
        notes.entered[self._index] = _entering(args, kwargs)
        notes.left[self._index] = _hidden_of(out)
        return out


class _Begun(_InPlace):
    """A layer that is computed while the graph of the layers after it is still being built.

    Nothing else hides that time on a stage: it cannot build ahead of a hidden that is not there.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._layer(*args, **kwargs)
        if self._slot.computes:
            mx.async_eval(_hidden_of(out))
        return out


def _hidden_of(out: Any) -> mx.array:
    """Some layers give more: keys and values for layers that share them, an offset."""
    return cast("tuple[mx.array]", out)[0] if isinstance(out, tuple) else out


def watched(
    layers: Sequence[nn.Module], caches: Sequence[object], handing: Handing
) -> list[nn.Module]:
    """Layers that are passed over and fill `handing`."""
    return [
        _Watched(layer, _index=i, _handing=handing, _caches=caches)
        for i, layer in enumerate(layers)
    ]


def noted(layers: Sequence[nn.Module], notes: Notes) -> list[nn.Module]:
    """The layers as they are, which write `notes`."""
    return [_Noted(layer, _index=i, _notes=notes) for i, layer in enumerate(layers)]


def view(
    layers: Sequence[nn.Module], first: int, end: int, slot: Slot, more: int
) -> list[nn.Module]:
    """The list as the stage [first, end) has it; of no layers, what goes into the last one."""
    own = range(first, end)
    seen = [x if i in own else _PassedOver(x, _more=more) for i, x in enumerate(layers)]
    if not own:
        seen[-1] = _Tapped(seen[-1], _slot=slot, _ends=(True, False))
        return seen
    if first:
        seen[first] = _Tapped(seen[first], _slot=slot, _ends=(True, first == end - 1))
    if not first or first != end - 1:
        seen[end - 1] = _Tapped(seen[end - 1], _slot=slot, _ends=(False, True))
    # After own layers 1, 2, 4, ..: building is faster than computing, so few starts hide it.
    for i in range(first, end - 1):
        done = i - first + 1
        if done & (done - 1) == 0:
            seen[i] = _Begun(seen[i], _slot=slot)
    return seen
