"""A file of a cached prefix that comes in pieces from another runner, verified as it comes."""

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Final

from .prefix_files import Offsets, TensorContent, header_size, read_description

_LENGTH_BYTES: Final = 8


class ReceivedPrefix:
    """A whole file whose checksums have matched. Each tensor is given out once, and then freed."""

    def __init__(
        self, description: Mapping[str, Any], tensors: dict[str, bytearray], size: int
    ) -> None:
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

    def tensors(self, names: Iterable[str]) -> Generator[TensorContent]:
        """The tensors of these names. Raises KeyError if there is none, or none any more."""
        for name in names:
            dtype, shape, _ = self.description["tensors"][name]
            yield dtype, tuple(shape), self._tensors.pop(name)


class PrefixReceiver:
    """Takes the pieces of one file, in order. Any thread, one at a time."""

    def __init__(self, limit: int, check: Callable[[Mapping[str, Any]], None]) -> None:
        """`limit`: bytes of all tensors. `check` is called with the description, before any tensor
        is taken, and raises ValueError or a parser's error if it is not what was asked for."""
        self._limit = limit
        self._check = check
        self._header: bytearray | None = bytearray()
        """None once it is complete."""
        self._description: Mapping[str, Any] = {}
        self._pending: list[tuple[str, int]] = []
        """Names and sizes of the tensors that are to come, the next one last."""
        self._tensor = bytearray()
        self._tensors: dict[str, bytearray] = {}
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

    def finish(self) -> ReceivedPrefix:
        """The file, after its last piece. Raises ValueError if something is missing."""
        if self._header is not None or self._pending:
            raise ValueError("it ends too early")
        return ReceivedPrefix(self._description, self._tensors, self._size)

    def _feed_header(self, header: bytearray, piece: memoryview) -> memoryview:
        """Takes bytes of the header. Returns those after it."""
        while piece and self._header is not None:
            is_sized = len(header) >= _LENGTH_BYTES
            size = header_size(header[:_LENGTH_BYTES]) if is_sized else 0
            missing = _LENGTH_BYTES + size - len(header)
            header += piece[:missing]
            piece = piece[missing:]
            if len(header) == _LENGTH_BYTES + header_size(header[:_LENGTH_BYTES]):
                self._begin(*read_description(header[_LENGTH_BYTES:]))
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
        """Verifies the tensors that are complete."""
        while self._pending and len(self._tensor) == self._pending[-1][1]:
            name, _ = self._pending.pop()
            _, _, checksum = self._description["tensors"][name]
            if hashlib.sha256(self._tensor).hexdigest() != checksum:
                raise ValueError("its bytes are not those that were written")
            self._tensors[name], self._tensor = self._tensor, bytearray()
