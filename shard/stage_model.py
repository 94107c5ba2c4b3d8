"""The layers [a, b) of any mlx-lm model, reading only their tensors.

The model itself is not changed. Its list of layers is swapped for one in which the layers that
another stage owns pass their input on, the first own layer takes the hidden that was received and
the last one gives its output away. What the model computes around them (embedding, norm, lm_head)
is lazy and never evaluated unless this stage needs it.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import (
    _get_classes,  # pyright: ignore[reportPrivateUsage]
    load_model,
)

from ..mtp.family import prepare
from ..mtp.rollback import takes_tapes, with_tapes
from ..mtp.weights import cast_parameters
from ..placement.errors import InvalidCheckpoint, LoadFailed
from .layer_meter import LayerMeter

MODEL_FAULTS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SystemExit,  # of a class whose import lacks a library
    TypeError,
    ValueError,
)
"""What a model class raises for a config.json it was not written for."""

Progress = Callable[[int, int], None]
"""Bytes of weights in memory so far, and in all."""


_HEAD = re.compile(
    r"(?:language_model\.)?(?:model\.)?(?:language_model\.)?(?:mtp\.|layers\.(?P<layer>\d{1,6})\.)"
)
"""A tensor of a draft head, or of a layer, which may be one."""


class _Slot:
    """What goes into and comes out of a view during one call of the model."""

    entering: mx.array | None = None
    leaving: mx.array | None = None
    computes: bool = True


class _PassedOver(nn.Module):
    """In place of a layer that another stage owns: its attributes, none of its parameters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Past nn.Module's bookkeeping, so that the layer's lazy weights are not parameters here.
        object.__setattr__(self, "_layer", layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_layer"), name)

    def __call__(self, x: mx.array, *_args: object, **_kwargs: object) -> mx.array:
        return x


class _Tapped(nn.Module):
    """A layer whose input is what the slot holds (`enter`) or whose output goes there (`leave`)."""

    def __init__(self, layer: nn.Module, slot: _Slot, *, enter: bool, leave: bool) -> None:
        super().__init__()
        for name, value in (("_layer", layer), ("_slot", slot), ("_ends", (enter, leave))):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_layer"), name)

    def __call__(self, x: mx.array, *args: object, **kwargs: object) -> mx.array:
        layer, slot = self._layer, self._slot
        enter, leave = self._ends
        out = layer(slot.entering if enter else x, *args, **kwargs)
        if leave:
            if not isinstance(out, mx.array):
                raise LoadFailed(
                    f"layers of {type(layer).__name__} return more than hidden states, so this "
                    "model cannot be split; place it on one node"
                )
            slot.leaving = out
        return out


class _Begun(nn.Module):
    """A layer that is computed while the graph of the layers after it is still being built.

    Nothing else hides that time on a stage: it cannot build ahead of a hidden that is not there.
    """

    def __init__(self, layer: nn.Module, slot: _Slot) -> None:
        super().__init__()
        for name, value in (("_layer", layer), ("_slot", slot)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_layer"), name)

    def __call__(self, x: mx.array, *args: object, **kwargs: object) -> Any:
        out = self._layer(x, *args, **kwargs)
        if self._slot.computes:
            mx.async_eval(out)
        return out


class StageModel:
    """A loaded model seen as layers [first, end): hidden in (or ids), hidden out (or logits)."""

    def __init__(self, model: nn.Module, first: int, end: int) -> None:
        self.model = model
        self.first = first
        self.end = end
        self._owner, self._key, self._layers = _find_layers(model)
        self.num_layers = len(self._layers)
        self._takes_tapes = takes_tapes(model)
        self.meter = LayerMeter()
        """What its forwards take: nothing, unless a runner puts one that measures here."""
        self._slot = _Slot()
        self._body = self._view(first, end)
        self._tail = self._view(self.num_layers, self.num_layers)

    def make_caches(self) -> list[Any]:
        """One request's caches, one entry for each layer of the whole model.

        The entries of other stages' layers are aliases of own ones of the same kind: models take
        a mask's offset from the first attention layer, which may not be here.
        """
        caches: list[Any] = make_prompt_cache(self.model)
        if self._takes_tapes:
            caches = with_tapes(caches)
        if len(caches) != self.num_layers:
            return caches
        own = range(self.first, self.end)
        for i in range(self.num_layers):
            if i not in own:
                same = [caches[j] for j in own if _kind(caches[j]) == _kind(caches[i])]
                caches[i] = same[0] if same else caches[i]
        return caches

    def own_caches(self, caches: Sequence[Any]) -> list[Any]:
        """The entries that this stage's layers write."""
        if len(caches) != self.num_layers:
            return list(caches)
        return list(caches[self.first : self.end])

    def hidden(
        self, tokens: mx.array, entering: mx.array | None, caches: Sequence[Any]
    ) -> mx.array:
        """Ids (1, n) and, unless the first layer is here, hidden (1, n, H) -> hidden (1, n, H)."""
        _ = self._call(self._body, tokens, entering, caches)
        leaving = self._slot.leaving
        assert leaving is not None
        return leaving

    def check_splits(self, hidden_size: int) -> None:
        """Raises LoadFailed where hidden states are not all that goes from layer to layer.

        The graph of one row shows it; nothing is computed.
        """
        token, row = mx.zeros((1, 1), mx.int32), mx.zeros((1, 1, hidden_size))
        self._slot.computes = False
        try:
            found: object = self.hidden(token, row, self.make_caches()).shape
        except MODEL_FAULTS as fault:
            found = fault
        finally:
            self._slot.computes = True
        if found != row.shape:
            raise LoadFailed(
                f"a layer of {type(self.model).__module__} gives {found} where hidden states are "
                f"{row.shape}, so this model cannot be split; place it on one node"
            )

    def logits(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """The last stage's hidden (1, n, H) of ids (1, n) -> (1, n, V). Needs the outer weights."""
        return self._call(self._tail, tokens, hidden, None)

    def _call(
        self,
        view: list[nn.Module],
        tokens: mx.array,
        entering: mx.array | None,
        caches: Sequence[Any] | None,
    ) -> mx.array:
        self._slot.entering, self._slot.leaving = entering, None
        self._owner[self._key] = view
        try:
            return cast(Any, self.model)(tokens, cache=caches)
        finally:
            self._owner[self._key] = self._layers
            self._slot.entering = None

    def _view(self, first: int, end: int) -> list[nn.Module]:
        own = range(first, end)
        view = [x if i in own else _PassedOver(x) for i, x in enumerate(self._layers)]
        if not own:
            view[-1] = _Tapped(view[-1], self._slot, enter=True, leave=False)
            return view
        if first:
            view[first] = _Tapped(view[first], self._slot, enter=True, leave=first == end - 1)
        if not first or first != end - 1:
            view[end - 1] = _Tapped(view[end - 1], self._slot, enter=False, leave=True)
        # After own layers 1, 2, 4, ..: building is faster than computing, so few starts hide it.
        for i in range(first, end - 1):
            done = i - first + 1
            if done & (done - 1) == 0:
                view[i] = _Begun(view[i], self._slot)
        return view


def load_whole_or_stage(
    folder: Path,
    first: int,
    end: int,
    dtype: mx.Dtype | None,
    *,
    outer: bool,
    progress: Progress,
) -> tuple[nn.Module, int]:
    """Loads layers [first, end) and, for the generator (`outer`), embedding, norm and lm_head.

    Returns the model, whose other layers stay unevaluated, and the bytes of weights in memory.
    `dtype` None keeps the checkpoint's. Raises InvalidCheckpoint.
    """
    try:
        model = _load_backbone(folder)
    except MODEL_FAULTS as fault:
        raise InvalidCheckpoint(
            f"{folder.name} cannot be loaded: {fault}; the checkpoint or its config.json does not "
            "fit an architecture of the installed mlx-lm"
        ) from fault
    model.eval()
    if dtype is not None:
        cast_parameters(model, dtype)
    prepare(model)
    layers = _find_layers(model)[2]
    if not 0 <= first < end <= len(layers):
        raise LoadFailed(f"layers [{first}, {end}) do not exist: the model has {len(layers)}")
    others = {id(p) for layer in layers for p in _parameters(layer)}
    parts = [_parameters(layers[i]) for i in range(first, end)]
    if outer:
        parts.append([p for p in _parameters(model) if id(p) not in others])
    total = sum(p.nbytes for part in parts for p in part)
    done = 0
    for part in parts:  # one layer at a time: a cast holds both copies until it is evaluated
        mx.eval(part)
        done += sum(p.nbytes for p in part)
        progress(done, total)
    return model, total


def _load_backbone(folder: Path) -> nn.Module:
    """mlx-lm's model without the tensors of a draft head, which not every class of it drops.

    Its deepseek_v3 knows layer 61 as the one too many, and qwen3_next keeps `mtp.*` of converted
    checkpoints; both then refuse what they do not know.
    """
    stock: list[type[nn.Module]] = []

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        found, arguments = _get_classes(config)
        stock.append(found)
        return _without_head(found), arguments

    model, _ = load_model(
        folder, lazy=True, model_config=_renamed(folder), get_model_classes=classes
    )
    model.__class__ = stock[0]
    return model


def _without_head(model_class: type[nn.Module]) -> type[nn.Module]:
    class Backbone(model_class):
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            kept = _backbone_only(weights, len(cast(Any, self).layers))
            stock = getattr(super(), "sanitize", None)
            return kept if stock is None else stock(kept)

    return Backbone


def _backbone_only(weights: dict[str, mx.array], layers: int) -> dict[str, mx.array]:
    """Layers past the last are a head's if they say so, else a config's mistake."""
    matches = {name: match for name in weights if (match := _HEAD.match(name))}
    heads = {m["layer"] for m in matches.values() if m.string.endswith(".eh_proj.weight")}
    dropped = {
        name
        for name, match in matches.items()
        if (layer := match["layer"]) is None or (layer in heads and int(layer) >= layers)
    }
    return {name: value for name, value in weights.items() if name not in dropped}


def _parameters(module: nn.Module) -> list[mx.array]:
    return [cast("mx.array", value) for _, value in tree_flatten(module.parameters())]


def _renamed(folder: Path) -> dict[str, str]:
    """Text-only exports name a type that mlx-lm knows under the multimodal model's name."""
    kind = json.loads((folder / "config.json").read_text()).get("model_type", "")
    known = known_type(kind)
    return {} if known == kind else {"model_type": known}


def known_type(model_type: str) -> str:
    """mlx-lm's name of a text model, which is without `_text` where it has no class for that."""
    short = model_type.removesuffix("_text")
    if short == model_type or importlib.util.find_spec(f"mlx_lm.models.{model_type}") is not None:
        return model_type
    return short


def _find_layers(model: nn.Module) -> tuple[Any, str, list[nn.Module]]:
    """The module that owns the list of decoder layers, the list's name there, and the list."""
    wanted = cast(Any, model).layers
    for _, module in model.named_modules():
        for name, value in module.items():
            if isinstance(value, list) and any(item is wanted[0] for item in value):
                return module, name, value
    raise InvalidCheckpoint(f"{type(model).__name__} has no list of decoder layers")


def _kind(cache: object) -> tuple[object, ...]:
    sizes = (getattr(cache, name, None) for name in ("max_size", "chunk_size"))
    return (type(cache), *sizes)
