"""Fills a draft head from a checkpoint's tensors: norm shift, experts, quantisation, dtype."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from .head import MtpHead

_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(gate|up|down)_proj\.(.+)")
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_NORM = re.compile(r"(^|[._])(norm|layernorm|pre_fc_norm_\w+)\.weight$")


@dataclass(frozen=True, slots=True)
class HeadSource:
    """A head's tensors under their canonical names (`fc.weight`, …), lazily loaded.

    `backbone_is_raw` is None where the head lies in a file of its own, so that the backbone's
    layout says nothing about the head's.
    """

    tensors: Mapping[str, mx.array]
    backbone_is_raw: bool | None


@dataclass(frozen=True, slots=True)
class HeadUnusable:
    """Why a head that was found cannot be used, and what to do about it."""

    reason: str


def load_head(
    head: MtpHead,
    source: HeadSource,
    dtype: mx.Dtype | None,
) -> MtpHead | HeadUnusable:
    """Loads `source` into `head` and evaluates it; `dtype` None keeps the checkpoint's.

    Layers that are stored quantised stay so, each with the bits and group size that its shapes say:
    publishers mix them within a head, and config.json gives one for all.
    """
    raw = norms_are_raw(source)
    if isinstance(raw, HeadUnusable):
        return raw
    weights = _stack_experts(_split_fused_experts(dict(source.tensors)))
    if isinstance(weights, HeadUnusable):
        return weights
    if raw:
        weights = {k: v + 1.0 if _NORM.search(k) else v for k, v in weights.items()}
    if problem := _quantize_as_stored(head, weights):
        return HeadUnusable(problem)
    wanted = {name: value.shape for name, value in _flat(head)}
    if problem := _mismatch(wanted, weights):
        return HeadUnusable(problem)
    head.load_weights([(name, weights[name]) for name in wanted])
    if dtype is not None:
        head.set_dtype(dtype)
    head.eval()
    mx.eval(head.parameters())
    return head


def norms_are_raw(source: HeadSource) -> bool | HeadUnusable:
    """Whether RMSNorm weights are stored as w - 1, as the original repositories do.

    The backbone decides where head and backbone share a file; else the means do: raw weights lie
    around 0, shifted ones around 1.
    """
    if source.backbone_is_raw is not None:
        return source.backbone_is_raw
    norms = [v for k, v in source.tensors.items() if _NORM.search(k)]
    if not norms:
        return False  # what is missing is named when the head is filled
    mean = float(mx.concatenate([norm.astype(mx.float32) for norm in norms]).mean())
    if mean < 0.4:
        return True
    if mean > 0.6:
        return False
    return HeadUnusable(
        f"the MTP head's norm weights average {mean:.2f}: neither the original layout (near 0) nor "
        "a converted one (near 1); use the original repository's head"
    )


def _split_fused_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Qwen3.6: `experts.gate_up_proj` (E, 2I, H) and `experts.down_proj` (E, H, I)."""
    for name in [name for name in weights if name.endswith(".mlp.experts.gate_up_proj")]:
        prefix = name.removesuffix(".experts.gate_up_proj") + ".switch_mlp"
        fused = weights.pop(name)
        middle = fused.shape[-2] // 2
        weights[f"{prefix}.gate_proj.weight"] = fused[..., :middle, :]
        weights[f"{prefix}.up_proj.weight"] = fused[..., middle:, :]
        down = name.removesuffix("gate_up_proj") + "down_proj"
        if down in weights:
            weights[f"{prefix}.down_proj.weight"] = weights.pop(down)
    return weights


def _stack_experts(weights: dict[str, mx.array]) -> dict[str, mx.array] | HeadUnusable:
    """Qwen3.5: one tensor for each expert, stacked to (E, …) as mlx-lm's switch layers want."""
    experts: dict[str, dict[int, mx.array]] = {}
    for name in list(weights):
        if match := _EXPERT.fullmatch(name):
            prefix, index, part, rest = match.groups()
            stacked = experts.setdefault(f"{prefix}.switch_mlp.{part}_proj.{rest}", {})
            stacked[int(index)] = weights.pop(name)
    for name, parts in experts.items():
        shapes = {part.shape for part in parts.values()}
        if len(shapes) > 1:
            return HeadUnusable(
                f"the MTP head's experts have tensors of {len(shapes)} shapes for {name}, the "
                f"first two {sorted(shapes)[:2]}; use a checkpoint whose experts are stored alike"
            )
        weights[name] = mx.stack([parts[index] for index in sorted(parts)])
    return weights


def _quantize_as_stored(head: MtpHead, weights: Mapping[str, mx.array]) -> str | None:
    """Quantises the layers that have scales in `weights`; says what fits no quantisation."""
    sizes: dict[str, dict[str, int]] = {}
    for path, module in head.named_modules():
        packed, scales = weights.get(f"{path}.weight"), weights.get(f"{path}.scales")
        if packed is None or scales is None or not hasattr(module, "to_quantized"):
            continue
        inputs = cast("mx.array", module.weight).shape[-1]
        bits, rest = divmod(32 * packed.shape[-1], inputs)
        group, left = divmod(inputs, scales.shape[-1])
        if packed.dtype != mx.uint32 or rest or left or bits not in _BITS or group not in _GROUPS:
            return (
                f"the MTP head's quantised {path}.weight has shape {packed.shape} and scales of "
                f"{scales.shape}, which no bits and group size of MLX give for {inputs} inputs; "
                "use the original repository's head"
            )
        sizes[path] = {"bits": bits, "group_size": group}
    nn.quantize(head, class_predicate=lambda path, _: sizes.get(path, False))
    return None


def _flat(head: MtpHead) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(head.parameters()))


def _mismatch(wanted: Mapping[str, tuple[int, ...]], weights: Mapping[str, mx.array]) -> str | None:
    for name, shape in wanted.items():
        if name not in weights:
            return f"the MTP head lacks {name}; use the original repository's checkpoint"
        if weights[name].shape != shape:
            return (
                f"the MTP head's {name} has shape {weights[name].shape} where {shape} fits this "
                "model; use the head that belongs to it"
            )
    return None
