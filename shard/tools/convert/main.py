"""The child process of `exo-node models graft` and `convert`: one request, one checkpoint.

Started as `python -P -m exo_node.shard.tools.convert.main`. The result goes to stdout as JSON,
progress to stderr.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

from pydantic import Field

from ....placement.errors import InvalidCheckpoint
from ...checkpoint.checkpoint import Checkpoint, read_checkpoint
from ...checkpoint.head_tensors import HeadFound, find_head
from ..child import ChildRequest, note, run_child
from .same_model import require_same_model

_NOTE_INTERVAL_S: Final = 5.0
Bits = Annotated[int, Field(ge=2, le=8)]


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
    with _atomic_folder(source.folder, Path(request.target)) as folder:
        if request.bits is not None:
            from .convert import convert

            convert(source, folder, request.bits, _Progress().show)
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


@contextlib.contextmanager
def _atomic_folder(source: Path, target: Path) -> Generator[Path]:
    """The folder to write into: `target` itself if it is the source, else a temporary one that
    becomes it."""
    if target == source:
        yield target
        return
    if target.exists():
        raise InvalidCheckpoint(f"{target} is there already; give another folder, or remove it")
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _link(source: Path, folder: Path) -> None:
    """Links the files into another folder, or copies them where links are impossible."""
    for path in (p for p in source.rglob("*") if p.is_file()):
        name = folder / path.relative_to(source)
        name.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path.resolve(), name)
        except OSError:  # another disk
            _ = shutil.copyfile(path, name)


class _Progress:
    def __init__(self) -> None:
        self._at = time.monotonic()

    def show(self, written: int, total: int) -> None:
        now = time.monotonic()
        if now - self._at >= _NOTE_INTERVAL_S or written >= total:
            self._at = now
            note(f"written {written / 1e9:,.2f} of {total / 1e9:,.2f} GB")


def _run(request: ConvertRequest) -> int:
    print(json.dumps(run(request)))
    return 0


def main() -> NoReturn:
    """Entry point of the child process."""
    run_child("models convert", ConvertRequest, _run)


if __name__ == "__main__":
    main()
