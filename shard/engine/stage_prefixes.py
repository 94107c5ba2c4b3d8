"""The prefix cache of a pipeline's stage: the states behind some forwards over prompts.

With each forward over a prompt the first stage decides whether the state behind it is cached
(`HiddenBlock.border`), so that all stages cache the same. But each stage evicts as its own memory
requires, in memory and on disk, and a replaced stage starts empty: before a request begins behind a
prefix, a query with the prefix's ids passes all stages (`StageLink.ask_prefixes`), and the request
begins behind the longest prefix that all of them still have.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...mtp.rollback import cache_arrays
from ...mtp.types import CacheTier
from ...proto import peer_pb2 as pb
from ..model.stage_model import StageModel
from .prefix_cache import PrefixCache, is_worth_caching
from .prefix_disk import PrefixDisk
from .prefix_tree import Salt
from .spans import growth_of
from .state import State


@dataclass(slots=True)
class PrefillLog:
    """The forwards over a prompt that a stage has computed, from the prompt's first row on."""

    ids: list[int] = field(default_factory=list[int])
    ends: list[int] = field(default_factory=list[int])
    """The row behind each forward."""
    first_turn: int = 0
    """The row behind the prompt's first turn; 0: it has not ended yet."""

    def add(self, begin: int, tokens: Sequence[int], border: "pb.Border.ValueType") -> None:
        """Adds a forward over the rows from `begin` on, unless earlier rows are missing."""
        if begin != len(self.ids):
            return
        self.ids += tokens
        self.ends.append(len(self.ids))
        if border == pb.BORDER_FIRST_TURN:
            self.first_turn = len(self.ids)


class StagePrefixes:
    """The prefix cache of one stage. All methods run on the compute thread.

    `live`: bytes of all requests in progress, which share the budget. `salt`: prefixes are shared
    only between requests of equal salts; only the first stage has it, and all stages follow its
    choice of prefixes.
    """

    def __init__(self, memory: PrefixCache, disk: PrefixDisk | None = None) -> None:
        """`disk` None: prefixes are in memory only."""
        self._memory = memory
        self.disk = disk

    @classmethod
    def of(
        cls, model: StageModel, budget: int, disk: PrefixDisk | None = None
    ) -> "StagePrefixes | None":
        """A prefix cache of `budget` bytes, live requests included; None if `budget` is 0."""
        return cls(PrefixCache(budget, model.make_caches), disk) if budget else None

    @property
    def bytes(self) -> int:
        """Bytes of the cached states in memory."""
        return self._memory.bytes

    @property
    def hits(self) -> Mapping[CacheTier, int]:
        """See `PrefixCache.hits`."""
        return self._memory.hits

    def begin(self) -> None:
        """Notes that a request begins."""
        if self.disk is not None:
            self.disk.pause()

    def save_next(self) -> bool:
        """See `PrefixDisk.save_next`."""
        return self.disk is not None and self.disk.save_next(self._memory.holds)

    def cached_ends(
        self, ids: Sequence[int], ends: Sequence[int], live: int, salt: Salt = b""
    ) -> list[int]:
        """Row counts of `ids`, read by forwards that end at `ends`, with a cached state, ascending.

        If the longest is on disk, it is read, so that it is sure to be intact.
        """
        all_ends = [*ends, len(ids) + 1]
        in_memory = self._memory.cached_ends(ids, all_ends, salt, drafts=False)
        if self.disk is None:
            return in_memory
        beyond = max(in_memory, default=0)
        stored = self.disk.find(ids, all_ends, beyond, salt, drafts=False)
        if stored is not None:
            read_ends = [end for end in ends if end <= stored.position]
            live += sum(array.nbytes for array in cache_arrays(stored.caches))
            entry = ids[: stored.position], read_ends, stored.caches, None, stored.first_turn
            node = self._memory.insert(*entry, live=live, salt=salt)
            if node is not None:
                node.tier = "disk"
        on_disk = self.disk.ends(ids, all_ends, salt, drafts=False)
        return sorted({*in_memory, *on_disk})

    def restore(
        self, ids: Sequence[int], ends: Sequence[int], live: int, salt: Salt = b""
    ) -> tuple[State, PrefillLog] | None:
        """A copy of the state behind all of `ids`; None if it is not cached or has no room."""
        all_ends = [*ends, len(ids) + 1]
        prefix = self._memory.find(ids, all_ends, drafts=False, live=live, salt=salt)
        if (prefix is None or prefix.position != len(ids)) and self.disk is not None:
            prefix = self.disk.find(ids, all_ends, len(ids) - 1, salt, drafts=False)
        if prefix is None or prefix.position != len(ids):
            return None
        prefill_log = PrefillLog(list(ids), list(ends), prefix.first_turn)
        self._memory.hits[prefix.tier] += prefix.position
        return State(prefix.caches, prefix.position, tier=prefix.tier), prefill_log

    def keep(
        self, state: State, prefill_log: PrefillLog, live: int, following: int, salt: Salt = b""
    ) -> None:
        """Caches a copy of a state, whose rows are those of `prefill_log`.

        `following`: rows of the prompt behind them, for which room is left.
        """
        if len(prefill_log.ids) != state.rows:
            return  # some of its ids are missing
        live += growth_of(state.caches, following)
        node = self._memory.insert(
            prefill_log.ids,
            prefill_log.ends,
            state.caches,
            None,
            prefill_log.first_turn,
            live=live,
            salt=salt,
        )
        if self.disk is not None and node is not None:
            self.disk.add(node)
        self._memory.shrink(live)

    def shrink(self, live: int) -> None:
        """Evicts states until the rest fits beside `live` bytes."""
        self._memory.shrink(live)

    def clear(self) -> None:
        """Drops all states, because the numbers of one are not finite."""
        self._memory.clear()
        if self.disk is not None:
            self.disk.clear()


class Borders:
    """Decides on the first stage which states of one prompt all stages cache."""

    def __init__(
        self,
        prompt: Sequence[int],
        ends: Sequence[int],
        turn_ends: Collection[int],
        cached_rows: int,
    ) -> None:
        """`ends`: the row behind each forward over `prompt`. `cached_rows`: rows of the prefix that
        it began behind."""
        inner = ends[:-1]  # no request begins behind the last: its logits are needed
        self._inner = frozenset(inner)
        self._always = {end for end in inner if prompt[end - 1] in turn_ends}
        self._first = min(self._always, default=0)
        self._always |= set(inner[-1:])
        self._last = cached_rows

    def at(self, rows: int, caches: Sequence[Any]) -> "pb.Border.ValueType":
        """Whether the state behind `rows` rows, which is in `caches`, is cached."""
        if rows not in self._inner:
            return pb.BORDER_UNSPECIFIED
        if rows not in self._always and not is_worth_caching(caches, rows - self._last):
            return pb.BORDER_UNSPECIFIED
        self._last = rows
        return pb.BORDER_FIRST_TURN if rows == self._first else pb.BORDER_KEPT
