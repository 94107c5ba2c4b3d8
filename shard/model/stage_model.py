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
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, make_prompt_cache
from mlx_lm.utils import (
    _get_classes,  # pyright: ignore[reportPrivateUsage]
    load_model,
)

from ...mtp.family import prepare
from ...mtp.rollback import takes_tapes, with_tapes
from ...mtp.seams import FORWARD_FAULTS
from ...mtp.weights import cast_parameters
from ...placement.cluster import layer_range
from ...placement.errors import InvalidCheckpoint, LoadFailed
from ...placement.split_refusal import SplitRefusal
from .kv_quantisation import KvQuantisation, quantised, unquantised
from .layer_view import Handing, Notes, Slot, noted, view, watched

REFUSED: Final = SplitRefusal("it cannot be split").param
"""The `param` of the error: this model may run on one node only."""
ONE_NODE: Final = "; place it on one node"
MODEL_FAULTS = (
    *FORWARD_FAULTS,
    ImportError,
    OSError,
    SystemExit,  # of a class whose import lacks a library
)
"""What a model class raises for a config.json it was not written for."""

Progress = Callable[[int, int], None]
"""Bytes of weights in memory so far, and in all."""


_HEAD = re.compile(
    r"(?:language_model\.)?(?:model\.)?(?:language_model\.)?(?:mtp\.|layers\.(?P<layer>\d{1,6})\.)"
)
"""A tensor of a draft head, or of a layer, which may be one."""


class StageModel:
    """A loaded model seen as layers [first, end): hidden in (or ids), hidden out (or logits)."""

    def __init__(
        self, model: nn.Module, first: int, end: int, kv: KvQuantisation | None = None
    ) -> None:
        """`kv` None: attention's caches hold keys and values as they are."""
        self.model = model
        self.kv = kv
        self.first = first
        self.end = end
        self._owner, self._key, self._layers = _find_layers(model)
        self.num_layers = len(cast(Any, model).layers)
        self._takes_tapes = takes_tapes(model)
        self._slot = Slot()

    @property
    def own_layers(self) -> list[nn.Module]:
        """The layers that are computed here."""
        return self._layers[self.first : self.end]

    def make_caches(self) -> list[Any]:
        """One request's caches, of those that are written here."""
        caches = self._fresh_caches()
        return caches if self._is_whole else [caches[i] for i in self._own]

    def hidden(
        self, tokens: mx.array, entering: mx.array | None, caches: Sequence[Any]
    ) -> mx.array:
        """Ids (B, n) and, unless the first layer is here, hidden (B, n, H) -> hidden (B, n, H)."""
        _ = self._call(self._body, tokens, entering, self._spread(caches))
        leaving = self._slot.leaving
        assert leaving is not None
        return leaving

    def noted(self, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, Notes]:
        """The whole model's logits, and what went from layer to layer."""
        notes = Notes()
        return self._call(noted(self._layers, notes), tokens, None, caches), notes

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
                f"{row.shape}, so this model cannot be split{ONE_NODE}",
                param=REFUSED,
            )

    def check_quantised(self, hidden_size: int, dtype: mx.Dtype) -> None:
        """Raises LoadFailed where the model cannot compute with its caches quantised as `kv` says.

        The graph of one row shows it; nothing is computed.
        """
        if self.kv is None:
            return
        caches = self.make_caches()
        try:
            if kinds := unquantised(caches):
                raise TypeError(f"a cache of kind {kinds[0]} cannot be")
            _ = self.hidden(
                mx.zeros((1, 1), mx.int32), mx.zeros((1, 1, hidden_size), dtype), caches
            )
        except MODEL_FAULTS as fault:
            raise LoadFailed(
                f"the caches of {type(self.model).__module__} cannot be quantised ({said(fault)}); "
                "remove kv_bits from the card",
                param="kv_bits",
            ) from fault

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

    @property
    def _is_whole(self) -> bool:
        return self.first == 0 and self.end == self.num_layers

    def _fresh_caches(self) -> list[Any]:
        caches: list[Any] = make_prompt_cache(self.model)
        caches = with_tapes(caches) if self._takes_tapes else caches
        return caches if self.kv is None else quantised(caches, self.kv)

    @cached_property
    def _handing(self) -> Handing:
        """Raises LoadFailed where layers are not called one after the other."""
        caches = self._fresh_caches()
        handing = Handing(len(caches))
        try:
            _ = self._call(
                watched(self._layers, caches, handing), mx.zeros((1, 1), mx.int32), None, caches
            )
            why = handing.fault(self.num_layers)
        except MODEL_FAULTS as fault:
            why = f"its layers cannot be passed over ({said(fault)})"
        if why:
            name = type(self.model).__module__.rpartition(".")[2]
            raise LoadFailed(f"a {name} model cannot be split: {why}{ONE_NODE}", param=REFUSED)
        return handing

    @cached_property
    def _others(self) -> frozenset[int]:
        """The caches that only layers of other stages take."""
        taken = [caches for _, caches in self._handing.taken]
        own = frozenset[int]().union(*taken[self.first : self.end])
        return frozenset[int]().union(*taken) - own

    def _spread(self, caches: Sequence[Any]) -> Sequence[Any]:
        """As the model takes caches, one entry for each of its own, from those that are here.

        Entries of layers that other stages own are aliases of own ones of the same kind: models
        take a mask's offset from the first attention layer, which may not be here.
        """
        if self._is_whole:
            return caches
        own = dict(zip(self._own, caches, strict=True))
        return [own.get(self._stand_ins.get(j, j), cache) for j, cache in enumerate(self._unread)]

    @cached_property
    def _unread(self) -> list[Any]:
        """Entries for layers that are not here and have no kind in common with those that are."""
        return self._fresh_caches()

    @cached_property
    def _stand_ins(self) -> dict[int, int]:
        """Of the others' caches: the first own one of the same kind, if there is any."""
        kinds = [_kind(cache) for cache in self._unread]
        same = {j: [i for i in self._own if kinds[i] == kinds[j]] for j in self._others}
        return {j: found[0] for j, found in same.items() if found}

    @cached_property
    def _own(self) -> list[int]:
        """The others: what no layer takes, as an embedding's, is written by every stage."""
        return [j for j in range(self._handing.caches) if j not in self._others]

    @cached_property
    def _body(self) -> list[nn.Module]:
        return self._view(self.first, self.end)

    @cached_property
    def _tail(self) -> list[nn.Module]:
        return self._view(self.num_layers, self.num_layers)

    def _view(self, first: int, end: int) -> list[nn.Module]:
        if end - first == self.num_layers:
            return view(self._layers, 0, len(self._layers), self._slot, -1)
        more = self._handing.more
        return view(self._layers, first, end, self._slot, more)


def open_model(folder: Path) -> nn.Module:
    """The whole model, of whose weights nothing is read yet. Raises InvalidCheckpoint."""
    try:
        return _load_backbone(folder)
    except MODEL_FAULTS as fault:
        raise InvalidCheckpoint(
            f"{folder.name} cannot be loaded: {fault}; the checkpoint or its config.json does not "
            "fit an architecture of the installed mlx-lm"
        ) from fault


def require_layers(model: nn.Module, first: int, end: int) -> None:
    """Raises LoadFailed where the model has no layers [first, end)."""
    layers = len(cast(Any, model).layers)
    if not 0 <= first < end <= layers:
        raise LoadFailed(f"{layer_range(first, end)} do not exist: the model has {layers}")


def read_layers(
    model: nn.Module,
    first: int,
    end: int,
    dtype: mx.Dtype | None,
    *,
    outer: bool,
    progress: Progress,
) -> int:
    """Reads layers [first, end) and, for the generator (`outer`), embedding, norm and lm_head.

    Returns the bytes of weights in memory; the other layers of `model` stay unevaluated.
    `dtype` None keeps the checkpoint's. Raises LoadFailed where there are no such layers.
    """
    model.eval()
    if dtype is not None:
        cast_parameters(model, dtype)
    prepare(model)
    layers: list[nn.Module] = list(cast(Any, model).layers)
    require_layers(model, first, end)
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
    return total


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


def said(fault: BaseException) -> str:
    """The first line of what a model class raised: MLX appends a page of signatures."""
    line = (str(fault).splitlines() or [""])[0]
    return f"{type(fault).__name__}: {line[:200]}"


def _kind(cache: object) -> tuple[object, ...]:
    sizes = (getattr(cache, name, None) for name in ("max_size", "chunk_size"))
    parts = map(_kind, cache.caches) if isinstance(cache, CacheList) else ()
    return (type(cache), *sizes, *parts)
