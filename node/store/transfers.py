"""One file on its way to this disk, from the hub or from a peer: partial file, hash, progress.

Blocks; raises OSError for the disk's own trouble.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ...placement.errors import DownloadFailed
from .identifiers import FileHash, FilePath

PARTIAL: Final = ".incomplete"
"""The end of the name of a file that has not arrived whole."""
_PIECE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that the hub or a peer offers; `hash` is None if the offer lacks it."""

    path: FilePath
    size: int
    hash: FileHash | None


@dataclass(frozen=True, slots=True)
class FileProgress:
    """Bytes of one file that are here."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of the whole model that are here; `file` is the one that just grew, or empty.

    `files`: each file by its path, as it is when it is read.
    """

    done_bytes: int
    total_bytes: int
    file: str
    files: Mapping[str, FileProgress] = field(default_factory=dict[str, FileProgress])


class Meter:
    """Counts bytes over several files and reports a number that never falls. Thread-safe."""

    def __init__(
        self,
        files: Mapping[str, FileProgress],
        report: Callable[[Progress], None],
        *,
        every_bytes: int,
    ) -> None:
        """`files`: those to count, with the bytes of each that are here already."""
        self._files = dict(files)
        self._total = sum(file.total_bytes for file in files.values())
        self._counted = self._reported = sum(file.done_bytes for file in files.values())
        self._report = report
        self._every = every_bytes
        self._lock = threading.Lock()
        report(self._progress(self._counted, ""))

    def add(self, count: int, file: str) -> None:
        """`count` is negative where a file starts over."""
        with self._lock:
            self._counted += count
            now = self._files[file]
            self._files[file] = FileProgress(now.done_bytes + count, now.total_bytes)
            if self._counted - self._reported >= self._every:
                self._reported = min(self._counted, self._total)
                self._report(self._progress(self._reported, file))

    def finish(self) -> None:
        with self._lock:
            for path, file in self._files.items():
                self._files[path] = FileProgress(file.total_bytes, file.total_bytes)
        self._report(self._progress(self._total, ""))

    def _progress(self, done_bytes: int, file: str) -> Progress:
        return Progress(done_bytes, self._total, file, MappingProxyType(self._files))


class PartialFile:
    """The bytes of a file that have arrived, under another name until their hash is checked.

    They outlive the process: after a kill there are whole files, and partial ones that resume.
    """

    def __init__(self, target: Path, size: int) -> None:
        """`size`: of the whole file, in bytes."""
        self._target = target
        self._size = size
        self._path = target.with_name(f"{target.name}{PARTIAL}")

    def arrived_bytes(self) -> int:
        """The bytes that need not be sent again. A partial file that is too long is deleted."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size > self._size:
            self._path.unlink()
            return 0
        return size

    @contextmanager
    def writer(self, *, restart: bool = False) -> Generator[Callable[[bytes], None]]:
        """A function that appends bytes, but never more than the file has."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("wb" if restart else "ab") as out:

            def write(data: bytes) -> None:
                _ = out.write(data[: self._size - out.tell()])

            yield write

    def append(self, data: bytes) -> None:
        with self.writer() as write:
            write(data)

    def finish(self, expected: FileHash, check: Callable[[], None] = lambda: None) -> str:
        """Gives the file its name if its hash is right, else deletes it. Returns its hash.

        `check` is called again and again while the file is read; an error of it leaves the file.
        """
        with self.writer():  # no byte has created an empty file
            pass
        with self._path.open("rb") as data:
            hasher = hashlib.sha256()
            if len(expected) == 40:
                size = os.fstat(data.fileno()).st_size
                hasher = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
            while piece := data.read(_PIECE_BYTES):
                check()
                hasher.update(piece)
            digest = hasher.hexdigest()
            os.fsync(data.fileno())
        if digest == expected:
            os.replace(self._path, self._target)
        else:
            self._path.unlink()
        return digest


def require_room(folder: Path, needed_bytes: int, model: str, remedy: str, param: str) -> None:
    """Requires free bytes on the disk of `folder`. Raises DownloadFailed."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise DownloadFailed(
            f"{model} needs {needed_bytes / 1e9:,.2f} GB more in {folder}, where "
            f"{free / 1e9:,.2f} GB are free. Free some space, or {remedy}.",
            param=param,
        )
