"""A whole model from its folder, with lazy weights, and those of some of its layers or of its head.

Tensors that mlx-lm's class of the model does not know, those of a draft head, are left out.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import (
    _get_classes,  # pyright: ignore[reportPrivateUsage]
    load_model,
)

from ...mtp.families.head import HeadSource, HeadUnusable
from ...mtp.families.row_table import StoredRows, ours_of
from ...mtp.families.table import family_of, prepare
from ...mtp.families.weights import cast_parameters, fill_head
from ...mtp.seams import FORWARD_FAULTS
from ...placement.cluster import layer_range
from ...placement.errors import InvalidCheckpoint, LoadFailed
from ..checkpoint.checkpoint import Checkpoint, read_checkpoint, read_config
from ..checkpoint.embedders import encoder_changes, is_encoder, require_pooling
from ..checkpoint.head_tensors import HeadFound
from ..checkpoint.model_classes import has_class, lacking, vlm_type
from ..checkpoint.vision import ADD_ENCODERS, has_extra
from .embedder import NO_LM_HEAD, encoder_classes, with_backbone_names
from .vlm_classes import vlm_classes

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
    if not has_class(config):
        raise InvalidCheckpoint(
            f"{folder.name}: {lacking(config)}; choose another model, or a newer mlx-lm"
        )
    try:
        return _load_backbone(folder, config, embeds=bool(pooling))
    except MODEL_FAULTS as fault:
        why = " ".join(str(fault).split())[:400]  # it may name each of thousands of tensors
        library = "mlx-vlm" if vlm_type(config) else "mlx-lm"
        raise InvalidCheckpoint(
            f"{folder.name} cannot be loaded: {why}; the checkpoint or its config.json does not "
            f"fit an architecture of the installed {library}"
        ) from fault


def require_layers(model: nn.Module, first: int, end: int) -> None:
    """Checks that the model has layers [first, end). Raises LoadFailed."""
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
        for table in getattr(model, "tables", {}).values():
            table.dtype = dtype
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
        model_class, arguments = model_classes(config)
        stock.append(model_class)
        return _without_head(model_class, embeds=embeds), arguments

    if is_encoder(config):
        changes = encoder_changes(config)
    else:  # some text-only exports name the type of a multimodal model
        changes = {"model_type": mlx_lm_type(config.get("model_type", ""))}
    if embeds:
        changes |= NO_LM_HEAD
    with _weights_folder(folder, config) as view:
        model, _ = load_model(view, lazy=True, model_config=changes, get_model_classes=classes)
    model.__class__ = stock[0]
    if tables := getattr(model, "tables", None):
        _fill(tables, folder)
    return model


def _fill(tables: Mapping[str, Any], folder: Path) -> None:
    """Maps the tensors of tables that are read by rows. Raises ValueError for unusable ones."""
    parts: dict[str, list[dict[str, StoredRows]]] = {
        name: [{} for _ in range(table.shards)] for name, table in tables.items()
    }
    scales = dict[str, mx.array]()
    for tensor in read_checkpoint(folder).tensors.values():
        name, _, rest = ours_of(tensor.name).partition(".shards.")
        if (table := name.removesuffix(".weight_scale")) != name and table in parts:
            file = cast("dict[str, mx.array]", mx.load(str(folder / tensor.file)))
            scales[table] = file[tensor.name].reshape(())
        if name in parts:
            shard, _, part = rest.partition(".")
            place = StoredRows(folder / tensor.file, tensor.start, tensor.dtype, tensor.shape)
            parts[name][int(shard)][part] = place
    for name, table in tables.items():
        table.fill(parts[name], scales.get(name))


def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """The class of a model that is no encoder, and that of its arguments.

    Raises LoadFailed without the extra that the class needs, and the errors of an unknown type.
    """
    return vlm_classes(config) or _get_classes(config)


@contextmanager
def _weights_folder(folder: Path, config: Mapping[str, Any]) -> Generator[Path]:
    """The weights with config.json as it was read here. mlx-lm reads that file in its own way, and
    generation_config.json, which may be anything. Arrays keep their files open."""
    with TemporaryDirectory() as root:
        view = Path(root)
        _ = (view / "config.json").write_text(json.dumps(dict(config)))
        for path in folder.glob("model*.safetensors"):
            (view / path.name).symlink_to(path.absolute())
        yield view


def _without_head(model_class: type[nn.Module], *, embeds: bool) -> type[nn.Module]:
    class Backbone(model_class):
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            backbone = _backbone_only(weights, len(cast(Any, self).layers))
            backbone = with_backbone_names(backbone) if embeds else backbone
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


def mlx_lm_type(model_type: str) -> str:
    """mlx-lm's name of a text model: without `_text` if it has no class with that name."""
    short = model_type.removesuffix("_text")
    if short == model_type or importlib.util.find_spec(f"mlx_lm.models.{model_type}") is not None:
        return model_type
    return short


def headline(fault: BaseException) -> str:
    """The type and first line of a model class's error: MLX appends a page of signatures."""
    line = (str(fault).splitlines() or [""])[0]
    return f"{type(fault).__name__}: {line[:200]}"


def head_arrays(checkpoint: Checkpoint, head: HeadFound) -> dict[str, mx.array]:
    """The head's arrays by canonical name. Lazy: data is read when it is evaluated."""
    files: dict[str, dict[str, mx.array]] = {}
    arrays: dict[str, mx.array] = {}
    for canonical, tensor in head.tensors.items():
        if tensor.file not in files:  # lazy: opening a file reads its header only
            files[tensor.file] = cast(
                "dict[str, mx.array]", mx.load(str(checkpoint.folder / tensor.file))
            )
        arrays[canonical] = files[tensor.file][tensor.name]
    return arrays


def backbone_is_raw(checkpoint: Checkpoint, head: HeadFound) -> bool | None:
    """Whether conv1d kernels have PyTorch's layout, mlx-lm's sign of an original checkpoint.

    None if the head has a file of its own, whose layout may differ from the backbone's.
    """
    if not head.shares_file_with_backbone:
        return None
    kernels = [t for name, t in checkpoint.tensors.items() if name.endswith("conv1d.weight")]
    return any(kernel.shape[-1] != 1 for kernel in kernels) if kernels else None


def require_head_fits(checkpoint: Checkpoint, head: HeadFound) -> None:
    """Checks that a load would use the head, whose numbers are not read. Raises
    InvalidCheckpoint."""
    model = open_model(checkpoint.folder)
    family = family_of(model)
    if family is None:
        raise InvalidCheckpoint(f"no draft head is implemented for {type(model).__module__}")
    source = HeadSource(head_arrays(checkpoint, head), backbone_is_raw(checkpoint, head))
    try:
        _ = fill_head(family, source)
    except HeadUnusable as fault:
        raise InvalidCheckpoint(
            f"the head does not fit {checkpoint.folder.name}: {fault}"
        ) from fault
