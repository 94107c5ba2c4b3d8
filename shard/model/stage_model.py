"""The layers [a, b) of any mlx-lm model, reading only their tensors.

The model itself is not changed. Its list of layers is replaced by one in which other stages' layers
pass their input on, the first own layer takes the received hidden states and the last one's output
is sent on. The operations around them (embedding, norm, lm_head) are lazy and only evaluated if
this stage needs them.
"""

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
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
from ...mtp.placed_rope import RopePositions
from ...mtp.rollback import takes_tapes, with_tapes
from ...mtp.seams import FORWARD_FAULTS
from ...mtp.weights import cast_parameters
from ...mtp.window import with_windows
from ...placement.cluster import layer_range
from ...placement.errors import InvalidCheckpoint, LoadFailed
from ...placement.kv_bits import Source, load_refusal
from ...placement.split_refusal import SplitRefusal
from ..checkpoint.checkpoint import read_config
from ..checkpoint.encoders import encoder_changes, is_encoder
from ..checkpoint.pooling import require_pooling
from ..checkpoint.vision_extra import ADD_ENCODERS, has_extra
from .embedder import NO_LM_HEAD, embedder_class
from .encoder import encoder_classes
from .kv_quantisation import KvQuantisation, quantised, unquantised
from .layer_view import (
    LayerCalls,
    LayerRecords,
    Slot,
    recorded_layers,
    stage_view,
    watched_layers,
)

REFUSED: Final = SplitRefusal("it cannot be split").param
"""The `param` of the error: this model may run on one node only."""
ONE_NODE: Final = "; place it on one node"
MODEL_FAULTS = (
    *FORWARD_FAULTS,
    ImportError,
    OSError,
    SystemExit,  # a class whose import lacks a library
)
"""The errors of a model class for a config.json that does not fit it."""

Progress = Callable[[int, int], None]
"""Bytes of weights in memory so far, and in all."""


_HEAD = re.compile(
    r"(?:language_model\.)?(?:model\.)?(?:language_model\.)?"
    r"(?:mtp(?:_[a-z_]+)?\.|layers\.(?P<layer>\d{1,6})\.)"
)
"""Matches the tensors of a draft head, and of layers, which may be one."""


class StageModel:
    """A loaded model seen as layers [first, end): hidden in (or ids), hidden out (or logits)."""

    def __init__(
        self,
        model: nn.Module,
        first: int,
        end: int,
        kv: KvQuantisation | None = None,
        rope_positions: RopePositions | None = None,
    ) -> None:
        """`kv` None: attention's caches are not quantised. `rope_positions`: what the ropes of
        `model` were given; None: nothing, so all of its positions are those of text."""
        self.model = model
        self.kv = kv
        self.rope_positions = rope_positions or RopePositions()
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
        """One request's caches, without those that only other stages write."""
        caches = self._fresh_caches()
        return caches if self._is_whole else [caches[i] for i in self._own_caches]

    def hidden(
        self,
        tokens: mx.array,
        entering: mx.array | None,
        caches: Sequence[Any],
        embeddings: mx.array | None = None,
    ) -> mx.array:
        """Runs the own layers: ids (B, n) and, unless the first layer is own, hidden (B, n, H).

        `embeddings`: in place of those of the ids. Returns hidden (B, n, H).
        """
        _ = self._call(self._body, tokens, entering, self._all_caches(caches), embeddings)
        output = self._slot.output
        assert output is not None
        return output

    def record(self, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, LayerRecords]:
        """The whole model's logits, and the inputs and outputs of its layers."""
        records = LayerRecords()
        return self._call(recorded_layers(self._layers, records), tokens, None, caches), records

    def check_splits(self, hidden_size: int) -> None:
        """Raises LoadFailed if layers pass on more than hidden states.

        Only the graph of one row is built; nothing is computed.
        """
        token, row = mx.zeros((1, 1), mx.int32), mx.zeros((1, 1, hidden_size))
        self._slot.computes = False
        try:
            result: object = self.hidden(token, row, self.make_caches()).shape
        except MODEL_FAULTS as fault:
            result = fault
        finally:
            self._slot.computes = True
        if result != row.shape:
            raise LoadFailed(
                f"a layer of {type(self.model).__module__} gives {result} where hidden states are "
                f"{row.shape}, so this model cannot be split{ONE_NODE}",
                param=REFUSED,
            )

    def check_quantised(self, hidden_size: int, dtype: mx.Dtype, source: Source = "card") -> None:
        """Raises LoadFailed if the model cannot compute with caches quantised by `kv`.

        `source`: whose `kv_bits` that is, for the remedy. Only the graph of one row is built;
        nothing is computed.
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
            module = type(self.model).__module__
            reason = f"the caches of {module} cannot be quantised ({headline(fault)})"
            raise load_refusal(reason, source) from fault

    def logits(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Logits (1, n, V) of the last stage's hidden (1, n, H) of ids (1, n).

        Needs the outer weights.
        """
        return self._call(self._tail, tokens, hidden, None)

    def _call(
        self,
        layers: list[nn.Module],
        tokens: mx.array,
        entering: mx.array | None,
        caches: Sequence[Any] | None,
        embeddings: mx.array | None = None,
    ) -> mx.array:
        self._slot.input, self._slot.output = entering, None
        self._owner[self._key] = layers
        try:
            given = {} if embeddings is None else {"input_embeddings": embeddings}
            return cast(Any, self.model)(tokens, cache=caches, **given)
        finally:
            self._owner[self._key] = self._layers
            self._slot.input = None

    @property
    def _is_whole(self) -> bool:
        return self.first == 0 and self.end == self.num_layers

    def _fresh_caches(self) -> list[Any]:
        caches = with_windows(make_prompt_cache(self.model))
        caches = with_tapes(caches) if self._takes_tapes else caches
        return caches if self.kv is None else quantised(caches, self.kv)

    @cached_property
    def _layer_calls(self) -> LayerCalls:
        """How the model calls its layers. Raises LoadFailed unless they are called in order."""
        caches = self._fresh_caches()
        calls = LayerCalls(len(caches))
        try:
            _ = self._call(
                watched_layers(self._layers, caches, calls),
                mx.zeros((1, 1), mx.int32),
                None,
                caches,
            )
            why = calls.fault(self.num_layers)
        except MODEL_FAULTS as fault:
            why = f"its layers cannot be passed over ({headline(fault)})"
        if why:
            name = type(self.model).__module__.rpartition(".")[2]
            raise LoadFailed(f"a {name} model cannot be split: {why}{ONE_NODE}", param=REFUSED)
        return calls

    @cached_property
    def _foreign_caches(self) -> frozenset[int]:
        """Indices of the caches that only layers of other stages use."""
        caches = [indices for _, indices in self._layer_calls.caches_by_call]
        own = frozenset[int]().union(*caches[self.first : self.end])
        return frozenset[int]().union(*caches) - own

    def _all_caches(self, caches: Sequence[Any]) -> Sequence[Any]:
        """The own caches with entries for all others, as the model expects them.

        Entries of other stages' layers are aliases of own caches of the same kind: models take a
        mask's offset from the first attention layer, which may not be own.
        """
        if self._is_whole:
            return caches
        own = dict(zip(self._own_caches, caches, strict=True))
        return [
            own.get(self._aliases.get(j, j), cache) for j, cache in enumerate(self._placeholders)
        ]

    @cached_property
    def _placeholders(self) -> list[Any]:
        """Entries for other stages' layers whose kind of cache no own layer has."""
        return self._fresh_caches()

    @cached_property
    def _aliases(self) -> dict[int, int]:
        """The first own cache of the same kind, for each of the others' caches that has one."""
        kinds = [_kind(cache) for cache in self._placeholders]
        same = {
            j: [i for i in self._own_caches if kinds[i] == kinds[j]] for j in self._foreign_caches
        }
        return {j: indices[0] for j, indices in same.items() if indices}

    @cached_property
    def _own_caches(self) -> list[int]:
        """Indices of the other caches; all stages write those without a layer (an embedding's)."""
        return [j for j in range(self._layer_calls.caches) if j not in self._foreign_caches]

    @cached_property
    def _body(self) -> list[nn.Module]:
        return self._layers_of(self.first, self.end)

    @cached_property
    def _tail(self) -> list[nn.Module]:
        return self._layers_of(self.num_layers, self.num_layers)

    def _layers_of(self, first: int, end: int) -> list[nn.Module]:
        if end - first == self.num_layers:
            return stage_view(self._layers, 0, len(self._layers), self._slot, -1)
        extra_outputs = self._layer_calls.extra_outputs
        return stage_view(self._layers, first, end, self._slot, extra_outputs)


def open_model(folder: Path, *, pooling: str = "") -> nn.Module:
    """The whole model with lazy weights, none of them read. Raises InvalidCheckpoint, and
    LoadFailed for an encoder without the extra that computes it.

    `pooling`: of an embedder, which has no lm_head whatever its config.json says.
    """
    config = read_config(folder)
    if pooling or is_encoder(config):
        require_pooling(folder, config, pooling)
    if is_encoder(config) and not has_extra():
        raise LoadFailed(ADD_ENCODERS)
    try:
        return _load_backbone(folder, config, embeds=bool(pooling))
    except MODEL_FAULTS as fault:
        why = " ".join(str(fault).split())[:400]  # it may name each of thousands of tensors
        raise InvalidCheckpoint(
            f"{folder.name} cannot be loaded: {why}; the checkpoint or its config.json does not "
            "fit an architecture of the installed mlx-lm"
        ) from fault


def require_layers(model: nn.Module, first: int, end: int) -> None:
    """Raises LoadFailed unless the model has layers [first, end)."""
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
    `dtype` None keeps the checkpoint's. Raises LoadFailed if the model does not have these layers.
    """
    model.eval()
    if dtype is not None:
        cast_parameters(model, dtype)
    prepare(model)
    layers: list[nn.Module] = list(cast(Any, model).layers)
    require_layers(model, first, end)
    others = {id(p) for layer in layers for p in parameters_of(layer)}
    parts = [parameters_of(layers[i]) for i in range(first, end)]
    if outer:
        parts.append([p for p in parameters_of(model) if id(p) not in others])
    total = sum(p.nbytes for part in parts for p in part)
    bytes_in_memory = 0
    for part in parts:  # one layer at a time: a cast holds both copies until it is evaluated
        mx.eval(part)
        bytes_in_memory += sum(p.nbytes for p in part)
        progress(bytes_in_memory, total)
    return total


def _load_backbone(folder: Path, config: Mapping[str, Any], *, embeds: bool) -> nn.Module:
    """mlx-lm's model without the tensors of a draft head, which not all of its classes drop.

    Its deepseek_v3 drops only layer 61, and qwen3_next keeps `mtp.*` of converted checkpoints; both
    then reject tensors that they do not know.
    """
    stock: list[type[nn.Module]] = []

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        if is_encoder(config):
            model_class, arguments = encoder_classes(config)
            stock.append(model_class)
            return model_class, arguments
        model_class, arguments = _get_classes(config)
        stock.append(model_class)
        return _without_head(embedder_class(model_class) if embeds else model_class), arguments

    changes = encoder_changes(config) if is_encoder(config) else _config_changes(config)
    if embeds:
        changes |= NO_LM_HEAD
    model, _ = load_model(folder, lazy=True, model_config=changes, get_model_classes=classes)
    model.__class__ = stock[0]
    return model


def _without_head(model_class: type[nn.Module]) -> type[nn.Module]:
    class Backbone(model_class):
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            backbone = _backbone_only(weights, len(cast(Any, self).layers))
            stock = getattr(super(), "sanitize", None)
            return backbone if stock is None else stock(backbone)

    return Backbone


def _backbone_only(weights: dict[str, mx.array], layers: int) -> dict[str, mx.array]:
    """Drops a head's tensors.

    Layers past the last with an `eh_proj` are a head's; others are an error of config.json.
    """
    matches = {name: match for name in weights if (match := _HEAD.match(name))}
    heads = {m["layer"] for m in matches.values() if m.string.endswith(".eh_proj.weight")}
    dropped = {
        name
        for name, match in matches.items()
        if (layer := match["layer"]) is None or (layer in heads and int(layer) >= layers)
    }
    return {name: value for name, value in weights.items() if name not in dropped}


def parameters_of(module: nn.Module) -> list[mx.array]:
    """The arrays of a module and of all modules in it."""
    return [cast("mx.array", value) for _, value in tree_flatten(module.parameters())]


def _config_changes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Changes to config.json: some text-only exports name the type of a multimodal model."""
    kind = config.get("model_type", "")
    model_type = mlx_lm_type(kind)
    return {} if model_type == kind else {"model_type": model_type}


def mlx_lm_type(model_type: str) -> str:
    """mlx-lm's name of a text model: without `_text` if it has no class with that name."""
    short = model_type.removesuffix("_text")
    if short == model_type or importlib.util.find_spec(f"mlx_lm.models.{model_type}") is not None:
        return model_type
    return short


def _find_layers(model: nn.Module) -> tuple[Any, str, list[nn.Module]]:
    """The module that owns the list of decoder layers, the list's name there, and the list."""
    layers = cast(Any, model).layers
    for _, module in model.named_modules():
        for name, value in module.items():
            if isinstance(value, list) and any(item is layers[0] for item in value):
                return module, name, value
    raise InvalidCheckpoint(f"{type(model).__name__} has no list of decoder layers")


def headline(fault: BaseException) -> str:
    """The type and first line of a model class's error: MLX appends a page of signatures."""
    line = (str(fault).splitlines() or [""])[0]
    return f"{type(fault).__name__}: {line[:200]}"


def _kind(cache: object) -> tuple[object, ...]:
    sizes = (getattr(cache, name, None) for name in ("max_size", "chunk_size"))
    parts = map(_kind, cache.caches) if isinstance(cache, CacheList) else ()
    return (type(cache), *sizes, *parts)
