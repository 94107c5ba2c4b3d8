"""The state behind a cached prefix as one file, for the runner of another replica."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..checkpoint.files import Buffer
from ..checkpoint.prefix_files import TensorEntry, header_of, opened, pieces_of
from .prefix_encoding import can_encode, encoded, joined_description
from .prefix_names import DRAFTS, stems_of_path
from .prefix_store import PrefixStore
from .prefix_tree import PrefixNode, Salt

Pieces: TypeAlias = Callable[[], Iterator[Buffer]]
"""The content of a file, in pieces of any size; for a thread that may wait."""


class PrefixExport:
    """Writes cached states of a whole model as files, from memory or from disk."""

    def __init__(self, store: PrefixStore, key: str) -> None:
        """`key`: the key of the files."""
        self._store = store
        self._key = key

    def find(self, prompt: Sequence[int], salt: Salt = b"", *, drafts: bool) -> Pieces | None:
        """Compute thread: the content of the longest prefix; None if nothing is cached.

        Computes nothing: the arrays of a state are evaluated and contiguous. They stay in memory as
        long as the content is used, though the cache may drop them meanwhile. `drafts`: only
        prefixes with a draft state.
        """
        ends = self._store.schedule.ends(prompt)
        node = self._store.memory.longest(prompt, ends, salt, drafts=drafts)
        disk, rows = self._store.disk, 0
        if disk is not None:
            rows, _ = disk.longest(prompt, ends, salt, drafts=drafts)
        if node is not None and node.end >= rows and can_encode(node):
            return self._of_node(node)
        if disk is None or not rows:
            return None
        read = partial(disk.descriptions, prompt, ends, salt, drafts=drafts)
        return lambda: self._of_files(read)

    def _of_node(self, node: PrefixNode) -> Pieces:
        path, drafts = node.path, node.is_usable(drafts=True)
        description, tensors = encoded(path, 0, drafts=drafts)
        *_, (_, stem) = stems_of_path(path)
        described = description | self._identity(stem + DRAFTS * drafts)
        return lambda: pieces_of(described, tensors, lambda: None)

    def _of_files(
        self, read: Callable[[], Sequence[tuple[Path, Mapping[str, Any]]]]
    ) -> Iterator[Buffer]:
        """Joins the files of a prefix, parents first. Reads one tensor at a time.

        Raises OSError, ValueError or a parser's error for a file that is gone or was changed.
        """
        files = read()
        joined = joined_description([description for _, description in files])
        described = joined.description | self._identity(joined.description["name"])
        paths = [path for path, _ in files]
        sources = list(map(_FileTensors, paths, joined.tensors))
        entries = dict[str, TensorEntry]()
        for each in sources:
            entries |= each.entries()
        yield header_of(described, entries)
        for each in sources:
            yield from each.data()

    def _identity(self, name: str) -> dict[str, Any]:
        return {"key": self._key, "name": name, "parent": None, "model": ""}


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
