"""Looks up how much of a prompt is in the prefix cache, while the compute thread is busy."""

from collections.abc import Sequence
from typing import NamedTuple

from ....mtp.schedule import Schedule
from ....mtp.types import CacheTier
from .expected import ExpectedPrefix
from .prompt_path import PromptPath, Salt, stems
from .store import PrefixStore


class CachedRows(NamedTuple):
    """The longest cached prefix of a prompt."""

    rows: int = 0
    tier: CacheTier = ""
    bytes: int = 0
    """Bytes of the state after those rows; of files, all that lie along the prompt."""


class PrefixLookup:
    """Reads the tree in memory and the names of files, and changes neither. Any thread.

    An answer is a forecast: a prefix may be evicted afterwards, may have no room beside requests in
    progress, or its file may turn out to be damaged.
    """

    def __init__(self, store: PrefixStore, schedule: Schedule) -> None:
        """`schedule` cuts prompts into forwards."""
        self._store = store
        self._schedule = schedule

    def expected(
        self, key: str, prompt: Sequence[int], salt: Salt, *, drafts: bool, context_length: int
    ) -> ExpectedPrefix:
        """The states of a prompt that are worth a transfer from another runner."""
        path = PromptPath(prompt, self._schedule.ends(prompt), salt, drafts)
        names = dict(stems(path.inner.forwards()))
        beyond = self.find(prompt, salt, drafts=drafts).rows
        return ExpectedPrefix(key, names, beyond, drafts, context_length)

    def find(self, prompt: Sequence[int], salt: Salt = b"", *, drafts: bool) -> CachedRows:
        """The prefix that a request would begin after. `drafts`: with a draft state."""
        path = PromptPath(prompt, self._schedule.ends(prompt), salt, drafts)
        cached, disk = CachedRows(), self._store.disk
        if (node := self._store.memory.longest(path)) is not None:
            cached = CachedRows(node.end, "memory", node.path_bytes)
        if disk is not None:
            rows, size = disk.longest(path)
            if rows > cached.rows:
                cached = CachedRows(rows, "disk", size)
        return cached
