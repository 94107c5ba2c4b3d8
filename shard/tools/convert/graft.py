"""Adds the native MTP head of one checkpoint to another, as a file of its own, after a check by
sizes and tokens that it belongs there."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx

from ....mtp.seams import FORWARD_FAULTS
from ....placement.errors import InvalidCheckpoint
from ...checkpoint.checkpoint import Checkpoint, read_checkpoint, text_config
from ...checkpoint.head_tensors import HeadFound, HeadMissing, find_head
from ...model.open_model import backbone_is_raw, head_arrays, headline, require_head_fits

HEAD_FILE: Final = "mtp.safetensors"
"""mlx-lm reads `model*.safetensors` only, so other programs can still read the checkpoint."""
_PART: Final = "mtp.part.safetensors"
_GROUPS: Final = (64, 32)
_ROUTERS: Final = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
"""Routers are small, and a wrong choice of experts costs more than their bits."""
_NORMS: Final = ("norm.weight", "layernorm.weight", "norm_hidden.weight", "norm_embedding.weight")
_FUSED: Final = ("experts.gate_up_proj", "experts.down_proj")
_BLOCK: Final = 128
_SCALE: Final = "_scale_inv"
_SIZES: Final = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "kv_lora_rank",
)
"""Sizes of a head, or of the backbone that it was trained with."""
_TOKENIZER: Final = "tokenizer.json"
_MAX_TOKENIZER_BYTES: Final = 256 << 20

Arrays = dict[str, mx.array]


def require_same_model(target: Checkpoint, source: Checkpoint) -> str:
    """Checks that the head fits. Raises InvalidCheckpoint if it would draft nonsense.

    Returns a note about a missing check, or "".
    """
    ours, theirs = text_config(target.config), text_config(source.config)
    for key in _SIZES:
        if ours.get(key) != theirs.get(key):
            raise InvalidCheckpoint(
                f"the head of {source.folder.name} does not belong to {target.folder.name}: {key} "
                f"is {theirs.get(key)!r} there and {ours.get(key)!r} here; take it from the model "
                "that this one was made of",
                param=key,
            )
    tokens, others = _vocabulary(target.folder), _vocabulary(source.folder)
    if tokens is None or others is None:
        without_tokens = target if tokens is None else source
        return f"{without_tokens.folder.name} has no {_TOKENIZER}, so the tokens were not compared"
    if tokens != others:
        raise InvalidCheckpoint(
            f"{source.folder.name} has other tokens than {target.folder.name} ({_TOKENIZER}): its "
            "head would draft the wrong ones; take it from the model that this one was made of",
            param=_TOKENIZER,
        )
    return ""


def graft(target: Checkpoint, source: Checkpoint, bits: int | None) -> HeadFound:
    """Writes the head of `source` into the folder of `target`; returns the head found there.

    The caller must have called `require_same_model`. `bits`: bits of its quantised matrices, None:
    they stay as they are (FP8 becomes bfloat16). Raises InvalidCheckpoint and leaves the folder
    unchanged.
    """
    if isinstance(find_head(target), HeadFound):
        raise InvalidCheckpoint(f"{target.folder.name} has its MTP head; there is nothing to graft")
    donor_head = find_head(source)
    if isinstance(donor_head, HeadMissing):
        raise InvalidCheckpoint(f"{source.folder.name} gives no head: {donor_head.reason}")
    try:
        head = _standard_head(source, donor_head)
        if bits is not None:
            head = _quantise(head, bits)
    except FORWARD_FAULTS as fault:
        raise InvalidCheckpoint(
            f"the head of {source.folder.name} cannot be read ({headline(fault)}); take it from "
            "the original repository"
        ) from fault
    _write(target.folder, head)
    try:
        return _read_back(target.folder)
    except InvalidCheckpoint:
        (target.folder / HEAD_FILE).unlink()
        raise


def _standard_head(source: Checkpoint, donor_head: HeadFound) -> Arrays:
    """The head's tensors by their names in `source`, as a file of their own has them.

    Norms have their final values, and FP8 blocks are bfloat16.
    """
    canonical = head_arrays(source, donor_head)
    arrays = {donor_head.tensors[name].name: array for name, array in canonical.items()}
    for name in [name for name in arrays if name.endswith(_SCALE)]:
        weight = name.removesuffix(_SCALE)
        arrays[weight] = _from_blocks(arrays[weight], arrays.pop(name))
    if donor_head.layout == "qwen" and backbone_is_raw(source, donor_head):
        for name in arrays:
            if name.endswith(_NORMS):
                arrays[name] = arrays[name] + 1.0
    return arrays


def _from_blocks(weight: mx.array, scale: mx.array) -> mx.array:
    rows, columns = weight.shape
    padded = mx.pad(
        mx.from_fp8(weight, dtype=mx.bfloat16), [(0, -rows % _BLOCK), (0, -columns % _BLOCK)]
    )
    blocks = padded.reshape(scale.shape[0], _BLOCK, scale.shape[1], _BLOCK)
    whole = (blocks * scale[:, None, :, None]).reshape(padded.shape)
    return whole[:rows, :columns].astype(mx.bfloat16)


def _quantise(head: Arrays, bits: int) -> Arrays:
    """Quantises all matrices but routers, packed ones, and those that fit no group size."""
    packed: Arrays = {}
    for name, array in head.items():
        stem = name if name.endswith(_FUSED) else name.removesuffix(".weight")
        group = next((size for size in _GROUPS if array.ndim > 1 and not array.shape[-1] % size), 0)
        matrix = name.endswith((".weight", *_FUSED)) and mx.issubdtype(array.dtype, mx.floating)
        if not group or not matrix or name.endswith(_ROUTERS) or f"{stem}.scales" in head:
            packed[name] = array
            continue
        weight, scales, biases = mx.quantize(array, group_size=group, bits=bits)
        packed |= {f"{stem}.weight": weight, f"{stem}.scales": scales, f"{stem}.biases": biases}
    return packed


def _write(folder: Path, arrays: Arrays) -> None:
    part = folder / _PART
    try:
        mx.save_safetensors(str(part), arrays, {"format": "mlx"})
        os.replace(part, folder / HEAD_FILE)
    finally:
        part.unlink(missing_ok=True)


def _read_back(folder: Path) -> HeadFound:
    """Reads the written head as hostile input, as a load would. Raises InvalidCheckpoint."""
    checkpoint = read_checkpoint(folder)
    head = find_head(checkpoint)
    if isinstance(head, HeadMissing):
        raise InvalidCheckpoint(f"the head does not fit {folder.name}: {head.reason}")
    require_head_fits(checkpoint, head)
    return head


def _vocabulary(folder: Path) -> Mapping[str, Any] | list[Any] | None:
    """The tokenizer's table of tokens; None if there is no such file or table."""
    path = folder / _TOKENIZER
    if not path.is_file() or path.stat().st_size > _MAX_TOKENIZER_BYTES:
        return None
    try:
        whole: object = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(
            f"{folder.name}/{_TOKENIZER} is no JSON ({error}); download the model again",
            param=_TOKENIZER,
        ) from error
    model = cast("dict[str, Any]", whole).get("model") if isinstance(whole, dict) else None
    return cast("dict[str, Any]", model).get("vocab") if isinstance(model, dict) else None
