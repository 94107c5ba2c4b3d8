"""How much of a prompt is in the prefix cache, and its state as a file of other runners."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from ....mtp.schedule import Schedule
from ....mtp.types import CacheTier
from ...checkpoint.files import Buffer
from ...checkpoint.prefix_files import TensorEntry, header_of, opened, pieces_of
from .disk import PrefixDisk
from .encoding import can_encode, encoded, joined_description
from .prompt_path import DRAFTS, PromptPath, Salt, stems
from .store import PrefixStore
from .tree import PrefixNode

Pieces: TypeAlias = Callable[[], Iterator[Buffer]]
"""The content of a file, in pieces of any size; for a thread that may wait."""
SPARE_ROWS: Final = 1 << 13
"""Rows beyond the context that a cache may have room for, as it grows by whole steps."""


class CachedRows(NamedTuple):
    """The longest cached prefix of a prompt."""

    rows: int = 0
    tier: CacheTier = ""
    bytes: int = 0
    """Bytes of the state after those rows; of files, all that lie along the prompt."""


@dataclass(frozen=True, slots=True)
class ExpectedPrefix:
    """The prefixes of one prompt that are worth a transfer."""

    key: str
    """See `persistent_files.shared_prefix_key`."""
    stems: Mapping[int, str]
    """The names of the prompt's states, by their rows."""
    beyond: int
    """Rows of the prefix that is cached here."""
    drafts: bool
    """Whether a draft state is needed."""
    context_length: int

    def check(self, description: Mapping[str, Any]) -> None:
        """Checks a file's description. Raises ValueError, or a parser's error."""
        if description["key"] != self.key:
            raise ValueError("it is of another model, or of another kind of machine")
        rows, name = description["rows"], description["name"]
        stem = self.stems.get(rows)
        if stem is None or name not in ((stem + DRAFTS,) if self.drafts else (stem + DRAFTS, stem)):
            raise ValueError("it is of another prompt")
        if (description["head"] is not None) != name.endswith(DRAFTS):
            raise ValueError("it has another draft state than its name says")
        if (description["begin"], description["parent"]) != (0, None):
            raise ValueError("its first rows are missing")
        if rows <= self.beyond:
            raise ValueError(f"its {rows} rows are no more than the {self.beyond} that are here")
        counts = [rows, description["first_turn"]]
        spans = list(description["spans"])
        if (head := description["head"]) is not None:
            counts.append(head["rows"])
            spans += head["spans"]
        if not all(type(count) is int and 0 <= count <= rows for count in counts):
            raise ValueError("its counts of rows do not fit")
        self._check_room(spans)

    def _check_room(self, spans: Sequence[Sequence[Mapping[str, Any] | None]]) -> None:
        rooms = [part["room"] for span in spans for part in span if part is not None]
        if not all(
            type(room) is int and 0 <= room <= self.context_length + SPARE_ROWS for room in rooms
        ):
            raise ValueError("its caches have more room than the context")


class PrefixLookup:
    """Reads the tree in memory and files, and changes neither. Any thread, but for `export`.

    What `find` returns is a forecast: a prefix may be evicted afterwards, may have no room beside
    requests in progress, or its file may turn out to be damaged.
    """

    def __init__(self, store: PrefixStore, schedule: Schedule) -> None:
        """`schedule` cuts prompts into forwards."""
        self._store = store
        self._schedule = schedule

    def expected(
        self, key: str, prompt: Sequence[int], salt: Salt, *, drafts: bool, context_length: int
    ) -> ExpectedPrefix:
        """The states of a prompt that are worth a transfer from another runner."""
        path = self._path(prompt, salt, drafts=drafts)
        names = dict(stems(path.inner.forwards()))
        beyond = self.find(prompt, salt, drafts=drafts).rows
        return ExpectedPrefix(key, names, beyond, drafts, context_length)

    def find(self, prompt: Sequence[int], salt: Salt = b"", *, drafts: bool) -> CachedRows:
        """The prefix that a request would begin after. `drafts`: with a draft state."""
        path = self._path(prompt, salt, drafts=drafts)
        cached, disk = CachedRows(), self._store.disk
        if (node := self._store.memory.longest(path)) is not None:
            cached = CachedRows(node.end, "memory", node.path_bytes)
        if disk is not None:
            rows, size = disk.longest(path)
            if rows > cached.rows:
                cached = CachedRows(rows, "disk", size)
        return cached

    def export(
        self, key: str, prompt: Sequence[int], salt: Salt = b"", *, drafts: bool
    ) -> Pieces | None:
        """Compute thread: the content of the longest prefix as a file of `key`; None if nothing is
        cached.

        Computes nothing: the arrays of a state are evaluated and contiguous. They stay in memory as
        long as the content is used, though the cache may drop them meanwhile. `drafts`: only
        prefixes with a draft state.
        """
        path = self._path(prompt, salt, drafts=drafts)
        node, disk = self._store.memory.longest(path), self._store.disk
        rows = 0 if disk is None else disk.longest(path)[0]
        if node is not None and node.end >= rows and can_encode(node):
            return _of_node(node, key)
        if disk is None or not rows:
            return None
        return lambda: _of_files(disk, path, key)

    def _path(self, prompt: Sequence[int], salt: Salt, *, drafts: bool) -> PromptPath:
        return PromptPath(prompt, self._schedule.ends(prompt), salt, drafts)


def _of_node(node: PrefixNode, key: str) -> Pieces:
    drafts = node.is_usable(drafts=True)
    description, tensors = encoded(node.path, 0, drafts=drafts)
    *_, (_, stem) = node.stems
    described = description | _identity(key, stem + DRAFTS * drafts)
    return lambda: pieces_of(described, tensors, lambda: None)


def _of_files(disk: PrefixDisk, path: PromptPath, key: str) -> Iterator[Buffer]:
    """Joins the files of a prefix, parents first. Reads one tensor at a time.

    Raises OSError, ValueError or a parser's error for a file that is gone or was changed.
    """
    files = disk.descriptions(path)
    joined, tensors = joined_description([description for _, description in files])
    described = joined | _identity(key, joined["name"])
    sources = [_FileTensors(file, names) for (file, _), names in zip(files, tensors, strict=True)]
    entries = dict[str, TensorEntry]()
    for each in sources:
        entries |= each.entries()
    yield header_of(described, entries)
    for each in sources:
        yield from each.data()


def _identity(key: str, name: str) -> dict[str, Any]:
    return {"key": key, "name": name, "parent": None, "model": ""}


class _FileTensors(NamedTuple):
    """Some tensors of one file, with the names that they get."""

    path: Path
    names: Mapping[str, str]

    def entries(self) -> Iterator[tuple[str, TensorEntry]]:
        with opened(self.path) as file:
            for name, new_name in self.names.items():
                dtype, shape, checksum = file.description["tensors"][name]
                yield new_name, TensorEntry(dtype, shape, checksum, file.tensor_bytes(name))

    def data(self) -> Iterator[Buffer]:
        with opened(self.path) as file:
            for name in self.names:
                yield file.tensor(name)[2]
