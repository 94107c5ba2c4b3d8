"""The header of one safetensors file, checked; raises InvalidCheckpoint naming file and tensor.

Also reads the small files beside it.

Every byte is hostile: `mx.load` multiplies dimensions until they wrap, truncates them to int32 and
accepts tensors that overlap. So a file is loaded only after its header passed the checks here, all
of them in Python integers.
"""

import codecs
import json
import math
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ...placement.errors import InvalidCheckpoint

MAX_HEADER_BYTES = 16 << 20
"""16 MiB describe about 120,000 tensors."""

MAX_TENSORS = 200_000
"""In one checkpoint; the most of any known one is about 140,000 (61 layers of 384 unfused experts
in FP8, each of their 3 matrices with its scale)."""

MAX_OBJECT_BYTES = 16 << 20
"""A file with one JSON object; a tokenizer_config.json with many added tokens has 1 MB."""

_MAX_CONTAINERS = 3 * MAX_TENSORS
_MAX_COMMAS = 8 * MAX_TENSORS
"""In one file: a header has three lists and objects and six commas for each tensor. JSON that has
millions in its 16 MB takes a gigabyte, and stops every thread of its process for seconds."""

MAX_DIMENSIONS = 8
MAX_DIMENSION = 2**31 - 1
"""An MLX shape is a list of int32."""

MAX_NAME_LENGTH = 512

_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "C64"), 8),
}
"""The types that mlx 0.32 loads; it refuses F64, F8_E5M2 and the types under a byte."""

_LAST_COMMA = re.compile(r'("(?:[^"\\]++|\\.)*+")|,(?=\s*[}\]])', re.DOTALL)
"""A string, which stays, or a comma that no value follows."""

_DOWNLOADED = "Delete it and download the model again."
_OWN = "Put a whole copy of the file there."
"""The remedies for a file of the hub's cache, and for one of a person's own folder."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor's place: bytes [start, end) of `file`, a path relative to the checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_header(path: Path) -> tuple[bytes, int]:
    """The header of a safetensors file, and how many bytes of data follow it.

    The format: 8 bytes little-endian length, that many bytes of JSON, the data.
    https://github.com/huggingface/safetensors#format
    """
    size = size_of(path)
    if size < 8:
        raise fault(path, f"has only {size} bytes")
    length = int.from_bytes(read_bytes(path, 0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise fault(path, f"claims a header of {length} bytes, over {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise fault(path, f"ends inside its header ({size} bytes): the file is truncated")
    return read_bytes(path, 8, length), size - 8 - length


def parse_header(path: Path, file: str, header: bytes, data_bytes: int) -> list[Tensor]:
    """The tensors of one file; `file` is its path in the checkpoint. Raises InvalidCheckpoint."""
    entries = parse_object(path, header, strict=True)
    metadata = entries.pop("__metadata__", None)  # mlx writes null where it is given none
    if metadata is not None and not is_text_table(metadata):
        raise fault(path, "has a __metadata__ that is not a table of strings")
    if len(entries) > MAX_TENSORS:
        raise fault(path, f"has {len(entries)} tensors, over {MAX_TENSORS}")
    data_start = 8 + len(header)
    tensors = [_tensor(path, file, name, entry, data_start) for name, entry in entries.items()]
    _check_layout(path, tensors, data_start, data_start + data_bytes)
    return tensors


def fault(
    path: Path, what: str, *, tensor: str | None = None, remedy: str | None = None
) -> InvalidCheckpoint:
    """The error of one file: which file and tensor, what is wrong, and the remedy.

    Clients read it, so it names the model and the file and no folder of this machine.
    """
    name = name_in_model(path)
    subject = name if tensor is None else f"{name}: tensor {quote(tensor)}"
    remedy = remedy or (_DOWNLOADED if _repository(path) else _OWN)
    return InvalidCheckpoint(f"{subject} {what}. {remedy}", param=path.name)


def _unreadable(path: Path, error: OSError) -> InvalidCheckpoint:
    remedy = "Mend its permissions." if isinstance(error, PermissionError) else None
    return fault(path, f"cannot be read ({error.strerror})", remedy=remedy)


def name_in_model(path: Path) -> str:
    """`owner/name/file` for a file of the hub's cache, else `folder/file`."""
    return "/".join((_repository(path) or path.parent.name, path.name))


def _repository(path: Path) -> str:
    """`owner/name` of a file or snapshot of the hub's cache; "" of any other."""
    folders = [part for part in path.parts if part.startswith("models--")]
    return folders[-1].removeprefix("models--").replace("--", "/") if folders else ""


def quote(value: object) -> str:
    """A value of the file, fit for one line of a log."""
    text = ascii(value)
    return text if len(text) <= 120 else f"{text[:120]}…"


def size_of(path: Path) -> int:
    """The size of a regular file; links are followed, as the Hugging Face cache is made of them."""
    try:
        status = path.stat()
    except FileNotFoundError as error:
        what = "is a link to a missing file" if path.is_symlink() else "is missing"
        remedy = "Download the model again." if _repository(path) else "Put the file there."
        raise fault(path, what, remedy=remedy) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise fault(path, "is not a regular file")
    return status.st_size


def read_bytes(path: Path, start: int, size: int) -> bytes:
    """Bytes [start, start + size) of a file, all of them."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(size)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(data) != size:
        raise fault(path, "became shorter while it was read")
    return data


def read_whole(path: Path, limit: int) -> bytes:
    """A file of at most `limit` bytes."""
    if (size := size_of(path)) > limit:
        raise fault(path, f"has {size} bytes, over the limit of {limit}")
    return read_bytes(path, 0, size)


def read_object(path: Path) -> dict[str, object]:
    """The JSON object in a file."""
    return parse_object(path, read_whole(path, MAX_OBJECT_BYTES), strict=False)


def parse_object(path: Path, raw: bytes, *, strict: bool) -> dict[str, object]:
    """A JSON object; see `parse_json`."""
    value = parse_json(path, raw, strict=strict)
    if not isinstance(value, dict):
        raise fault(path, "does not hold a JSON object")
    return cast("dict[str, object]", value)


def parse_json(path: Path, raw: bytes, *, strict: bool) -> object:
    """Any JSON value.

    `strict` refuses a key that occurs twice, in whatever depth. Else a byte order mark and commas
    in front of a closing bracket are allowed, as people's editors leave them.
    """
    containers, commas = raw.count(b"{") + raw.count(b"["), raw.count(b",")
    if containers > _MAX_CONTAINERS or commas > _MAX_COMMAS:
        raise fault(path, f"has {containers} lists and objects and {commas} commas, too many")
    try:
        if strict:
            return json.loads(raw.decode(), object_pairs_hook=_unique)
        text = text_of(raw)
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            if (mended := _LAST_COMMA.sub(r"\1", text)) == text:
                raise
            return json.loads(mended)
    except RecursionError as error:
        raise fault(path, "nests its JSON too deeply") from error
    except ValueError as error:
        raise fault(path, f"has malformed JSON ({error})") from error


def text_of(raw: bytes) -> str:
    """A text without its byte order mark, which also shows whether it is UTF-16 or UTF-32; else
    UTF-8. Raises UnicodeDecodeError."""
    marked = raw.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return raw.decode(json.detect_encoding(raw) if marked else "utf-8")


def optional_object(path: Path, notes: list[str]) -> dict[str, object]:
    """The JSON object in a file that a model need not have; empty without a readable one.

    Appends a sentence to `notes` with the model, the file, the fault and the remedy.
    """
    if not os.path.lexists(path):
        return {}
    try:
        return read_object(path)
    except InvalidCheckpoint as error:
        notes.append(f"ignored: {error.message}")
        return {}


def optional_text(path: Path, notes: list[str]) -> str:
    """The text of such a file, its lines ended by "\\n"; empty without a readable one."""
    if not os.path.lexists(path):
        return ""
    try:
        raw = read_whole(path, MAX_OBJECT_BYTES)
        try:
            return text_of(raw).replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            raise fault(path, f"is not UTF-8 ({error.reason})") from error
    except InvalidCheckpoint as error:
        notes.append(f"ignored: {error.message}")
        return ""


def is_text_table(value: object) -> bool:
    """Whether a JSON value is an object of strings."""
    if not isinstance(value, dict):
        return False
    return all(isinstance(item, str) for item in cast("dict[str, object]", value).values())


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Two parsers need not agree on which of two equal keys counts."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def _integers(value: object) -> tuple[int, ...] | None:
    """A JSON list of integers (true and 1.0 are none), else None."""
    if not isinstance(value, list):
        return None
    items = cast("list[object]", value)
    return tuple(cast("list[int]", items)) if all(type(item) is int for item in items) else None


def _tensor(path: Path, file: str, name: str, entry: object, data_start: int) -> Tensor:
    if not (0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()):
        raise fault(path, "has an unusable name", tensor=name)
    if not isinstance(entry, dict):
        raise fault(path, "is not described by an object", tensor=name)
    fields = cast("dict[str, object]", entry)
    dtype, shape = fields.get("dtype"), _integers(fields.get("shape"))
    offsets = _integers(fields.get("data_offsets"))
    if not isinstance(dtype, str) or (item_bytes := _ITEM_BYTES.get(dtype)) is None:
        remedy = "Use a checkpoint in bf16, fp16, fp32 or quantised by mlx-lm."
        raise fault(
            path, f"has the dtype {quote(dtype)}, which MLX cannot load", tensor=name, remedy=remedy
        )
    if shape is None or offsets is None or len(offsets) != 2:
        raise fault(path, "has no lists of integers as shape and data_offsets", tensor=name)
    if len(shape) > MAX_DIMENSIONS or not all(0 <= size <= MAX_DIMENSION for size in shape):
        raise fault(path, f"has the impossible shape {quote(list(shape))}", tensor=name)
    start, end = offsets
    needed = math.prod(shape) * item_bytes
    if not 0 <= start <= end or end - start != needed:
        what = f"has data_offsets [{start}, {end}], but {dtype} {list(shape)} takes {needed} bytes"
        raise fault(path, what, tensor=name)
    return Tensor(name, dtype, shape, file, data_start + start, data_start + end)


def _check_layout(path: Path, tensors: Iterable[Tensor], start: int, size: int) -> None:
    """The data must be the tensors, back to back: no overlap, no gap, nothing after them."""
    position, before = start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.end > size:
            what = f"ends at byte {tensor.end} of {size}: the file is truncated"
            raise fault(path, what, tensor=tensor.name)
        if tensor.start != position:
            relation = "overlaps" if tensor.start < position else "leaves a gap after"
            raise fault(path, f"{relation} {before}", tensor=tensor.name)
        position, before = tensor.end, tensor.name
    if position != size:
        raise fault(path, f"has {size - position} bytes after its last tensor")
