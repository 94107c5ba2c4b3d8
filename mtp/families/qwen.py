"""The common part of the Qwen families: where their parts are, and how heads are stored."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import mlx.core as mx
from mlx import nn

from .family import Family
from .head import HeadSource, HeadUnusable

_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(gate|up|down)_proj\.(.+)")
_FUSED = re.compile(r"(.*\.mlp)\.experts\.gate_up_proj(\.weight|\.scales|\.biases)?")
_NORM = re.compile(r"(^|[._])(norm|layernorm|pre_fc_norm_\w+)\.weight$")


class QwenFamily(Family):
    """A text model of mlx-lm with a head in Qwen's layout; subclasses name its decoder layer."""

    head_names: ClassVar[Mapping[str, str]] = {
        "pre_fc_norm_hidden.": "hnorm.",
        "pre_fc_norm_embedding.": "enorm.",
        "fc.": "eh_proj.",
        "norm.": "norm.",
        "layers.0.": "layer.",
        "": "",
    }
    layer_class: ClassVar[type[nn.Module]]
    """The class of a decoder layer, made of the model's arguments and an index."""

    def head_layer(self) -> nn.Module:
        # The index of a layer that has full attention: the head has no recurrence.
        index = self._model.args.full_attention_interval - 1
        return cast("Any", self.layer_class)(self._model.args, layer_idx=index)

    def head_parameters(self, source: HeadSource) -> dict[str, mx.array]:
        shift = 1.0 if norms_are_raw(source) else 0.0
        weights = stack_experts(split_fused_experts(dict(source.tensors)))
        return self.named(
            {k: v + shift if shift and _NORM.search(k) else v for k, v in weights.items()}
        )


def norms_are_raw(source: HeadSource) -> bool:
    """Whether RMSNorm weights are stored as w - 1, as the original repositories do.

    The backbone decides where head and backbone share a file; else the means do: raw weights lie
    around 0, shifted ones around 1. Raises HeadUnusable for means between.
    """
    if source.backbone_is_raw is not None:
        return source.backbone_is_raw
    norms = [v for k, v in source.tensors.items() if _NORM.search(k)]
    if not norms:
        return False  # missing tensors are reported when the head is filled
    mean = float(mx.concatenate([norm.astype(mx.float32) for norm in norms]).mean())
    if not 0.4 <= mean <= 0.6:
        return mean < 0.4
    raise HeadUnusable(
        f"the MTP head's norm weights average {mean:.2f}: neither the original layout (near 0) nor "
        "a converted one (near 1); use the original repository's head"
    )


def split_fused_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Qwen3.6: `experts.gate_up_proj` (E, 2I, H) and `experts.down_proj` (E, H, I).

    MLX OptiQ quantises them as they are, as `.weight`, `.scales` and `.biases`: rows stay rows.
    """
    for name in list(weights):
        if match := _FUSED.fullmatch(name):
            stem, part = f"{match.group(1)}.switch_mlp", match.group(2) or ".weight"
            fused = weights.pop(name)
            middle = fused.shape[-2] // 2
            weights[f"{stem}.gate_proj{part}"] = fused[..., :middle, :]
            weights[f"{stem}.up_proj{part}"] = fused[..., middle:, :]
            down = name.replace("gate_up_proj", "down_proj")
            if down in weights:
                weights[f"{stem}.down_proj{part}"] = weights.pop(down)
    return weights


def stack_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Qwen3-Next and 3.5: a tensor for each expert, stacked to (E, …) as switch layers want. Raises
    HeadUnusable."""
    experts: dict[str, dict[int, mx.array]] = {}
    for name in list(weights):
        if match := _EXPERT.fullmatch(name):
            prefix, index, part, rest = match.groups()
            stacked = experts.setdefault(f"{prefix}.switch_mlp.{part}_proj.{rest}", {})
            stacked[int(index)] = weights.pop(name)
    for name, parts in experts.items():
        if sorted(parts) != list(range(len(parts))):
            raise HeadUnusable(
                f"the MTP head's experts have gaps in {name}; use the original repository's "
                "checkpoint"
            )
        shapes = {part.shape for part in parts.values()}
        if len(shapes) > 1:
            raise HeadUnusable(
                f"the MTP head's experts have tensors of {len(shapes)} shapes for {name}, the "
                f"first two {sorted(shapes)[:2]}; use a checkpoint whose experts are stored alike"
            )
        weights[name] = mx.stack([parts[index] for index in sorted(parts)])
    return weights
