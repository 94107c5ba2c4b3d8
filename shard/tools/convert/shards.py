"""Writes a new checkpoint's weights a file at a time, in a folder that appears when it is whole."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import mlx.core as mx

from ....placement.errors import InvalidCheckpoint
from ...checkpoint.checkpoint import INDEX_FILE
from ..child import note

SHARD_BYTES: Final = 1 << 30
"""The size of a file of the copy, which is also the part in memory at once."""
_NOTE_INTERVAL_S: Final = 5.0
_PART: Final = ".exo-part"

Bits = Literal[2, 3, 4, 5, 6, 8]
"""The bits of a weight that MLX quantises to."""
Report = Callable[[int, int], None]
"""Bytes written so far, and in all."""


def write_shards(
    sizes: Mapping[str, int],
    read: Callable[[str], Mapping[str, mx.array]],
    target: Path,
    report: Report,
    limit: int = SHARD_BYTES,
) -> None:
    """Writes the arrays of each source, about `limit` bytes a file, and the index. Raises OSError.

    `sizes`: the bytes that `read` returns of a source.
    """
    total = sum(sizes.values())
    shards = list(_shards(sizes, limit))
    files: dict[str, str] = {}
    written_bytes = 0
    for number, sources in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard: dict[str, mx.array] = {}
        for source in sources:  # one by one: they are several times as large
            arrays = read(source)
            mx.eval(list(arrays.values()))
            shard |= arrays
        _save(target / file, shard)
        files |= dict.fromkeys(shard, file)
        written_bytes += sum(array.nbytes for array in shard.values())
        shard.clear()
        mx.clear_cache()
        report(written_bytes, total)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    _ = (target / INDEX_FILE).write_text(json.dumps(index, indent=1))


def _save(path: Path, arrays: dict[str, mx.array]) -> None:
    try:
        mx.save_safetensors(str(path), arrays, {"format": "mlx"})
    except RuntimeError as error:  # MLX's word for a full disk
        raise OSError(f"{path.name} could not be written: {error}") from error


def _shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, each in sizes.items():
        if names and size + each > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += each
    yield names


@contextlib.contextmanager
def new_folder(target: Path) -> Generator[Path]:
    """A temporary folder that becomes `target`, or is deleted.

    What a killed command has left beside it is deleted first. Raises InvalidCheckpoint where
    `target` exists or another command makes it.
    """
    if os.path.lexists(target):
        raise InvalidCheckpoint(f"{target} is there already; give another name, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}{_PART}")
    for abandoned in target.parent.glob(f".*{_PART}"):
        _delete_abandoned(abandoned)
    try:
        part.mkdir()
    except FileExistsError as error:
        raise InvalidCheckpoint(f"another command is making {target}; wait for it") from error
    descriptor = os.open(part, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield part
        os.rename(part, target)
    except BaseException:  # Ctrl-C too: no half of a checkpoint stays; the error passes on
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def _delete_abandoned(part: Path) -> None:
    """Deletes a temporary folder that no living process has locked."""
    try:
        descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # deleted meanwhile, or no folder
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(part, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)


class ProgressNotes:
    """Notes on stderr of how much is written, some seconds apart."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def show(self, size: int, total: int) -> None:
        now = time.monotonic()
        if now - self._at >= _NOTE_INTERVAL_S or size >= total:
            self._at = now
            note(f"written {size / 1e9:,.2f} of {total / 1e9:,.2f} GB")
