"""Loads a draft head from the parameters that its family makes of a checkpoint's tensors.

A head is used whole or not at all: every tensor that the model's class wants has to be there in its
shape, and none besides. A partial set of experts would draft nonsense without any error.
"""

from collections.abc import Callable, Mapping
from typing import cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.switch_layers import SwitchLinear

from .family import Family
from .head import DraftHead, HeadSource, HeadUnusable

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_COPIES = ("embed_tokens.", "shared_head.head.", "shared_head.output.")
"""Beginnings of the canonical names of copies of the backbone's ends, which are not loaded."""
_FAULTS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of MLX and of a model's class for tensors that do not fit together."""
_AS_STORED = ("A_log", "e_score_correction_bias")
"""Parameters of draft heads that mlx-lm's models of the same families compute with in float32."""


def load_head(family: Family, source: HeadSource, dtype: mx.Dtype | None) -> DraftHead:
    """Loads `source` into a head and evaluates it; `dtype` None keeps the checkpoint's.

    Layers that are stored quantised stay so, each with the bits and group size that follow from its
    shapes: publishers mix them within a head, while config.json gives one for all.
    Raises HeadUnusable.
    """
    head = fill_head(family, source)
    if _gathers_on_cpu(head):
        dtype = mx.float32
    if dtype is not None:
        cast_parameters(head, dtype)
    head.eval()
    mx.eval(head.parameters())
    return head


def fill_head(family: Family, source: HeadSource) -> DraftHead:
    """The head with its tensors, which are not read yet. Raises HeadUnusable."""
    try:
        weights = family.head_parameters(source)
        head = family.make_head()
        _quantize_as_stored(head, weights, family)
    except _FAULTS as fault:
        why = (str(fault).splitlines() or [""])[0][:200]
        raise HeadUnusable(
            f"the MTP head's tensors do not fit together ({type(fault).__name__}: {why}); use the "
            "original repository's checkpoint"
        ) from fault
    parameters = dict(_flat(head))
    for name, parameter in parameters.items():
        _require_fit(family.canonical(name), weights.get(name), parameter)
    others = (family.canonical(name) for name in weights if name not in parameters)
    if extra := sorted(name for name in others if not name.startswith(_COPIES)):
        raise HeadUnusable(
            f"the MTP head has {len(extra)} tensors that config.json does not predict, the first "
            f"{extra[0]}; use the original repository's checkpoint"
        )
    used = {family.canonical(name): weight for name, weight in weights.items()}
    if _numbers(source.tensors) > _numbers(used):
        raise HeadUnusable(
            "the MTP head holds a part twice, in two forms, of which one would be left out; use "
            "the original repository's checkpoint"
        )
    head.load_weights([(name, weights[name]) for name in parameters])
    return head


def _numbers(tensors: Mapping[str, mx.array]) -> int:
    """The numbers of a head's tensors by canonical name, but for copies and the scales of FP8."""
    own = (name for name in tensors if not name.startswith(_COPIES) and "_scale_inv" not in name)
    return sum(tensors[name].size for name in own)


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


def _quantize_as_stored(head: nn.Module, weights: Mapping[str, mx.array], family: Family) -> None:
    """Quantises the layers that have scales in `weights`. Raises HeadUnusable for other shapes."""
    sizes: dict[str, dict[str, int]] = {}
    for path, module in head.named_modules():
        packed, scales = weights.get(f"{path}.weight"), weights.get(f"{path}.scales")
        if packed is None or scales is None or not hasattr(module, "to_quantized"):
            continue
        inputs = cast("mx.array", module.weight).shape[-1]
        bits, rest = divmod(32 * packed.shape[-1], inputs)
        group, group_rest = divmod(inputs, scales.shape[-1])
        fits = not rest and not group_rest and bits in _BITS and group in _GROUPS
        if packed.dtype != mx.uint32 or not fits:
            name = family.canonical(f"{path}.weight")
            raise HeadUnusable(
                f"the MTP head's quantised {name} has shape {packed.shape} and scales of "
                f"{scales.shape}, which no bits and group size of MLX give for {inputs} inputs; "
                "use the original repository's head"
            )
        sizes[path] = {"bits": bits, "group_size": group}
    nn.quantize(head, class_predicate=lambda path, _: sizes.get(path, False))


def _flat(head: nn.Module) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(head.parameters()))


def _require_fit(name: str, tensor: mx.array | None, parameter: mx.array) -> None:
    if tensor is None:
        raise HeadUnusable(f"the MTP head lacks {name}; use the original repository's checkpoint")
    if tensor.shape != parameter.shape:
        raise HeadUnusable(
            f"the MTP head's {name} has shape {tensor.shape} where {parameter.shape} fits this "
            "model; use the head that belongs to it"
        )
    if mx.issubdtype(tensor.dtype, mx.floating) != mx.issubdtype(parameter.dtype, mx.floating):
        raise HeadUnusable(
            f"the MTP head's {name} is stored as {tensor.dtype}, not read; use a repository whose "
            "head is in bfloat16 or quantised by mlx in its affine mode"
        )
