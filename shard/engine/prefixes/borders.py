"""The states after a prompt's forwards that all stages of a pipeline cache.

With each forward over a prompt the first stage decides whether the state after it is cached
(`HiddenBlock.border`), so that all stages cache the same. But each stage evicts as its own memory
requires, in memory and on disk, and a replaced stage starts empty: before a request begins after a
prefix, a query with the prefix's ids passes all stages (`StageLink.ask_prefixes`), and the request
begins after the longest prefix that all of them still have.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ....proto import peer_pb2 as pb
from ..states.state import State
from .prompt_path import PromptPath


@dataclass(slots=True)
class PrefillLog:
    """The forwards over a prompt that a later stage has computed, from the first row on."""

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

    @property
    def path(self) -> PromptPath:
        """Its forwards."""
        return PromptPath(self.ids, self.ends)

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

    def __init__(self, path: PromptPath, turn_ends: Collection[int], cached_rows: int) -> None:
        """`path`: all forwards over the prompt. `cached_rows`: rows of the prefix that it began
        after."""
        self._inner = path.inner.ends  # no request begins after the last: its logits are needed
        turns = [end for end in self._inner if path.ids[end - 1] in turn_ends]
        self.first_turn = min(turns, default=0)
        """The row after the prompt's first turn, or 0."""
        self._always = {*turns, *self._inner[-1:]}
        self.last = cached_rows
        """Rows after which all stages last cached the state."""

    def at(self, rows: int, is_worth: Callable[[int], bool]) -> "pb.Border.ValueType":
        """Whether the state after `rows` rows is cached. `is_worth`: whether it may be, by
        the number of rows after the last one."""
        if rows not in self._inner:
            return pb.BORDER_UNSPECIFIED
        if rows not in self._always and not is_worth(rows - self.last):
            return pb.BORDER_UNSPECIFIED
        self.last = rows
        return pb.BORDER_FIRST_TURN if rows == self.first_turn else pb.BORDER_KEPT
