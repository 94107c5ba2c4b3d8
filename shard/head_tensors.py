"""Where a native MTP head lies in a checkpoint: looked up in its tensors, never believed.

A head is found only when every tensor that config.json predicts is there in the predicted shape,
and none besides: a partial set of experts drafts nonsense without any error. Layouts: Qwen3-Next
and 3.5 (one tensor per expert), Qwen3.6 (fused experts), and what converters make of them (stacked
`switch_mlp`, quantised).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from .checkpoint import HEAD_FILES, Checkpoint, text_config
from .headers import Tensor

_PREFIX = re.compile(r"(?:language_model\.(?:model\.)?|model\.(?:language_model\.)?)?mtp\.")
_CLAIMS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
_ATTENTION = ("hidden_size", "num_attention_heads", "num_key_value_heads")
_EXPERTS = ("moe_intermediate_size", "shared_expert_intermediate_size")

_FLOATS = ("BF16", "F16", "F32")
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (16, 32, 64, 128)
_REMEDY = "Use the original repository: conversions by mlx_lm.convert drop these tensors."

_LAYER = "layers.0."
_MLP = _LAYER + "mlp."
_PARTS = ("gate_proj", "up_proj", "down_proj")

_Shape = tuple[int, ...]
_Layout = Literal["unfused", "fused", "stacked"]


@dataclass(frozen=True, slots=True)
class HeadFound:
    """A complete head under its canonical names (`fc.weight`, `layers.0.mlp.up_proj.weight`, …).

    `files` are those that hold it, relative to the checkpoint. `shares_file_with_backbone` says
    that each of them also holds backbone tensors, so that the head's norms are stored as theirs.
    """

    tensors: Mapping[str, Tensor]
    files: tuple[str, ...]
    shares_file_with_backbone: bool
    quantised: bool

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class HeadMissing:
    """Why there is no usable head, with the remedy, in words for a person."""

    reason: str


def find_head(checkpoint: Checkpoint) -> HeadFound | HeadMissing:
    """The checkpoint's native MTP head, or why it has none that can be used."""
    config = text_config(checkpoint.config)
    found = _collect(checkpoint)
    if isinstance(found, HeadMissing):
        return found
    if not found:
        return _stripped_or_none(checkpoint.config)
    shapes = _predict(config, found)
    if isinstance(shapes, HeadMissing):
        return shapes
    if problem := _mismatch(shapes, found):
        return HeadMissing(f"{problem}. {_REMEDY}")
    files = {tensor.file for tensor in found.values()}
    head_names = {tensor.name for tensor in found.values()}
    with_backbone = {t.file for t in checkpoint.tensors.values() if t.name not in head_names}
    return HeadFound(
        tensors=MappingProxyType(found),
        files=tuple(sorted(files)),
        shares_file_with_backbone=files <= with_backbone,
        quantised=any(tensor.dtype == "U32" for tensor in found.values()),
    )


def _collect(checkpoint: Checkpoint) -> dict[str, Tensor] | HeadMissing:
    """The head's tensors by canonical name; in the head's own file the prefix may be absent."""
    found: dict[str, Tensor] = {}
    for tensor in checkpoint.tensors.values():
        prefix = _PREFIX.match(tensor.name)
        if prefix is None and tensor.file not in HEAD_FILES:
            continue
        name = tensor.name[prefix.end() :] if prefix else tensor.name
        if name in found:
            return HeadMissing(
                f"the checkpoint holds the MTP head's {name} twice, as {found[name].name} and "
                f"{tensor.name}. Remove the file with the head that does not belong to it."
            )
        found[name] = tensor
    return found


def _stripped_or_none(config: Mapping[str, Any]) -> HeadMissing:
    for part in (text_config(config), config):
        for key in _CLAIMS:
            layers: object = part.get(key)
            if isinstance(layers, int) and layers > 0:
                return HeadMissing(
                    f"config.json declares an MTP head ({key} = {layers}), but the checkpoint "
                    f"holds no mtp.* tensors: they were stripped. {_REMEDY}"
                )
    return HeadMissing("the checkpoint has no MTP head, and config.json declares none.")


def _predict(
    config: Mapping[str, Any], found: Mapping[str, Tensor]
) -> dict[str, _Shape] | HeadMissing:
    """Every tensor of an unquantised head and its shape, from the sizes in config.json."""
    experts = _size(config, "num_experts") or 0
    keys = (*_ATTENTION, *(_EXPERTS if experts else ("intermediate_size",)))
    sizes = {key: size for key in keys if (size := _size(config, key)) is not None}
    if absent := [key for key in keys if key not in sizes]:
        return HeadMissing(
            f"config.json gives no {' and no '.join(absent)}, so the MTP head cannot be checked. "
            "Use the original repository's config.json."
        )
    hidden = sizes["hidden_size"]
    shapes: dict[str, _Shape] = {
        "fc.weight": (hidden, 2 * hidden),
        "pre_fc_norm_hidden.weight": (hidden,),
        "pre_fc_norm_embedding.weight": (hidden,),
        "norm.weight": (hidden,),
        f"{_LAYER}input_layernorm.weight": (hidden,),
        f"{_LAYER}post_attention_layernorm.weight": (hidden,),
    }
    shapes.update(_attention(config, sizes))
    if not experts:
        shapes.update(_gated_mlp(_MLP, hidden, sizes["intermediate_size"]))
        return shapes
    shapes[f"{_MLP}gate.weight"] = (experts, hidden)
    if shared := sizes["shared_expert_intermediate_size"]:
        shapes.update(_gated_mlp(f"{_MLP}shared_expert.", hidden, shared))
        shapes[f"{_MLP}shared_expert_gate.weight"] = (1, hidden)
    shapes.update(_experts(_layout(found), experts, hidden, sizes["moe_intermediate_size"]))
    return shapes


def _size(config: Mapping[str, Any], key: str) -> int | None:
    value: object = config.get(key)
    return value if type(value) is int else None


def _attention(config: Mapping[str, Any], sizes: Mapping[str, int]) -> Iterator[tuple[str, _Shape]]:
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    width = _size(config, "head_dim") or hidden // max(heads, 1)
    rows = {
        "q_proj": 2 * heads * width,  # each head's query and its output gate
        "k_proj": sizes["num_key_value_heads"] * width,
        "v_proj": sizes["num_key_value_heads"] * width,
        "o_proj": hidden,
    }
    for name, outputs in rows.items():
        inputs = heads * width if name == "o_proj" else hidden
        yield f"{_LAYER}self_attn.{name}.weight", (outputs, inputs)
        if config.get("attention_bias"):
            yield f"{_LAYER}self_attn.{name}.bias", (outputs,)
    yield f"{_LAYER}self_attn.q_norm.weight", (width,)
    yield f"{_LAYER}self_attn.k_norm.weight", (width,)


def _gated_mlp(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, _Shape]]:
    for part in _PARTS:
        shape = (hidden, inner) if part == "down_proj" else (inner, hidden)
        yield f"{prefix}{part}.weight", shape


def _layout(found: Mapping[str, Tensor]) -> _Layout:
    if any(name.startswith(f"{_MLP}switch_mlp.") for name in found):
        return "stacked"
    fused = (f"{_MLP}experts.gate_up_proj", f"{_MLP}experts.down_proj")
    return "fused" if any(name in found for name in fused) else "unfused"


def _experts(
    layout: _Layout, experts: int, hidden: int, inner: int
) -> Iterator[tuple[str, _Shape]]:
    match layout:
        case "fused":
            yield f"{_MLP}experts.gate_up_proj", (experts, 2 * inner, hidden)
            yield f"{_MLP}experts.down_proj", (experts, hidden, inner)
        case "stacked":
            for name, shape in _gated_mlp(f"{_MLP}switch_mlp.", hidden, inner):
                yield name, (experts, *shape)
        case "unfused":
            for expert in range(experts):
                yield from _gated_mlp(f"{_MLP}experts.{expert}.", hidden, inner)


def _mismatch(shapes: Mapping[str, _Shape], found: Mapping[str, Tensor]) -> str | None:
    """The first difference between what is predicted and what is there, in words."""
    expected = set(shapes)
    for name, shape in shapes.items():
        tensor = found.get(name)
        if tensor is None:
            return f"the MTP head is incomplete: {name}, expected in shape {shape}, is missing"
        if tensor.dtype == "U32" and len(shape) > 1 and name.endswith(".weight"):
            stem = name.removesuffix(".weight")
            expected |= {f"{stem}.scales", f"{stem}.biases"}
            if problem := _quantised_mismatch(tensor, shape, found, stem):
                return problem
        elif tensor.dtype not in _FLOATS:
            return f"the MTP head's {tensor.name} is stored as {tensor.dtype}, which is not read"
        elif tensor.shape != shape:
            return f"the MTP head's {tensor.name} has shape {tensor.shape}, expected {shape}"
    if extra := sorted(set(found) - expected):
        return (
            f"the MTP head has {len(extra)} tensors that config.json does not predict, "
            f"the first {found[extra[0]].name}"
        )
    return None


def _quantised_mismatch(
    packed: Tensor, shape: _Shape, found: Mapping[str, Tensor], stem: str
) -> str | None:
    """mlx packs inputs of `bits` each into uint32; a scale (and bias) for each group of inputs."""
    *outer, inputs = shape
    bits, rest = divmod(packed.shape[-1] * 32, inputs) if packed.shape and inputs else (0, 1)
    if list(packed.shape[:-1]) != outer or rest or bits not in _BITS:
        return f"the MTP head's quantised {packed.name} has shape {packed.shape}, not of {shape}"
    scales, biases = found.get(f"{stem}.scales"), found.get(f"{stem}.biases")
    if scales is None:
        return f"the MTP head's {packed.name} is quantised but {stem}.scales is missing"
    groups = [(*outer, inputs // group) for group in _GROUPS if inputs % group == 0]
    for part in (scales, biases):
        if part is not None and (part.shape not in groups or part.shape != scales.shape):
            return f"the MTP head's {part.name} has shape {part.shape}, not of {shape}"
    return None
