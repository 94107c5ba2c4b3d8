"""Makes a quantised copy of a checkpoint with mlx-lm's quantiser, a few tensors at a time."""

# mlx and mlx_lm are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

from ....placement.errors import InvalidCheckpoint
from ...checkpoint.checkpoint import INDEX_FILE, Checkpoint, is_weight_file
from ...model.open_model import open_model

SHARD_BYTES: Final = 1 << 30
"""The size of a file of the copy, which is also the part in memory at once."""
_TEXTS: Final = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_OWN: Final = ("config.json", INDEX_FILE)

Report = Callable[[int, int], None]
"""Bytes written so far, and in all."""


def convert(
    source: Checkpoint,
    target: Path,
    bits: int,
    report: Report,
    *,
    group_size: int = 64,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the backbone of `source`, quantised, into the folder `target`, which exists.

    A draft head is not included: `graft` adds it. Raises InvalidCheckpoint and OSError.
    """
    original_config: dict[str, Any] = json.loads((source.folder / "config.json").read_bytes())
    if "quantization" in original_config:
        raise InvalidCheckpoint(
            f"{source.folder.name} is quantised already; convert the original repository",
            param="quantization",
        )
    model = open_model(source.folder)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits of a weight
        model, config = quantize_model(model, original_config, group_size, bits)
    weights = dict(tree_flatten(model.parameters()))
    del model
    index = _save(weights, target, report, shard_bytes)
    (target / INDEX_FILE).write_text(json.dumps(index, indent=1))
    (target / "config.json").write_text(json.dumps(config, indent=1))
    _copy_texts(source.folder, target)


def _save(
    weights: dict[str, mx.array], target: Path, report: Report, shard_bytes: int
) -> dict[str, Any]:
    """Writes one shard after the other and frees it; returns the index."""
    total = sum(array.nbytes for array in weights.values())
    shards = list(_shards(weights, shard_bytes))
    files: dict[str, str] = {}
    written_bytes = 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = {name: weights.pop(name) for name in names}
        for array in shard.values():  # one by one: their sources are several times as large
            mx.eval(array)
        mx.save_safetensors(str(target / file), shard, {"format": "mlx"})
        files |= dict.fromkeys(names, file)
        written_bytes += sum(array.nbytes for array in shard.values())
        shard.clear()
        mx.clear_cache()
        report(written_bytes, total)
    return {"metadata": {"total_size": total}, "weight_map": files}


def _shards(weights: dict[str, mx.array], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, array in weights.items():
        if names and size + array.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += array.nbytes
    yield names


def _copy_texts(source: Path, target: Path) -> None:
    """Copies tokenizer, chat template and sampling; never code."""
    for path in source.iterdir():
        is_text = path.name.endswith(_TEXTS) and path.name not in _OWN
        if is_text and path.is_file() and not is_weight_file(path.name):
            _ = shutil.copyfile(path, target / path.name)
