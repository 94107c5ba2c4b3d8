"""The child process of `exo-node models graft` and `convert`: one request, one checkpoint.

Started as `python -P -m exo_node.shard.tools.convert.main` with the request as one JSON line on
stdin. The result goes to stdout as JSON, progress and one line for an error to stderr. It ends when
stdin does.
"""

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....placement.errors import ExoNodeError, InvalidCheckpoint
from ...checkpoint.checkpoint import Checkpoint, read_checkpoint
from ...checkpoint.head_tensors import HeadFound, find_head
from .same_model import require_same_model

_MAX_REQUEST_BYTES: Final = 1 << 20
_NOTE_INTERVAL_S: Final = 5.0
Bits = Annotated[int, Field(ge=2, le=8)]


class ConvertRequest(BaseModel):
    """The command's request.

    `bits` None: the backbone of `source` stays as it is; `target` is `source` or a new folder of
    links to it. `head`: the folder of the head, "" for `source`'s own; `head_files`: the files that
    are present in it, empty for all.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

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
            _note(f"written {written / 1e9:,.2f} of {total / 1e9:,.2f} GB")


def main() -> int:
    """Runs the process; the exit status: 0 success, 1 an invalid checkpoint, 2 a bad request."""
    line = sys.stdin.readline(_MAX_REQUEST_BYTES)
    try:
        request = ConvertRequest.model_validate_json(line)
    except ValidationError as error:
        _note(f"exo-node: the request to convert is malformed ({error.error_count()} faults)")
        return 2
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        result = run(request)
    except ExoNodeError as error:
        _note(f"exo-node: {error.message}")
        return 1
    except OSError as error:
        _note(f"exo-node: {error}; check the disk and its permissions, and try again")
        return 1
    print(json.dumps(result))
    return 0


def _end_with_stdin() -> None:
    """Ends this process when the command has ended."""
    while os.read(0, 65536):  # not `sys.stdin`, whose lock the end of the process waits for
        pass
    os._exit(130)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
