"""The header of a GGUF file, read as hostile input: its values, and where its tensors lie.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from ...placement.errors import InvalidCheckpoint
from .headers import MAX_NAME_LENGTH, MAX_TENSORS, fault, quote

MAX_KEYS: Final = 4096
MAX_STRING_BYTES: Final = 4 << 20
"""A chat template has some 10 KB."""
MAX_ENTRIES: Final = 1_000_000
"""Entries of an array; the most known are Gemma's 514,906 merges."""
MAX_ALL_ENTRIES: Final = 4 * MAX_ENTRIES
"""Entries of all arrays: tokens, their scores and types, and merges are the long ones."""
MAX_HEADER_BYTES: Final = 128 << 20
_MAX_DIMENSIONS: Final = 4
_SCALARS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_REMEDY: Final = "Get a whole copy of the file."

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. `shape`: rows before columns, as in safetensors; `offset`: in the file."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A header that passed the checks; the tensors' sizes depend on their kinds and are checked by
    `require_bytes`."""

    path: Path
    values: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    size: int

    def require_bytes(self, sizes: Mapping[str, int]) -> None:
        """Checks that tensors of these sizes lie in the file, apart. Raises InvalidCheckpoint."""
        end, last = 0, ""
        for tensor in sorted(self.tensors.values(), key=lambda each: each.offset):
            if tensor.offset < end:
                raise self.fault(f"overlaps {quote(last)}", tensor.name)
            end, last = tensor.offset + sizes[tensor.name], tensor.name
            if end > self.size:
                raise self.fault("ends after the end of the file", tensor.name)

    def fault(self, what: str, tensor: str | None = None) -> InvalidCheckpoint:
        return fault(self.path, what, tensor=tensor, remedy=_REMEDY)


def read_gguf(path: Path) -> GgufFile:
    """Reads the header. Raises InvalidCheckpoint, which names the value or tensor."""
    try:
        with path.open("rb", buffering=1 << 20) as file:
            return _Reader(path, file).read()
    except OSError as error:
        raise fault(path, f"cannot be read ({error.strerror})", remedy=_REMEDY) from error


class _Reader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = path.stat().st_size
        self._at = 0
        self._entries = 0

    def read(self) -> GgufFile:
        if self._take(4) != b"GGUF":
            raise self._fault("is no GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            raise self._fault(f"has version {version} of GGUF, and 2 and 3 are read")
        tensor_count = self._count(MAX_TENSORS, "tensors")
        values: dict[str, Value] = {}
        for _ in range(self._count(MAX_KEYS, "values")):
            key = self._string()
            if key in values:
                raise self._fault(f"has {quote(key)} twice")
            values[key] = self._value(self._number("I"), nested=False)
        entries = [self._tensor() for _ in range(tensor_count)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise self._fault(f"has general.alignment = {quote(alignment)}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in entries:
            if name in tensors or offset % alignment:
                raise fault(self._path, "is there twice, or not aligned", tensor=name)
            tensors[name] = GgufTensor(name, kind, shape, start + offset)
        return GgufFile(self._path, values, tensors, self._size)

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string(MAX_NAME_LENGTH)
        if not 1 <= (dimensions := self._number("I")) <= _MAX_DIMENSIONS:
            raise fault(self._path, f"has {dimensions} dimensions", tensor=name)
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        if not all(0 < each < 1 << 31 for each in shape):
            raise fault(self._path, f"has the shape {shape}", tensor=name)
        return name, self._number("I"), shape, self._number("Q")

    def _value(self, kind: int, *, nested: bool) -> Value:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalars(kind, 1)[0]
        if kind != _ARRAY or nested:
            raise self._fault(f"has a value of the unknown type {kind}")
        kind, count = self._number("I"), self._count(MAX_ENTRIES, "entries in an array")
        self._entries += count
        if self._entries > MAX_ALL_ENTRIES or kind not in (_STRING, *_SCALARS):
            raise self._fault(f"has an array of the type {kind} and {count} entries")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Scalar]:
        code = _SCALARS[kind]
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code))))

    def _string(self, limit: int = MAX_STRING_BYTES) -> str:
        if (length := self._number("Q")) > limit:
            raise self._fault(f"has a string of {length} bytes, over {limit}")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._fault("has a string that is not UTF-8") from error

    def _count(self, most: int, what: str) -> int:
        if (count := self._number("Q")) > most:
            raise self._fault(f"has {count} {what}, over {most}")
        return count

    def _number(self, code: str) -> int:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _take(self, count: int) -> bytes:
        """The next bytes, none of them allocated before the file is known to have them."""
        self._at += count
        if self._at > min(self._size, MAX_HEADER_BYTES):
            raise self._fault("ends inside its header, or has one that is too long")
        return self._file.read(count)

    def _fault(self, what: str) -> InvalidCheckpoint:
        return fault(self._path, what, remedy=_REMEDY)
