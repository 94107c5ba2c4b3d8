"""Files of cached prefixes: safetensors whose description and tensors carry checksums. Also such a
file as it comes in pieces from another runner.

A file is hostile input until its checksums have matched: it may be torn, altered, renamed, or
replaced by a link or a pipe. They are no proof against an author who computes them again; the
folder, which only the node's user may enter, is.
"""

import hashlib
import json
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeAlias, cast

from .files import Buffer

FORMAT: Final = 4
"""Version of the format. Folders' names begin with it, so that other versions are recognised."""
SUFFIX: Final = ".safetensors"
PIECE_BYTES: Final = 4 << 20
"""Bytes that are hashed or written between two calls of `check`: a few milliseconds of work."""
MAX_HEADER_BYTES: Final = 64 << 20
READERS: Final = 4
"""Threads that read a file's tensors: one computes checksums at about 1.3 GB/s."""
READ_AHEAD: Final = 8
"""Tensors that are in memory, or being read, before the one in front of them is used."""
MOST_AT_ONCE: Final = 1 << 30
"""Bytes of one read: macOS refuses 2 GiB."""
_FOLDER: Final = re.compile(r"([0-9]+-)?[0-9a-f]{32}")
"""The folders of all formats, of which the first had no number."""
_FILE: Final = re.compile(r"[0-9a-f]{40}(-mtp)?\.safetensors(\.[0-9a-f]{8})?")
"""Files, and the partial ones of processes that were killed."""
_CHECKSUMS: Final = ThreadPoolExecutor(READERS, "checksums")
_LENGTH_BYTES: Final = 8
_PREFIX: Final = "prefix"
_CHECKSUM: Final = "sha256"


Offsets: TypeAlias = Mapping[str, Mapping[str, Sequence[int]]]
"""A safetensors header without its metadata."""


TensorContent: TypeAlias = tuple[str, tuple[int, ...], Any]
"""A tensor's dtype, shape and bytes, or what `PrefixReceiver` made of them."""


class TensorEntry(NamedTuple):
    """A tensor as a header describes it."""

    dtype: str
    shape: Sequence[int]
    checksum: str
    bytes: int


class StoredTensor(NamedTuple):
    """A tensor to write."""

    dtype: str
    """The name that safetensors has for it."""
    shape: tuple[int, ...]
    data: memoryview
    """Its bytes, in one dimension."""


class PrefixFile:
    """An open file whose description has matched its checksum. Its tensors are still to be read."""

    def __init__(self, file: IO[bytes]) -> None:
        """Reads the description. Raises ValueError for a file that was changed."""
        self._file = file
        self.size = _size_of_regular(file)
        header_bytes = _header_size(self._bytes_at(0, 8))
        if header_bytes > self.size - 8:
            raise ValueError("it is no safetensors file")
        self._data_begin = 8 + header_bytes
        self.description, self._offsets = _read_description(self._bytes_at(8, header_bytes))

    def tensor_bytes(self, name: str) -> int:
        """The size of a tensor. Raises ValueError or a parser's error."""
        begin, end = self._offsets[name]["data_offsets"]
        return end - begin

    def tensors(self, names: Iterable[str]) -> Generator[TensorContent]:
        """The tensors of these names, in order: see `tensor`. Threads read and verify the following
        ones meanwhile, so the file must stay open until the generator is closed."""
        pending = deque[Future[TensorContent]]()
        with ThreadPoolExecutor(READERS, "prefix-reader") as pool:
            try:
                for name in names:
                    pending.append(pool.submit(self.tensor, name))
                    if len(pending) > READ_AHEAD:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for each in pending:
                    _ = each.cancel()

    def tensor(self, name: str) -> TensorContent:
        """A tensor's dtype, shape and bytes. Raises ValueError if they are not those written. Any
        thread."""
        dtype, shape, checksum = self.description["tensors"][name]
        begin, end = self._offsets[name]["data_offsets"]
        if not 0 <= begin <= end <= self.size - self._data_begin:
            raise ValueError("it ends too early")
        data = self._bytes_at(self._data_begin + begin, end - begin)
        if hashlib.sha256(data).hexdigest() != checksum:
            raise ValueError("its bytes are not those that were written")
        return dtype, tuple(shape), data

    def _bytes_at(self, offset: int, count: int) -> bytes:
        pieces, end = list[bytes](), offset + count
        while offset < end:
            piece = os.pread(self._file.fileno(), min(end - offset, MOST_AT_ONCE), offset)
            if not piece:
                raise ValueError("it ends too early")
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _header_size(length: Buffer) -> int:
    """The bytes of the header after its length. Raises ValueError for too long a one."""
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError("it is no safetensors file")
    return size


def _read_description(header: Buffer) -> tuple[dict[str, Any], Offsets]:
    """A file's description, and the offsets of its tensors. Raises ValueError."""
    try:
        offsets = json.loads(bytes(header))
        metadata: Mapping[str, str] = offsets.pop("__metadata__")
        text, checksum = metadata[_PREFIX], metadata[_CHECKSUM]
        is_intact = checksum == _checksum_of(text)
    except (AttributeError, KeyError, RecursionError, TypeError) as fault:
        raise ValueError("it is no file of a prefix") from fault
    if not is_intact:
        raise ValueError("its description is not what was written")
    return cast("dict[str, Any]", json.loads(text)), offsets


@contextmanager
def opened(path: Path) -> Generator[PrefixFile]:
    """Opens a file, but follows no link and waits for no writer of a pipe.

    Raises OSError if it cannot be opened, and what `PrefixFile` raises.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags), "rb", buffering=0) as file:
        yield PrefixFile(cast("IO[bytes]", file))


def pieces_of(
    description: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    check: Callable[[], None],
) -> Iterator[Buffer]:
    """The content of a file, in pieces. `check` is called between pieces and may raise."""
    contents = [each.data for each in tensors.values()]
    digests = _CHECKSUMS.map(partial(_digest, check=check), contents)
    entries = {
        name: TensorEntry(each.dtype, each.shape, digest, each.data.nbytes)
        for (name, each), digest in zip(tensors.items(), digests, strict=True)
    }
    yield header_of(description, entries)
    for each in tensors.values():
        yield from _cut(each.data, check)


def header_of(description: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> bytes:
    """The beginning of a file, before the bytes of its tensors, in order."""
    described = {name: [each.dtype, each.shape, each.checksum] for name, each in tensors.items()}
    prefix = json.dumps({**description, "tensors": described})
    header: dict[str, Any] = {"__metadata__": {_PREFIX: prefix, _CHECKSUM: _checksum_of(prefix)}}
    offset = 0
    for name, each in tensors.items():
        end = offset + each.bytes
        header[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class ReceivedPrefix:
    """A whole file whose checksums have matched. Each tensor is given out once, and then freed."""

    def __init__(self, description: Mapping[str, Any], tensors: dict[str, Any], size: int) -> None:
        self.description = description
        self._tensors = tensors
        self.size = size
        """Bytes that came."""

    @property
    def held_bytes(self) -> int:
        """Any thread: bytes of the tensors that are still in memory."""
        return sum(len(data) for data in list(self._tensors.values()))

    def free(self) -> None:
        """Frees the tensors that were not given out."""
        self._tensors.clear()

    @property
    def rows(self) -> int:
        return self.description["rows"]

    def content_of(self, name: str) -> Any:
        """A converted tensor that was not taken by `tensors`. Raises KeyError if there is none."""
        return self._tensors[name]

    def tensors(self, names: Iterable[str]) -> Generator[TensorContent]:
        """The tensors of these names. Raises KeyError if there is none, or none any more."""
        for name in names:
            dtype, shape, _ = self.description["tensors"][name]
            yield dtype, tuple(shape), self._tensors.pop(name)


class PrefixReceiver:
    """Takes the pieces of one file, in order. Any thread, one at a time."""

    def __init__(
        self,
        limit: int,
        check: Callable[[Mapping[str, Any]], None],
        convert: Callable[[Sequence[bytearray]], Sequence[Any]] = lambda tensors: tensors,
    ) -> None:
        """`limit`: bytes of all tensors. `check` is called with the description, before any tensor
        is taken, and raises ValueError or a parser's error if it is not what was asked for.
        `convert`: makes what is kept of tensors' verified bytes."""
        self._limit = limit
        self._check = check
        self._convert = convert
        self._header: bytearray | None = bytearray()
        """None once it is complete."""
        self._description: Mapping[str, Any] = {}
        self._pending: list[tuple[str, int]] = []
        """Names and sizes of the tensors that are to come, the next one last."""
        self._tensor = bytearray()
        self._whole: dict[str, bytearray] = {}
        """Tensors that are complete, but not verified."""
        self._tensors: dict[str, Any] = {}
        self._size = 0

    def feed(self, piece: bytes) -> None:
        """Takes the next bytes. Raises ValueError for what was not written."""
        try:
            self._feed(piece)
        # A description that was written by another program, whatever it has or lacks.
        except (AttributeError, LookupError, RecursionError, TypeError) as fault:
            raise ValueError("it is no file of a prefix") from fault

    def _feed(self, piece: bytes) -> None:
        self._size += len(piece)
        rest = memoryview(piece)
        if self._header is not None:
            rest = self._feed_header(self._header, rest)
        while rest:
            if not self._pending:
                raise ValueError("it has more bytes than it describes")
            needed = self._pending[-1][1] - len(self._tensor)
            self._tensor += rest[:needed]
            rest = rest[needed:]
            self._finish_tensors()
        self._verify()

    def finish(self) -> ReceivedPrefix:
        """The file, after its last piece. Raises ValueError if something is missing."""
        if self._header is not None or self._pending:
            raise ValueError("it ends too early")
        return ReceivedPrefix(self._description, self._tensors, self._size)

    def _feed_header(self, header: bytearray, piece: memoryview) -> memoryview:
        """Takes bytes of the header. Returns those after it."""
        while piece and self._header is not None:
            is_sized = len(header) >= _LENGTH_BYTES
            size = _header_size(header[:_LENGTH_BYTES]) if is_sized else 0
            missing = _LENGTH_BYTES + size - len(header)
            header += piece[:missing]
            piece = piece[missing:]
            if len(header) == _LENGTH_BYTES + _header_size(header[:_LENGTH_BYTES]):
                self._begin(*_read_description(header[_LENGTH_BYTES:]))
        return piece

    def _begin(self, description: Mapping[str, Any], offsets: Offsets) -> None:
        self._check(description)
        position, sizes = 0, list[tuple[str, int]]()
        for name, entry in offsets.items():
            begin, end = entry["data_offsets"]
            if begin != position or end < begin:
                raise ValueError("its tensors do not follow each other")
            sizes.append((name, end - begin))
            position = end
        if position > self._limit:
            raise ValueError(f"its {position} bytes are more than the prefix cache has room for")
        if offsets.keys() != description["tensors"].keys():
            raise ValueError("its tensors are not those that it describes")
        self._header, self._description, self._pending = None, description, sizes[::-1]
        self._finish_tensors()

    def _finish_tensors(self) -> None:
        """Notes the tensors that are complete."""
        while self._pending and len(self._tensor) == self._pending[-1][1]:
            self._whole[self._pending.pop()[0]], self._tensor = self._tensor, bytearray()

    def _verify(self) -> None:
        contents = [memoryview(data) for data in self._whole.values()]
        digests = _CHECKSUMS.map(_digest, contents)
        for name, digest in zip(self._whole, digests, strict=True):
            if digest != self._description["tensors"][name][2]:
                raise ValueError("its bytes are not those that were written")
        if self._whole:
            contents = self._convert(list(self._whole.values()))
            self._tensors |= zip(self._whole, contents, strict=True)
            self._whole.clear()


class FileSize(NamedTuple):
    """A file below the folder of all prefixes, partial ones of ended processes included."""

    used_ns: int
    bytes: int
    path: Path


def files_in(folder: Path) -> list[Path]:
    """The files of prefixes in one folder, whole and partial."""
    return [path for path in folder.glob(f"*{SUFFIX}*") if _FILE.fullmatch(path.name)]


def files_below(root: Path) -> list[FileSize]:
    """All files of prefixes, the least recently used first. Links are not followed, from `root` on,
    and whatever has another name is not the cache's."""
    sizes, folders = list[FileSize](), () if root.is_symlink() else root.glob("*")
    for path in chain.from_iterable(map(files_in, filter(_is_folder, folders))):
        try:
            status = path.lstat()
        except FileNotFoundError:  # another process made room
            continue
        if not stat.S_ISDIR(status.st_mode):
            sizes.append(FileSize(status.st_mtime_ns, status.st_size, path))
    return sorted(sizes)


def make_room(root: Path, room: int) -> None:
    """Deletes the least recently used files below `root` until `room` bytes hold the rest."""
    files = files_below(root)
    total = sum(each.bytes for each in files)
    for each in files:
        if total <= room:
            return
        each.path.unlink(missing_ok=True)
        total -= each.bytes


def _is_folder(path: Path) -> bool:
    return bool(_FOLDER.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()


def _size_of_regular(file: IO[bytes]) -> int:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):  # a pipe or a device could be read without end
        raise ValueError("it is no regular file")
    return status.st_size


def _checksum_of(description: str) -> str:
    return hashlib.sha256(description.encode()).hexdigest()


def _digest(data: memoryview, check: Callable[[], None] = lambda: None) -> str:
    digest = hashlib.sha256()
    for piece in _cut(data, check):
        digest.update(piece)
    return digest.hexdigest()


def _cut(data: memoryview, check: Callable[[], None]) -> Iterator[memoryview]:
    for begin in range(0, data.nbytes, PIECE_BYTES):
        check()
        yield data[begin : begin + PIECE_BYTES]
