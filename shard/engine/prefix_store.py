"""The prefix cache of a whole model: states behind prompts, in memory and on disk."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ...mtp.rollback import cache_arrays
from ...mtp.schedule import Schedule
from ..checkpoint.prefix_stream import ReceivedPrefix
from .cache_parts import DraftPrefix
from .prefix_cache import Prefix, PrefixCache
from .prefix_disk import PrefixDisk
from .prefix_encoding import PrefixReader
from .prefix_tree import PrefixNode
from .request import Request
from .spans import growth_of
from .state import DraftState, State

log = logging.getLogger(__name__)

GROWTH_ROWS = 64
"""Tokens of an answer for which the prefix cache makes room at once."""


class PrefixStore:
    """Finds and keeps prefixes in memory and on disk. All methods run on the compute thread."""

    def __init__(self, memory: PrefixCache, disk: PrefixDisk | None, schedule: Schedule) -> None:
        """`disk` None: prefixes are in memory only."""
        self.memory = memory
        self.disk = disk
        self.schedule = schedule

    def find(self, request: Request, live: int) -> State | None:
        """A copy of the state behind the longest cached prefix of a request's prompt, or None.

        `live`: bytes of all requests in progress, beside which the copy must have room.
        """
        if self.disk is not None:
            self.disk.pause()
        received, request.received = request.received, None
        if not self.memory.enabled or not request.uses_cache:
            return None
        self.memory.shrink(live)
        prompt, ends, salt = request.prompt, request.ends, request.cache_salt
        drafts = request.k > 0
        prefix = self.memory.find_whole(prompt, ends, drafts=drafts, live=live, salt=salt)
        if prefix is None:
            prefix = self._stored(request, live)
        if received is not None and (prefix is None or prefix.position < received.rows):
            prefix = self._received(request, received, live) or prefix
        if received is not None:
            received.free()
        if prefix is None:
            prefix = self.memory.find(prompt, ends, drafts=drafts, live=live, salt=salt)
        if prefix is None:
            return None
        draft = None
        if drafts and prefix.drafter is not None:
            draft = DraftState.behind(*prefix.drafter, prompt)
        self.memory.hits[prefix.tier] += prefix.position
        return State(prefix.caches, prefix.position, draft, prefix.tier, prefix.logits)

    def keep(self, request: Request, state: State, live: int) -> None:
        """Caches a copy of the state behind the prompt's first `state.rows` rows, if that is
        worthwhile and leaves room for the rest of the prompt."""
        following = len(request.prompt) - state.rows
        if not self.memory.enabled or not request.uses_cache or not following:
            return
        node = self._keep_state(request, state, live, following)
        if self.disk is not None and node is not None:
            self.disk.add(node)

    def keep_whole(self, request: Request, state: State, logits: mx.array, live: int) -> None:
        """Caches a copy of the state behind a whole prompt, with its last row's logits (1, V), in
        memory alone: for the request's other choices."""
        if self.memory.enabled and request.uses_cache:
            _ = self._keep_state(request, state, live, GROWTH_ROWS, logits)

    def _keep_state(
        self,
        request: Request,
        state: State,
        live: int,
        following: int,
        logits: mx.array | None = None,
    ) -> PrefixNode | None:
        """`following`: rows for which room is left behind the state's own."""
        draft = None
        if state.draft is not None:
            draft = DraftPrefix(state.draft.cache, state.draft.rows, state.draft.hidden)
        own = [] if draft is None or draft.cache is None else [draft.cache]
        live += growth_of([*state.caches, *own], following)
        node = self._keep_in_memory(request, state.rows, state.caches, draft, live, logits)
        self.memory.shrink(live)
        return node

    def clear(self) -> None:
        """Drops all prefixes, because the numbers of one are not finite."""
        self.memory.clear()
        if self.disk is not None:
            self.disk.clear()

    def make_room(self, state: State | None, live: int) -> None:
        """Evicts prefixes that have no room beside `live` bytes and an answer's next rows.

        `state`: the answer's own; None if it is in a batch, whose caches have spare room.
        """
        if not self.memory.bytes:
            return
        caches: Sequence[Any] = () if state is None else state.caches
        self.memory.shrink(live + growth_of(caches, GROWTH_ROWS))

    def _stored(self, request: Request, live: int) -> Prefix | None:
        """The prefix of its prompt on disk, if it is longer than the one in memory, which gets a
        copy."""
        if self.disk is None:
            return None
        prompt, ends, salt = request.prompt, request.ends, request.cache_salt
        drafts = request.k > 0
        beyond = self.memory.cached_rows(prompt, ends, salt, drafts=drafts)
        stored = self.disk.find(prompt, ends, beyond, salt, drafts=drafts)
        if stored is not None:
            _ = self._keep_copy(request, stored, live)
        return stored

    def _received(self, request: Request, received: ReceivedPrefix, live: int) -> Prefix | None:
        """The prefix that another runner sent, if it is longer than the one in memory, which gets a
        copy; None if it cannot be used."""
        prompt, ends, salt = request.prompt, request.ends, request.cache_salt
        beyond = self.memory.cached_rows(prompt, ends, salt, drafts=request.k > 0)
        if received.rows <= beyond:
            return None
        try:
            reader = PrefixReader()
            reader.add(received)
            prefix = replace(reader.prefix(self.memory.make_caches()), tier="peer")
        except Exception as fault:  # any content: the prompt is then read without it
            why = str(fault) or type(fault).__name__
            log.warning("a state from another node cannot be used: %s", why)
            return None
        node = self._keep_copy(request, prefix, live)
        if self.disk is not None and node is not None:
            self.disk.add(node)
        return prefix

    def _keep_copy(self, request: Request, prefix: Prefix, live: int) -> PrefixNode | None:
        """Puts a copy of a prefix into memory, if it has room beside the request's own."""
        drafter = prefix.drafter
        draft_caches = [] if drafter is None or drafter.cache is None else [drafter.cache]
        live += sum(array.nbytes for array in cache_arrays([*prefix.caches, *draft_caches]))
        entry = prefix.position, prefix.caches, prefix.drafter
        node = self._keep_in_memory(request, *entry, live)
        self.memory.shrink(live)
        return node

    def _keep_in_memory(
        self,
        request: Request,
        rows: int,
        caches: Sequence[Any],
        draft: DraftPrefix | None,
        live: int,
        logits: mx.array | None = None,
    ) -> PrefixNode | None:
        entry = request.prompt, request.ends, rows, caches, draft, self.schedule.turn_ends
        return self.memory.keep(*entry, live, request.cache_salt, logits)
