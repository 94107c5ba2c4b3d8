"""The child process of `exo-node models graft` and `convert`: one request, one checkpoint,
quantised by mlx-lm a few tensors at a time.

Started as `python -P -m exo_node.shard.tools.convert.main`. The result goes to stdout as JSON,
progress to stderr.
"""

# mlx and mlx_lm are typed in part only.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any, Final

from ...model import loader_import  # noqa: F401  # pyright: ignore[reportUnusedImport]

# What it does has to come before MLX is imported.
# isort: split
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

from ....placement.errors import InvalidCheckpoint
from ...checkpoint.chat_format import EXTRA_FILES
from ...checkpoint.checkpoint import INDEX_FILE, Checkpoint, is_weight_file, read_checkpoint
from ...model.open_model import open_model
from ..child import ChildRequest, run_child
from .graft import graft, require_same_model
from .shards import SHARD_BYTES, Bits, ProgressNotes, Report, new_folder, write_shards

_TEXTS: Final = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_OWN: Final = ("config.json", INDEX_FILE)


class ConvertRequest(ChildRequest):
    """The command's request.

    `bits`: None if the backbone of `source` stays as it is; `target` is `source` or a new folder of
    links to it. `head`: the folder of the head, "" for `source`'s own; `head_files`: the files that
    are present in it, empty for all.
    """

    source: str
    target: str
    bits: Bits | None
    head: str
    head_files: list[str]
    head_bits: Bits | None


def run(request: ConvertRequest) -> dict[str, Any]:
    """Makes the checkpoint; returns the result as JSON values. Raises ExoNodeError and OSError."""
    source = read_checkpoint(Path(request.source))
    only = frozenset(request.head_files) or None
    donor = read_checkpoint(Path(request.head), only=only) if request.head else source
    note = require_same_model(source, donor) if request.head else ""
    target = Path(request.target)
    in_place = contextlib.nullcontext(target)
    with in_place if target == source.folder else new_folder(target) as folder:
        if request.bits is not None:
            convert(source, folder, request.bits, ProgressNotes().show)
        elif folder != source.folder:
            _link(source.folder, folder)
        head = _head(folder, donor, request)
    return {"folder": request.target, "head": head, "note": note}


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
    original_config: dict[str, Any] = dict(source.config)
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
    sizes = {name: array.nbytes for name, array in weights.items()}
    write_shards(sizes, lambda name: {name: weights.pop(name)}, target, report, shard_bytes)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    _copy_texts(source.folder, target)


def _copy_texts(source: Path, target: Path) -> None:
    """Copies tokenizer, chat template and sampling; never code."""
    for path in source.iterdir():
        is_text = path.name.endswith(_TEXTS) and path.name not in _OWN
        if is_text and path.is_file() and not is_weight_file(path.name):
            _ = shutil.copyfile(path, target / path.name)
    for name in EXTRA_FILES:
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            _ = shutil.copyfile(source / name, target / name)


def _head(folder: Path, donor: Checkpoint, request: ConvertRequest) -> str:
    """Keeps or adds the head; "found" or why there is none, which is an error of a graft."""
    try:
        _ = graft(read_checkpoint(folder), donor, request.head_bits)
    except InvalidCheckpoint as fault:
        if request.head:
            raise
        return fault.message
    return "found"


def _link(source: Path, folder: Path) -> None:
    """Links the files into another folder, or copies them where links are impossible."""
    for path in (p for p in source.rglob("*") if p.is_file()):
        name = folder / path.relative_to(source)
        name.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path.resolve(), name)
        except OSError:  # another disk
            _ = shutil.copyfile(path, name)


def _run(request: ConvertRequest) -> int:
    print(json.dumps(run(request)))
    return 0


if __name__ == "__main__":
    run_child("models convert", ConvertRequest, _run)
