"""Checkpoints as headers alone: the layouts that people really have, from `headers/*.json`.

Each fixture says where its facts come from (`source`) and what was not read there (`derived`).
`{0..62:2,63}` in a name stands for those numbers; `unwritten` tensors count but are left out of the
files. Files are sparse: they have their real size and almost no blocks.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from exo_node.shard.checkpoint.checkpoint import Checkpoint
from exo_node.shard.checkpoint.head_tensors import HeadFound, HeadMissing, find_head
from exo_node.shard.checkpoint.headers import Tensor

HEADERS = Path(__file__).parent / "headers"
NAMES = sorted(path.stem for path in HEADERS.glob("*.json"))

EXPERT = re.compile(r"experts\.(\d+)\.")
_ITEM = {"BF16": 2, "F16": 2, "F32": 4, "U32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1}
_RANGES = re.compile(r"\{([\d.:,]+)\}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a header."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM[self.dtype]


@dataclass(frozen=True, slots=True)
class Headers:
    """A fixture; `published` are figures that its tensors must add up to."""

    source: list[str]
    derived: str
    published: dict[str, int]
    config: dict[str, Any]
    unindexed: list[str]
    entries: list[Entry]
    unwritten: list[Entry]

    def write(self, folder: Path) -> Path:
        """The checkpoint's files, headers only, with the index of those that are indexed."""
        write_checkpoint(folder, self.config, self.entries, unindexed=self.unindexed)
        return folder


@cache
def headers(name: str) -> Headers:
    """The fixture of that name."""
    raw: dict[str, Any] = json.loads((HEADERS / f"{name}.json").read_text())
    return Headers(
        source=raw["source"],
        derived=raw["derived"],
        published=raw.get("published", {}),
        config=raw["config"],
        unindexed=raw.get("unindexed", []),
        entries=list(_entries(raw["files"])),
        unwritten=list(_entries(raw.get("unwritten", {}))),
    )


def checkpoint_of(
    name: str, entries: Iterable[Entry] | None = None, changes: Mapping[str, object] = {}
) -> Checkpoint:
    """A fixture as `read_checkpoint` would give it, with other tensors or other config fields."""
    fixture = headers(name)
    tensors = {
        e.name: Tensor(e.name, e.dtype, e.shape, e.file, 0, e.nbytes)
        for e in (fixture.entries if entries is None else entries)
    }
    text: dict[str, Any] = {**fixture.config.get("text_config", fixture.config), **changes}
    return Checkpoint(Path(name), {"text_config": text}, MappingProxyType(tensors), "")


def whole_head(checkpoint: Checkpoint) -> HeadFound:
    head = find_head(checkpoint)
    assert isinstance(head, HeadFound), head
    return head


def reason(checkpoint: Checkpoint) -> str:
    head = find_head(checkpoint)
    assert isinstance(head, HeadMissing), "the head was found"
    return head.reason


@cache
def head_of(name: str) -> dict[str, str]:
    """Canonical names of the head's tensors by their names in the files."""
    return {tensor.name: key for key, tensor in whole_head(checkpoint_of(name)).tensors.items()}


def changed(name: str, victim: str, change: Callable[[Entry], Entry | None]) -> Checkpoint:
    """A fixture with one tensor changed, or left out where `change` gives None."""
    entries = [change(e) if e.name == victim else e for e in headers(name).entries]
    return checkpoint_of(name, [entry for entry in entries if entry is not None])


def write_checkpoint(
    folder: Path, config: dict[str, Any], entries: Iterable[Entry], *, unindexed: Iterable[str] = ()
) -> None:
    files: dict[str, list[Entry]] = {}
    for entry in entries:
        files.setdefault(entry.file, []).append(entry)
    for file, own in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        _write_sparse(folder / file, own)
    index = {e.name: f for f, own in files.items() if f not in unindexed for e in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))


def _write_sparse(path: Path, entries: list[Entry]) -> None:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [start, end],
        }
    header = json.dumps(table, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def _entries(files: dict[str, dict[str, str]]) -> Iterator[Entry]:
    for file, patterns in files.items():
        for pattern, what in patterns.items():
            dtype, *shape = what.split()
            for name in _expanded(pattern):
                yield Entry(file, name, dtype, tuple(map(int, shape)))


def _expanded(pattern: str) -> Iterator[str]:
    parts = _RANGES.split(pattern)  # text and ranges in turn
    for numbers in product(*(list(_numbers(ranges)) for ranges in parts[1::2])):
        texts = [*map(str, numbers), ""]
        yield "".join(text + number for text, number in zip(parts[::2], texts, strict=True))


def _numbers(ranges: str) -> Iterator[int]:
    for item in ranges.split(","):
        ends, _, step = item.partition(":")
        first, _, last = ends.partition("..")
        yield from range(int(first), int(last or first) + 1, int(step or 1))
