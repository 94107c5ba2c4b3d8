"""What a pipeline's stages keep of prompts: the states behind some forwards over them.

The generator says with each forward over a prompt what is kept of the state behind it
(`HiddenBlock.border`), so that all stages keep the same. But each drops what it must, and a stage
that took another one's place has nothing: before a request begins behind a prefix, the ids of those
rows travel round the stages (`Link.ask_prefixes`), and it begins behind the most that all of them
still have.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...proto import peer_pb2 as pb
from ..model.stage_model import StageModel
from .prefix_cache import PrefixCache, is_worth
from .prefix_tree import Salt
from .spans import growth_of
from .state import State


@dataclass(slots=True)
class PromptRead:
    """The rows of a prompt that a stage has read, from its first one on."""

    ids: list[int] = field(default_factory=list[int])
    ends: list[int] = field(default_factory=list[int])
    """The row behind each forward."""
    first_turn: int = 0
    """The row behind the prompt's first turn; 0: none was seen."""

    def add(self, begin: int, tokens: Sequence[int], border: "pb.Border.ValueType") -> None:
        """One forward was run over the rows from `begin` on.

        Nothing is noted where those before it are not known.
        """
        if begin != len(self.ids):
            return
        self.ids += tokens
        self.ends.append(len(self.ids))
        if border == pb.BORDER_FIRST_TURN:
            self.first_turn = len(self.ids)


class StagePrefixes:
    """The kept states of one stage. All methods run on the compute thread.

    `live`: bytes of all requests in progress, beside which what is kept must have room. `salt`:
    only what was kept with the same one is found. The generator alone has it, and all stages go by
    what it found.
    """

    def __init__(self, kept: PrefixCache) -> None:
        self._kept = kept

    @classmethod
    def of(cls, model: StageModel, budget: int) -> "StagePrefixes | None":
        """None where nothing is to be kept; `budget` in bytes, live requests included."""
        return cls(PrefixCache(budget, model.make_caches)) if budget else None

    @property
    def bytes(self) -> int:
        """Bytes of what is kept."""
        return self._kept.bytes

    def held(self, ids: Sequence[int], ends: Sequence[int], salt: Salt = b"") -> list[int]:
        """Rows of `ids`, which forwards that end at `ends` read, behind which a state is kept."""
        return self._kept.held(ids, [*ends, len(ids) + 1], salt, drafts=False)

    def behind(
        self, ids: Sequence[int], ends: Sequence[int], live: int, salt: Salt = b""
    ) -> tuple[State, PromptRead] | None:
        """A copy of the state behind all of `ids`; None where it is not here, or has no room."""
        all_ends = [*ends, len(ids) + 1]
        found = self._kept.find(ids, all_ends, drafts=False, live=live, salt=salt)
        if found is None or found.position != len(ids):
            return None
        read = PromptRead(list(ids), list(ends), found.first_turn)
        return State(found.caches, found.position), read

    def keep(
        self, state: State, read: PromptRead, live: int, following: int, salt: Salt = b""
    ) -> None:
        """Keeps a copy of it behind all rows that it has, which are those of `read`.

        `following`: rows that may come behind those.
        """
        if len(read.ids) != state.rows:
            return  # not all of its ids are known
        live += growth_of(state.caches, following)
        self._kept.put(
            read.ids, read.ends, state.caches, None, read.first_turn, live=live, salt=salt
        )
        self._kept.shrink(live)

    def shrink(self, live: int) -> None:
        """Drops what does not fit."""
        self._kept.shrink(live)

    def clear(self) -> None:
        """Drops all: the numbers of one are not finite."""
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
