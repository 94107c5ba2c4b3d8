"""The states behind prompts that were read, for prompts that begin with the same ids: in memory and
on disk."""

from collections.abc import Sequence
from typing import Any

from ...mtp.rollback import cache_arrays
from .cache_parts import KeptDraft
from .prefix_cache import Prefix, PrefixCache
from .prefix_disk import PrefixDisk
from .request import Request
from .spans import growth_of
from .state import DraftState, State

MORE = 64
"""Tokens of an answer that what is kept makes room for at once."""


class PrefixStore:
    """Of a model that is here whole. All methods run on the compute thread."""

    def __init__(
        self, memory: PrefixCache, disk: PrefixDisk | None, turn_ends: frozenset[int]
    ) -> None:
        """`disk` None: nothing outlives this process. `turn_ends`: the tokens that end a turn."""
        self.memory = memory
        self._disk = disk
        self._turn_ends = turn_ends

    def find(self, request: Request, live: int) -> State | None:
        """A copy of the longest state behind the beginning of the request's prompt.

        `live`: bytes of all requests in progress, beside which the copy must have room.
        """
        if not self.memory.enabled:
            return None
        self.memory.shrink(live)
        prompt, ends, salt = request.prompt, request.ends, request.cache_salt
        drafts = request.k > 0
        found = self._stored(request, live)
        if found is None:
            found = self.memory.find(prompt, ends, drafts=drafts, live=live, salt=salt)
        if found is None:
            return None
        draft = None
        if drafts and found.drafter is not None:
            ids = [*prompt, *(token for recorded in request.log for token in recorded.tokens)]
            draft = DraftState.behind(*found.drafter, ids)
        return State(found.caches, found.position, draft)

    def keep(self, request: Request, state: State, live: int) -> None:
        """Keeps a copy of the state behind the prompt's first `state.rows` rows, if it is worth it
        and has room beside all that is to be read."""
        rest = len(request.prompt) - state.rows
        if not self.memory.enabled or not rest:
            return
        draft = None
        if state.draft is not None:
            draft = KeptDraft(state.draft.cache, state.draft.rows, state.draft.hidden)
        live += growth_of([*state.caches, *([draft.cache] if draft else [])], rest)
        self._keep_in_memory(request, state.rows, state.caches, draft, live)
        if self._disk is not None:
            kept = request.prompt, request.ends, state.rows, state.caches, draft, self._turn_ends
            self._disk.keep(*kept, request.cache_salt)
        self.memory.shrink(live)

    def make_room(self, state: State | None, live: int) -> None:
        """Drops what has no room beside `live` bytes and an answer's next rows.

        `state`: the answer's, where it has caches of its own; those of several have room ahead.
        """
        if not self.memory.bytes:
            return
        caches: Sequence[Any] = () if state is None else state.caches
        self.memory.shrink(live + growth_of(caches, MORE))

    def _stored(self, request: Request, live: int) -> Prefix | None:
        """What the disk has of its prompt, where that is more than memory has, which keeps a copy
        from now on."""
        if self._disk is None:
            return None
        prompt, ends, salt = request.prompt, request.ends, request.cache_salt
        drafts = request.k > 0
        beyond = self.memory.known(prompt, ends, salt, drafts=drafts)
        stored = self._disk.find(prompt, ends, beyond, salt, drafts=drafts)
        if stored is not None:
            drafted = [] if stored.drafter is None else [stored.drafter.cache]
            live += sum(array.nbytes for array in cache_arrays([*stored.caches, *drafted]))
            kept = stored.position, stored.caches, stored.drafter
            self._keep_in_memory(request, *kept, live)
            self.memory.shrink(live)
        return stored

    def _keep_in_memory(
        self,
        request: Request,
        rows: int,
        caches: Sequence[Any],
        draft: KeptDraft | None,
        live: int,
    ) -> None:
        kept = request.prompt, request.ends, rows, caches, draft, self._turn_ends
        self.memory.keep(*kept, live, request.cache_salt)
