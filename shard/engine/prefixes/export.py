"""The state after a cached prefix as one file, for the runner of another replica."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ....mtp.schedule import Schedule
from ...checkpoint.files import Buffer
from ...checkpoint.prefix_files import TensorEntry, header_of, opened, pieces_of
from .disk import PrefixDisk
from .encoding import can_encode, encoded, joined_description
from .prompt_path import DRAFTS, PromptPath, Salt
from .store import PrefixStore
from .tree import PrefixNode

Pieces: TypeAlias = Callable[[], Iterator[Buffer]]
"""The content of a file, in pieces of any size; for a thread that may wait."""


class PrefixExport:
    """Writes cached states of a whole model as files, from memory or from disk."""

    def __init__(self, store: PrefixStore, schedule: Schedule, key: str) -> None:
        """`schedule` cuts prompts into forwards. `key`: the key of the files."""
        self._store = store
        self._schedule = schedule
        self._key = key

    def find(self, prompt: Sequence[int], salt: Salt = b"", *, drafts: bool) -> Pieces | None:
        """Compute thread: the content of the longest prefix; None if nothing is cached.

        Computes nothing: the arrays of a state are evaluated and contiguous. They stay in memory as
        long as the content is used, though the cache may drop them meanwhile. `drafts`: only
        prefixes with a draft state.
        """
        path = PromptPath(prompt, self._schedule.ends(prompt), salt, drafts)
        node, disk = self._store.memory.longest(path), self._store.disk
        rows = 0 if disk is None else disk.longest(path)[0]
        if node is not None and node.end >= rows and can_encode(node):
            return self._of_node(node)
        if disk is None or not rows:
            return None
        return lambda: self._of_files(disk, path)

    def _of_node(self, node: PrefixNode) -> Pieces:
        drafts = node.is_usable(drafts=True)
        description, tensors = encoded(node.path, 0, drafts=drafts)
        *_, (_, stem) = node.stems
        described = description | self._identity(stem + DRAFTS * drafts)
        return lambda: pieces_of(described, tensors, lambda: None)

    def _of_files(self, disk: PrefixDisk, path: PromptPath) -> Iterator[Buffer]:
        """Joins the files of a prefix, parents first. Reads one tensor at a time.

        Raises OSError, ValueError or a parser's error for a file that is gone or was changed.
        """
        files = disk.descriptions(path)
        joined = joined_description([description for _, description in files])
        described = joined.description | self._identity(joined.description["name"])
        sources = [
            _FileTensors(file, names)
            for (file, _), names in zip(files, joined.tensors, strict=True)
        ]
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
