"""Loads a draft head from the parameters that its family makes of a checkpoint's tensors."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.switch_layers import SwitchLinear

from .family import Family
from .head import HeadSource, HeadUnusable

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_AS_STORED = ("A_log", "e_score_correction_bias")
"""Parameters of draft heads that mlx-lm's models of the same families compute with in float32."""


def load_head(family: Family, source: HeadSource, dtype: mx.Dtype | None) -> Any:
    """Loads `source` into a head and evaluates it; `dtype` None keeps the checkpoint's.

    Returns a `DraftHead`, or HeadUnusable.

    Layers that are stored quantised stay so, each with the bits and group size that follow from its
    shapes: publishers mix them within a head, while config.json gives one for all.
    """
    weights = family.head_parameters(source)
    if isinstance(weights, HeadUnusable):
        return weights
    head = family.make_head()
    if problem := _quantize_as_stored(head, weights):
        return HeadUnusable(problem)
    shapes = {name: value.shape for name, value in _flat(head)}
    if problem := _mismatch(shapes, weights):
        return HeadUnusable(problem)
    head.load_weights([(name, weights[name]) for name in shapes])
    if _gathers_on_cpu(head):
        dtype = mx.float32
    if dtype is not None:
        cast_parameters(head, dtype)
    head.eval()
    mx.eval(head.parameters())
    return head


def cast_parameters(module: nn.Module, dtype: mx.Dtype) -> None:
    """Casts floating-point parameters to `dtype`, except those that models use in float32.

    These are defined by the model's `cast_predicate`, as in mlx-lm's conversion: routers' biases
    and the like, which decide between experts.
    """
    casts = cast("Callable[[str], bool]", getattr(module, "cast_predicate", _everything))

    def converted(path: str, value: mx.array) -> mx.array:
        floats = mx.issubdtype(value.dtype, mx.floating)
        keeps_dtype = path.endswith(_AS_STORED) or not casts(path)
        return value if keeps_dtype or not floats else value.astype(dtype)

    module.update(tree_map_with_path(converted, module.parameters()))


def _everything(_path: str) -> bool:
    return True


def _gathers_on_cpu(head: nn.Module) -> bool:
    """MLX gathers unquantised experts on CPUs in float32 only, whatever the backbone's dtype."""
    if mx.default_device() != mx.Device(mx.DeviceType.cpu):
        return False
    return any(isinstance(module, SwitchLinear) for _, module in head.named_modules())


def _quantize_as_stored(head: nn.Module, weights: Mapping[str, mx.array]) -> str | None:
    """Quantises the layers that have scales in `weights`. Returns an error if shapes do not fit."""
    sizes: dict[str, dict[str, int]] = {}
    for path, module in head.named_modules():
        packed, scales = weights.get(f"{path}.weight"), weights.get(f"{path}.scales")
        if packed is None or scales is None or not hasattr(module, "to_quantized"):
            continue
        inputs = cast("mx.array", module.weight).shape[-1]
        bits, rest = divmod(32 * packed.shape[-1], inputs)
        group, group_rest = divmod(inputs, scales.shape[-1])
        if (
            packed.dtype != mx.uint32
            or rest
            or group_rest
            or bits not in _BITS
            or group not in _GROUPS
        ):
            return (
                f"the MTP head's quantised {path}.weight has shape {packed.shape} and scales of "
                f"{scales.shape}, which no bits and group size of MLX give for {inputs} inputs; "
                "use the original repository's head"
            )
        sizes[path] = {"bits": bits, "group_size": group}
    nn.quantize(head, class_predicate=lambda path, _: sizes.get(path, False))
    return None


def _flat(head: nn.Module) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(head.parameters()))


def _mismatch(shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, mx.array]) -> str | None:
    for name, shape in shapes.items():
        if name not in weights:
            return f"the MTP head lacks {name}; use the original repository's checkpoint"
        if weights[name].shape != shape:
            return (
                f"the MTP head's {name} has shape {weights[name].shape} where {shape} fits this "
                "model; use the head that belongs to it"
            )
    return None
