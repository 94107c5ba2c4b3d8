"""The contract of the places that have cached states: memory, disk, and another runner."""

from typing import Protocol

from ..states.state import State
from .prompt_path import PromptPath


class Tier(Protocol):
    """States after the first rows of prompts, in one place.

    States get there in three forms: a request's state (`PrefixCache.keep`), a node of the tree in
    memory (`PrefixDisk.put`), pieces of a file (`PrefixReceiver.feed`). No tier fails a request:
    what cannot be read, or has no room, is as good as absent, and the log says why. Methods run on
    the compute thread.
    """

    @property
    def size(self) -> int:
        """Bytes of its states. Any thread."""
        ...

    def find(self, path: PromptPath, beyond: int = 0, live: int = 0) -> State | None:
        """A copy of the state after the longest prefix of more than `beyond` rows, or None.

        The path's last forward is never skipped. A copy that needs bytes of the tier has room
        beside `live` bytes of requests in progress.
        """
        ...

    def evict(self, live: int | None = None) -> None:
        """Removes what has no room beside `live` bytes of requests in progress, the least useful
        first; without `live`, all of it."""
        ...
