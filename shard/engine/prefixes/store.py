"""The prefix cache of a whole model or of a stage: states after prompts, in memory and on disk."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....mtp.caches.rollback import cache_arrays
from ....mtp.types import CacheTier
from ....placement.gpu_faults import is_failed_command
from ...checkpoint.prefix_files import ReceivedPrefix
from ..states.cache_parts import growth_of
from ..states.state import State
from .borders import Borders
from .disk import PrefixDisk
from .encoding import CONTENT_FAULTS, read_state
from .memory import PrefixCache
from .prompt_path import PromptPath
from .tree import PrefixNode

log = logging.getLogger(__name__)

GROWTH_ROWS = 64
"""Tokens of an answer for which the prefix cache makes room at once."""


class PrefixStore:
    """Finds and keeps prefixes in memory and on disk. All methods run on the compute thread.

    `live`: bytes of all requests in progress, which share the budget. A whole model decides itself
    what it begins after and keeps; of a stage the first one decides it, see `Borders`.
    """

    def __init__(
        self,
        budget: int,
        make_caches: Callable[[], list[Any]],
        disk: PrefixDisk | None = None,
        turn_ends: frozenset[int] = frozenset(),
    ) -> None:
        """`budget`, `make_caches`: see `PrefixCache`. Without `disk` prefixes are in memory only.
        `turn_ends`: the tokens that end a turn."""
        self.memory = PrefixCache(budget, make_caches)
        self.disk = disk
        self._turn_ends = turn_ends

    @property
    def enabled(self) -> bool:
        """Whether any prefix is kept."""
        return self.memory.enabled

    @property
    def bytes(self) -> int:
        """Bytes of the cached states in memory."""
        return self.memory.size

    @property
    def hits(self) -> Mapping[CacheTier, int]:
        """See `PrefixCache.hits`."""
        return self.memory.hits

    def reserve(self, size: int, live: int) -> bool:
        """Makes prefixes give way to `size` bytes of a measurement. Returns whether those fit
        beside `live` ones; reserves none otherwise."""
        fits = self.memory.reserve(size, live)
        self.memory.evict(live)
        return fits

    def begin(self) -> None:
        """Notes that a request begins."""
        if self.disk is not None:
            self.disk.pause()

    def find(
        self,
        path: PromptPath,
        live: int,
        received: ReceivedPrefix | None = None,
        *,
        counts: bool = True,
    ) -> State | None:
        """A copy of the state after the longest cached prefix of a prompt, or None.

        `received`: what another runner sent, which is freed. `counts`: whether it is a hit.
        """
        if not self.enabled:
            return None
        self.memory.evict(live)
        state, rows = None, max(self.memory.cached_ends(path), default=0)
        if self.disk is not None and (state := self.disk.find(path, rows)) is not None:
            rows = state.rows
        if received is not None:
            state = self._of_peer(received, path, rows) or state
        if state is not None:  # memory gets a copy, if it has room beside the request's own
            node = self._keep(path, state, live + _bytes_of(state))
            if state.tier == "peer":
                self._write_later(node)
        state = state or self.memory.find(path, live=live)
        if state is not None:
            self.memory.hits[state.tier] += state.rows * counts
            state.draft = state.draft if path.drafts else None
        return state

    def keep(self, path: PromptPath, state: State, live: int) -> None:
        """Caches a copy of the state after the prompt's first `state.rows` rows, if that is
        worthwhile and leaves room for the rest of the prompt."""
        following = len(path.ids) - state.rows
        if not self.enabled or not following:
            return
        node = self._keep(path, state, live + growth_of(state.all_caches, following))
        self._write_later(node)

    def cached_ends(self, path: PromptPath, live: int) -> list[int]:
        """The ends of forwards of `path` with a cached state, ascending.

        If the longest is on disk, it is read, so that it is sure to be intact.
        """
        path = path.continued
        in_memory = self.memory.cached_ends(path)
        if self.disk is None:
            return in_memory
        if (state := self.disk.find(path, max(in_memory, default=0))) is not None:
            live += sum(array.nbytes for array in cache_arrays(state.caches))
            node = self.memory.insert(path.up_to(state.rows), state, state.first_turn, live)
            if node is not None:
                node.tier = "disk"
        return sorted({*in_memory, *self.disk.ends(path)})

    def restore(self, path: PromptPath, rows: int, live: int) -> State | None:
        """A copy of the state after the first `rows` rows of `path`; None if it is not cached or
        has no room."""
        path = path.up_to(rows).continued
        state = self.memory.find(path, live=live)
        if (state is None or state.rows != rows) and self.disk is not None:
            state = self.disk.find(path, rows - 1)
        if state is None or state.rows != rows:
            return None
        self.memory.hits[state.tier] += rows
        return state

    def keep_read(
        self, path: PromptPath, state: State, first_turn: int, live: int, following: int
    ) -> None:
        """Caches a copy of a state after all forwards of `path`.

        `first_turn`: the row after the first turn, or 0. `following`: rows of the prompt after
        them, for which room is left.
        """
        if not self.enabled or path.ends[-1:] != [state.rows]:
            return  # some of its ids are missing
        live += growth_of(state.caches, following)
        self._write_later(self.memory.insert(path, state, first_turn, live))
        self.memory.evict(live)

    def borders(self, path: PromptPath, rows: int) -> Borders:
        """The states that are worth caching of a prompt that begins after `rows` cached rows."""
        return Borders(path, self._turn_ends, rows)

    def make_room(self, caches: Sequence[Any], live: int) -> None:
        """Evicts prefixes that have no room beside `live` bytes and an answer's next rows.

        `caches`: the answer's own; none if it is in a batch, whose caches have spare room.
        """
        if self.bytes:
            self.memory.evict(live + growth_of(caches, GROWTH_ROWS))

    def save_next(self) -> bool:
        """See `PrefixDisk.save_next`."""
        return self.disk is not None and self.disk.save_next(self.memory.holds)

    def clear(self) -> None:
        """Drops all prefixes, because the numbers of one are not finite."""
        self.memory.evict()
        if self.disk is not None:
            self.disk.clear()

    def _of_peer(self, received: ReceivedPrefix, path: PromptPath, beyond: int) -> State | None:
        """The state that another runner sent, if it has more than `beyond` rows. Frees it."""
        try:
            if received.rows <= beyond:
                return None
            state = read_state([received], self.memory.make_caches, path.ids)
        except CONTENT_FAULTS as fault:  # the prompt is then read without it
            if is_failed_command(str(fault)):
                raise  # of a command that had begun before, whose numbers others have
            why = str(fault) or type(fault).__name__
            log.warning("a state from another node cannot be used: %s", why)
            return None
        finally:
            received.free()
        state.tier = "peer"
        return state

    def _keep(self, path: PromptPath, state: State, live: int) -> PrefixNode | None:
        node = self.memory.keep(path, state, self._turn_ends, live)
        self.memory.evict(live)
        return node

    def _write_later(self, node: PrefixNode | None) -> None:
        if self.disk is not None and node is not None:
            self.disk.put(node)


def _bytes_of(state: State) -> int:
    return sum(array.nbytes for array in cache_arrays(state.all_caches))
