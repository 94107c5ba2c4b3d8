"""The files that peers may copy: those of the models that this node lists, and nothing else.

A peer's request is checked like hostile input. Blocks.
"""

import hashlib
import os
import stat
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...placement.errors import InvalidRequest, ModelNotFound
from ...placement.ids import ModelId
from ...proto import peer_pb2 as pb
from ...shard.checkpoint.checkpoint import HEAD_FILES
from .identifiers import Sha256
from .library import ModelLibrary
from .model_folder import is_copied_file, repository_folder

CHUNK: Final = 1 << 20
_HASHED_BYTES: Final = 32 << 20
"""A file up to this size has its hash in the offer; a larger one's has a call of its own."""

_Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _File:
    """An offered file: where it lies, and which version of it was offered."""

    path: Path
    version: _Version
    sha256: str

    @property
    def size(self) -> int:
        return self.version[0]


class SharedModels:
    """Answers for the models of one library."""

    def __init__(self, library: ModelLibrary) -> None:
        self._library = library
        self._offered: dict[tuple[str, str], _File] = {}
        self._hashes: dict[tuple[Path, _Version], str] = {}

    def offer(self, model: str) -> pb.ModelOffer:
        """The files of a model that is whole here. Raises ModelNotFound and InvalidCheckpoint.

        InvalidRequest where one of them is a link that leaves the model's folder.
        """
        entry = self._library.scan().get(ModelId(model))
        if entry is None or (folder := entry.folder) is None:
            raise ModelNotFound(f"{model[:200]!r} is not on this node", param="model")
        checkpoint = self._library.checkpoint(folder)
        files = {name: self._file(model, folder, name) for name in _names(folder)}
        self._offered |= {(model, name): file for name, file in files.items()}
        return pb.ModelOffer(
            fingerprint=checkpoint.fingerprint,
            card=entry.card.model_dump_json(),
            from_hub=repository_folder(folder) is not None,
            files=[
                pb.OfferedFile(path=name, size=file.size, sha256=file.sha256)
                for name, file in files.items()
            ],
        )

    def digest(self, model: str, path: str) -> str:
        """The SHA-256 of a whole file, computed once. Raises as `open`."""
        file = self._offered_file(model, path)
        key = (file.path, file.version)
        if file.sha256 or key in self._hashes:
            return file.sha256 or self._hashes[key]
        digest = hashlib.sha256()
        with closing(_open(file, path, 0)) as reading:
            while chunk := reading.read():
                digest.update(chunk)
        self._hashes[key] = digest.hexdigest()
        return digest.hexdigest()

    def open(self, request: pb.FileRequest) -> "FileRange":
        """Opens a file at a byte. Raises ModelNotFound, and InvalidRequest if it is not offered."""
        file = self._offered_file(request.model, request.path)
        return _open(file, request.path, request.start)

    def _offered_file(self, model: str, path: str) -> _File:
        if (model, path) not in self._offered:
            _ = self.offer(model)
        if (file := self._offered.get((model, path))) is None:
            raise InvalidRequest(
                f"{path[:200]!r} is not one of the files of {model[:200]!r} that a node gives",
                param="path",
            )
        return file

    def _file(self, model: str, folder: Path, name: str) -> _File:
        root = (repository_folder(folder) or folder).resolve()
        path = (folder / name).resolve()
        if root not in path.parents:
            raise InvalidRequest(
                f"{name} of {model} is a link out of the model's folder, which no peer is given; "
                "put the file itself there",
                param="path",
            )
        version = _version(os.stat(path))
        if path.parent.name == "blobs" and Sha256.read(path.name):
            return _File(path, version, path.name)  # the hub's cache names blobs by their hashes
        digest = self._hashes.get((path, version), "")
        if not digest and version[0] <= _HASHED_BYTES:
            digest = self._hashes[path, version] = hashlib.sha256(path.read_bytes()).hexdigest()
        return _File(path, version, digest)


class FileRange:
    """A range of one file, a chunk at a time; raises InvalidRequest once the file has changed."""

    def __init__(self, descriptor: int, file: _File, name: str, length: int) -> None:
        self._descriptor = descriptor
        self._file = file
        self._name = name
        self._left = length

    def read(self) -> bytes:
        """Empty at the end of the range."""
        data = os.read(self._descriptor, min(CHUNK, self._left))
        if _version(os.fstat(self._descriptor)) != self._file.version or (self._left and not data):
            raise _changed(self._name)
        self._left -= len(data)
        return data

    def close(self) -> None:
        os.close(self._descriptor)


def _open(file: _File, name: str, start: int) -> FileRange:
    if not 0 <= start <= file.size:
        raise InvalidRequest(
            f"bytes from {start} on of {name} were asked for, which has {file.size}",
            param="start",
        )
    try:  # the path is resolved: a link there is a new one
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as fault:
        raise InvalidRequest(f"{name} cannot be read ({fault.strerror})", param="path") from fault
    now = os.fstat(descriptor)
    if _version(now) != file.version or not stat.S_ISREG(now.st_mode):
        os.close(descriptor)
        raise _changed(name)
    _ = os.lseek(descriptor, start, os.SEEK_SET)
    return FileRange(descriptor, file, name, file.size - start)


def _changed(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} has changed since it was offered; ask again", param="path")


def _version(status: os.stat_result) -> _Version:
    return status.st_size, status.st_mtime_ns, status.st_ino


def _names(folder: Path) -> list[str]:
    own = [path.name for path in folder.iterdir()] + [n for n in HEAD_FILES if "/" in n]
    return sorted(name for name in own if is_copied_file(name) and (folder / name).is_file())
