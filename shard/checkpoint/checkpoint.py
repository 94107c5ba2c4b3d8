"""A checkpoint folder as a validated table of its tensors, read from headers only and without mlx.

A checkpoint comes from outside: nothing of it is loaded before `read_checkpoint` accepts it.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from ...placement.config import HEAD_FIELDS, HIDDEN_FIELDS, LAYER_FIELDS, VOCABULARY_FIELDS
from .headers import (
    MAX_TENSORS,
    Tensor,
    fault,
    is_text_table,
    parse_header,
    parse_object,
    quote,
    read_header,
    read_whole,
)

MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 64 << 20

HEAD_FILES = (
    "mtp.safetensors",
    "model-mtp.safetensors",
    "mtp/weights.safetensors",
    "optiq/mtp.safetensors",
)
"""The files of native MTP heads that are not in the backbone's shards.

GLM-4.6 and 4.7, MTPLX and MLX OptiQ use the first, vllm-mlx the second, MTPLX the third, and OptiQ
at times the fourth.
"""

SAMPLE_BYTES = 512
"""Bytes of each tensor that `sample_digest` reads."""
INDEX_FILE = "model.safetensors.index.json"

_CONFIG_BOUNDS = {
    **dict.fromkeys(LAYER_FIELDS, 1024),
    **dict.fromkeys(HIDDEN_FIELDS, 65_536),
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    **dict.fromkeys(HEAD_FIELDS, 4096),
    "num_key_value_heads": 4096,
    "head_dim": 65_536,
    **dict.fromkeys(VOCABULARY_FIELDS, 2**20),
    "num_experts": 4096,
    "n_routed_experts": 4096,
}
"""A model class allocates by these before it sees a tensor."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that passed the checks; `tensors` covers the backbone's files and `HEAD_FILES`.

    `fingerprint` (SHA-256 over config.json and every header, in hex) is what two nodes compare
    before they serve stages of the same model. It does not cover the tensors' data.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    fingerprint: str


def is_weight_file(path: str) -> bool:
    """Whether a file, by its path in the checkpoint, is one that the engine may load.

    mlx-lm loads `model*.safetensors`. Others, such as the `consolidated.safetensors` that some
    publishers add, hold the same weights again and are neither checked nor downloaded.
    """
    shard = path.startswith("model") and path.endswith(".safetensors") and "/" not in path
    return shard or path in HEAD_FILES


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: its `text_config` where it has one."""
    nested: object = config.get("text_config")
    return cast("Mapping[str, Any]", nested) if isinstance(nested, dict) else config


def read_config(folder: Path) -> Mapping[str, Any]:
    """config.json of a checkpoint, its sizes in bounds; raises InvalidCheckpoint.

    `auto_map` is left in and never followed; `model_file`, which would run code, is refused.
    """
    path = folder / "config.json"
    return parse_config(path, read_whole(path, MAX_CONFIG_BYTES))


def read_checkpoint(folder: Path, *, only: frozenset[str] | None = None) -> Checkpoint:
    """Checks config.json, every header and the index of a folder; raises InvalidCheckpoint.

    `only`: the weight files that are there, of a checkpoint that was not fetched whole; the index,
    which names the others too, is not checked then.
    """
    path = folder / "config.json"
    raw_config = read_whole(path, MAX_CONFIG_BYTES)
    config = parse_config(path, raw_config)
    digest = hashlib.sha256(_framed(raw_config))
    tensors: dict[str, Tensor] = {}
    for name in sorted(only) if only is not None else _weight_files(folder):
        path = folder / name
        header, data_bytes = read_header(path)
        digest.update(_framed(name.encode()) + _framed(header))
        for tensor in parse_header(path, name, header, data_bytes):
            if (other := tensors.get(tensor.name)) is not None:
                raise fault(path, f"is also in {other.file}", tensor=tensor.name)
            tensors[tensor.name] = tensor
        if len(tensors) > MAX_TENSORS:
            raise fault(path, f"brings the checkpoint over {MAX_TENSORS} tensors")
    if only is None:
        _check_index(folder, tensors)
    return Checkpoint(folder, config, MappingProxyType(tensors), digest.hexdigest())


def sample_digest(folder: Path) -> str:
    """SHA-256, in hex, of the fingerprint of a checkpoint, and of some bytes from the middle of
    each tensor.

    Training changes nearly every number of a tensor, so weights of another training differ, though
    their headers are alike. Reading all of them would take minutes. Raises OSError and
    InvalidCheckpoint.
    """
    checkpoint = read_checkpoint(folder)
    digest = hashlib.sha256(checkpoint.fingerprint.encode())
    tensors = sorted(checkpoint.tensors.values(), key=lambda tensor: (tensor.file, tensor.start))
    for file, members in groupby(tensors, key=lambda tensor: tensor.file):
        for sample in _samples(folder / file, members):
            digest.update(sample)
    return digest.hexdigest()


def indexed_files(folder: Path) -> frozenset[str]:
    """The weight files in the index, none where there is no index. Raises InvalidCheckpoint."""
    files = (indexed_tensors(folder) or {}).values()
    return frozenset(file for file in files if is_weight_file(file))


def _framed(part: bytes) -> bytes:
    """A part after its length, so that parts cannot be shifted into one another in a hash."""
    return len(part).to_bytes(8, "little") + part


def parse_config(path: Path, raw: bytes) -> Mapping[str, Any]:
    config = parse_object(path, raw, strict=False)
    if (code := config.get("model_file")) is not None:
        raise fault(
            path,
            f"names code to run (model_file: {quote(code)}), which this engine never runs",
            remedy="Use a checkpoint whose architecture mlx-lm has built in.",
        )
    if not _are_ids(ends := config.get("eos_token_id")):
        raise fault(path, f"has eos_token_id = {quote(ends)}, not a token's id or a list of ids")
    for part in (config, cast("dict[str, object]", text_config(config))):
        for key, bound in _CONFIG_BOUNDS.items():
            if not _within(value := part.get(key), bound):
                raise fault(path, f"has {key} = {quote(value)}, not a number from 0 to {bound}")
    return MappingProxyType(config)


def _within(value: object, bound: int) -> bool:
    """Sizes may be a number or one per layer; a model class refuses anything else itself."""
    sizes = cast("list[object]", value) if isinstance(value, list) else [value]
    return all(0 <= size <= bound for size in sizes if isinstance(size, (int, float)))


def _are_ids(value: object) -> bool:
    """Whether a field that names tokens, absent or null at times, holds integers alone."""
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    return value is None or all(type(each) is int for each in values)


def _weight_files(folder: Path) -> list[str]:
    try:
        names = [name for name in os.listdir(folder) if is_weight_file(name)]
    except OSError as error:
        raise fault(folder, f"cannot be listed ({error.strerror})") from error
    if bad := next((name for name in names if not name.isprintable()), None):
        raise fault(folder, f"holds a file with the unusable name {quote(bad)}")
    if all(name in HEAD_FILES for name in names):
        remedy = "Download the model again, or put its files there."
        raise fault(folder, "holds no model*.safetensors", remedy=remedy)
    nested = [name for name in HEAD_FILES if "/" in name and os.path.lexists(folder / name)]
    return sorted(names + nested)


def indexed_tensors(folder: Path) -> dict[str, str] | None:
    """Each tensor's file by the index, or None if there is none. Raises InvalidCheckpoint."""
    path = folder / INDEX_FILE
    if not os.path.lexists(path):
        return None
    index = parse_object(path, read_whole(path, MAX_INDEX_BYTES), strict=True)
    if not is_text_table(index.get("weight_map")):
        raise fault(path, "has no weight_map from tensors to files")
    return cast("dict[str, str]", index["weight_map"])


def _check_index(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Compares the headers with the index, if there is one. Raises InvalidCheckpoint."""
    files = indexed_tensors(folder)
    if files is None:
        return
    path = folder / INDEX_FILE
    for name, file in files.items():
        if (tensor := tensors.get(name)) is None or tensor.file != file:
            actual = "nowhere" if tensor is None else f"in {tensor.file}"
            raise fault(path, f"should be in {quote(file)} but is {actual}", tensor=name)
    for tensor in tensors.values():
        if tensor.name not in files and tensor.file not in HEAD_FILES:
            raise fault(path, f"is in {tensor.file} but not in the index", tensor=tensor.name)


def _samples(path: Path, tensors: Iterable[Tensor]) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for tensor in tensors:
            size = min(SAMPLE_BYTES, tensor.nbytes)
            middle = tensor.start + (tensor.nbytes - size) // 2
            yield os.pread(descriptor, size, middle)
    finally:
        os.close(descriptor)
