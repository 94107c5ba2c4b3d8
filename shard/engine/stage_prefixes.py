"""What a pipeline's stage keeps of prompts, and where the generator has all stages keep it."""

from collections.abc import Collection, Sequence
from typing import Any

from ...proto import peer_pb2 as pb
from ..model.stage_model import StageModel
from ..pipeline.prefixes import PromptRead
from ..pipeline.request_state import RequestState
from .prefix_cache import PrefixCache, is_worth
from .prefix_tree import Salt
from .spans import growth_of


class StagePrefixes:
    """The `Prefixes` of a stage, over its own layers' caches."""

    def __init__(self, model: StageModel, kept: PrefixCache) -> None:
        """`kept`: of the stage's own caches."""
        self._model = model
        self._kept = kept

    @classmethod
    def of(cls, model: StageModel, budget: int) -> "StagePrefixes | None":
        """None where nothing is to be kept; `budget` in bytes, live requests included."""
        if not budget:
            return None
        return cls(model, PrefixCache(budget, lambda: model.own_caches(model.make_caches())))

    @property
    def bytes(self) -> int:
        return self._kept.bytes

    def held(self, ids: Sequence[int], ends: Sequence[int], salt: Salt = b"") -> list[int]:
        """`salt`: the request's; see `PromptRead.salt`."""
        return self._kept.held(ids, [*ends, len(ids) + 1], salt, drafts=False)

    def behind(
        self, ids: Sequence[int], ends: Sequence[int], live: int, salt: Salt = b""
    ) -> RequestState | None:
        all_ends = [*ends, len(ids) + 1]
        found = self._kept.find(ids, all_ends, drafts=False, live=live, salt=salt)
        if found is None or found.position != len(ids):
            return None
        caches = self._model.make_caches()
        # Entries of other stages' layers are aliases of own ones: they stay that.
        own = self._model.own_caches(caches)
        taken = {id(mine): cache for mine, cache in zip(own, found.caches, strict=True)}
        state = RequestState([taken.get(id(cache), cache) for cache in caches], found.position)
        state.read = PromptRead(list(ids), list(ends), found.position, found.first_turn)
        return state

    def keep(self, state: RequestState, live: int, following: int = 0) -> None:
        """`following`: rows of the prompt behind those; 0: unknown, as many as the last forward."""
        read = state.read
        if len(read.ids) != state.position:
            return  # begun by a copy: not all of its ids are known
        state.alone()
        own = self._model.own_caches(state.caches)
        live += growth_of(own, following or state.last_rows)
        made = read.ids, read.ends, own, None, read.first_turn
        self._kept.put(*made, live=live, salt=read.salt)
        self._kept.shrink(live)

    def shrink(self, live: int) -> None:
        self._kept.shrink(live)

    def clear(self) -> None:
        self._kept.clear()


class Borders:
    """What every stage keeps of one prompt; the generator decides, by its own layers."""

    def __init__(
        self, prompt: Sequence[int], ends: Sequence[int], turn_ends: Collection[int], cached: int
    ) -> None:
        """`ends`: of all forwards over `prompt`; `cached`: rows that were kept already."""
        within = ends[:-1]  # nobody goes on from the last: its logits are wanted
        self._within = frozenset(within)
        self._certain = {end for end in within if prompt[end - 1] in turn_ends}
        self._first = min(self._certain, default=0)
        self._certain |= set(within[-1:])
        self._last = cached

    def at(self, rows: int, own: Sequence[Any]) -> "pb.Border.ValueType":
        """Behind `rows` rows, which the stage's caches hold."""
        if rows not in self._within:
            return pb.BORDER_UNSPECIFIED
        if rows not in self._certain and not is_worth(own, rows - self._last):
            return pb.BORDER_UNSPECIFIED
        self._last = rows
        return pb.BORDER_FIRST_TURN if rows == self._first else pb.BORDER_KEPT
