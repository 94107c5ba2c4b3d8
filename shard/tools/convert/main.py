"""The child process of `exo-node models graft` and `convert`: one request, one checkpoint.

Started as `python -P -m exo_node.shard.tools.convert.main`. The result goes to stdout as JSON,
progress to stderr.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

from ...checkpoint.checkpoint import Checkpoint, read_checkpoint
from ...checkpoint.head_tensors import HeadFound, find_head
from ..child import ChildRequest, run_child
from .same_model import require_same_model
from .shards import Bits, Progress, new_folder


class ConvertRequest(ChildRequest):
    """The command's request.

    `bits` None: the backbone of `source` stays as it is; `target` is `source` or a new folder of
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
            from .convert import convert

            convert(source, folder, request.bits, Progress().show)
        elif folder != source.folder:
            _link(source.folder, folder)
        head = _head(folder, donor, request)
    return {"folder": request.target, "head": head, "note": note}


def _head(folder: Path, donor: Checkpoint, request: ConvertRequest) -> str:
    """Keeps or adds the head; "found" or why there is none, which is an error of a graft."""
    from .graft import graft

    donor_head = find_head(donor)
    if not request.head and not isinstance(donor_head, HeadFound):
        return donor_head.reason
    _ = graft(read_checkpoint(folder), donor, request.head_bits)
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


def main() -> NoReturn:
    """Entry point of the child process."""
    run_child("models convert", ConvertRequest, _run)


if __name__ == "__main__":
    main()
