"""Prefixes of prompts in a pipeline: what each stage keeps of them, and goes on from.

The generator says with each forward over a prompt what is kept of the state behind it
(`HiddenBlock.border`), so that all stages keep the same. A request that begins like an earlier one
goes on from what the generator has; the ids of those rows travel to the stages in front of its
first block (`Link.adopt`). What left a stage is kept with its rows: a stage that has fewer, since
each evicts what it must, is rebuilt from the one before it, as after a loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from ...proto import peer_pb2 as pb

if TYPE_CHECKING:
    from .request_state import RequestState


@dataclass(slots=True)
class PromptRead:
    """The rows of a prompt that a stage has read, from its first one on."""

    ids: list[int] = field(default_factory=list[int])
    ends: list[int] = field(default_factory=list[int])
    """The row behind each forward."""
    border: int = 0
    """The last row behind which the state is kept."""
    first_turn: int = 0
    """The row behind the prompt's first turn; 0: none was seen."""
    salt: bytes = b""
    """Only requests of the same salt find it. Set on the generator, by whose prefixes all stages
    go: what the others keep is looked for only after it was found there."""

    @property
    def schedule(self) -> list[int]:
        """Rows of each forward."""
        return [end - begin for begin, end in pairwise((0, *self.ends))]

    def add(self, begin: int, tokens: Sequence[int], border: "pb.Border.ValueType") -> None:
        """One forward was run over the rows from `begin` on.

        Nothing is noted where those before it are not known.
        """
        if begin != len(self.ids):
            return
        self.ids += tokens
        end = len(self.ids)
        self.ends.append(end)
        if border != pb.BORDER_UNSPECIFIED:
            self.border = end
        if border == pb.BORDER_FIRST_TURN:
            self.first_turn = end

    def roll_back(self, position: int) -> None:
        """The rows from `position` on do not count."""
        if position < len(self.ids):
            self.ends = [end for end in self.ends if end <= position]
            self.ids = self.ids[: self.ends[-1] if self.ends else 0]


class Prefixes(Protocol):
    """What a stage keeps of prompts. All methods run on the compute thread.

    `live`: bytes of all requests in progress, beside which what is kept must have room.
    """

    @property
    def bytes(self) -> int: ...

    def find(
        self, request: str, attempt: int, ids: Sequence[int], ends: Sequence[int], live: int
    ) -> "RequestState | None":
        """A copy for that request of the state behind the longest known prefix of `ids`, which
        forwards that end at `ends` read; all of `ids` at most."""
        ...

    def keep(self, state: "RequestState", live: int) -> None:
        """Keeps a copy of it behind all rows that it has, which are those of `state.read`."""
        ...

    def shrink(self, live: int) -> None:
        """Drops what does not fit."""
        ...

    def clear(self) -> None: ...
