"""The states after a prompt's forwards that all stages of a pipeline cache.

With each forward over a prompt the first stage decides whether the state after it is cached
(`HiddenBlock.border`), so that all stages cache the same. But each stage evicts as its own memory
requires, in memory and on disk, and a replaced stage starts empty: before a request begins after a
prefix, a query with the prefix's ids passes all stages (`StageLink.ask_prefixes`), and the request
begins after the longest prefix that all of them still have.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....proto import peer_pb2 as pb
from ..states.state import State
from .memory import is_worth_caching
from .prompt_path import PromptPath, Salt


@dataclass(slots=True)
class PrefillLog:
    """The forwards over a prompt that a stage has computed, from the prompt's first row on."""

    ids: list[int] = field(default_factory=list[int])
    ends: list[int] = field(default_factory=list[int])
    """The row after each forward."""
    first_turn: int = 0
    """The row after the prompt's first turn, or 0 before its end."""

    @classmethod
    def of(cls, path: PromptPath, state: State) -> "PrefillLog":
        """The log of a stage that begins with a cached `state` after forwards of `path`."""
        return cls(
            list(path.ids[: state.rows]), list(path.up_to(state.rows).ends), state.first_turn
        )

    def path(self, salt: Salt) -> PromptPath:
        """Its forwards."""
        return PromptPath(self.ids, self.ends, salt)

    def add(self, begin: int, tokens: Sequence[int], border: "pb.Border.ValueType") -> None:
        """Adds a forward over the rows from `begin` on, unless earlier rows are missing."""
        if begin != len(self.ids):
            return
        self.ids += tokens
        self.ends.append(len(self.ids))
        if border == pb.BORDER_FIRST_TURN:
            self.first_turn = len(self.ids)


class Borders:
    """Decides on the first stage which states of one prompt all stages cache."""

    def __init__(
        self,
        prompt: Sequence[int],
        ends: Sequence[int],
        turn_ends: Collection[int],
        cached_rows: int,
    ) -> None:
        """`ends`: the row after each forward over `prompt`. `cached_rows`: rows of the prefix that
        it began after."""
        inner = ends[:-1]  # no request begins after the last: its logits are needed
        self._inner = frozenset(inner)
        self._always = {end for end in inner if prompt[end - 1] in turn_ends}
        self._first = min(self._always, default=0)
        self._always |= set(inner[-1:])
        self._last = cached_rows

    def at(self, rows: int, caches: Sequence[Any]) -> "pb.Border.ValueType":
        """Whether the state after `rows` rows, which is in `caches`, is cached."""
        if rows not in self._inner:
            return pb.BORDER_UNSPECIFIED
        if rows not in self._always and not is_worth_caching(caches, rows - self._last):
            return pb.BORDER_UNSPECIFIED
        self._last = rows
        return pb.BORDER_FIRST_TURN if rows == self._first else pb.BORDER_KEPT
