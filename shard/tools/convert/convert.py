"""A quantised copy of a checkpoint by mlx-lm's own quantiser, a few tensors at a time."""

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
from ...model.stage_model import open_model

SHARD_BYTES: Final = 1 << 30
"""A file of the copy, and what of it is in memory at once."""
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

    A draft head is no part of it: `graft` puts it there. Raises InvalidCheckpoint and OSError.
    """
    given: dict[str, Any] = json.loads((source.folder / "config.json").read_bytes())
    if "quantization" in given:
        raise InvalidCheckpoint(
            f"{source.folder.name} is quantised already; convert the original repository",
            param="quantization",
        )
    model = open_model(source.folder)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits of a weight
        model, config = quantize_model(model, given, group_size, bits)
    weights = dict(tree_flatten(model.parameters()))
    del model
    index = _save(weights, target, report, shard_bytes)
    (target / INDEX_FILE).write_text(json.dumps(index, indent=1))
    (target / "config.json").write_text(json.dumps(config, indent=1))
    _copy_texts(source.folder, target)


def _save(
    weights: dict[str, mx.array], target: Path, report: Report, shard_bytes: int
) -> dict[str, Any]:
    """One shard after the other; what is written is let go of."""
    total = sum(array.nbytes for array in weights.values())
    shards = list(_shards(weights, shard_bytes))
    files: dict[str, str] = {}
    done = 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = {name: weights.pop(name) for name in names}
        for array in shard.values():  # one by one: what they are made of is several times as large
            mx.eval(array)
        mx.save_safetensors(str(target / file), shard, {"format": "mlx"})
        files |= dict.fromkeys(names, file)
        done += sum(array.nbytes for array in shard.values())
        shard.clear()
        mx.clear_cache()
        report(done, total)
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
    """Tokenizer, chat template, sampling; never code."""
    for path in source.iterdir():
        wanted = path.name.endswith(_TEXTS) and path.name not in _OWN
        if wanted and path.is_file() and not is_weight_file(path.name):
            _ = shutil.copyfile(path, target / path.name)
