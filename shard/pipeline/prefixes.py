"""Prefixes of prompts in a pipeline: what each stage keeps of them, and goes on from.

The generator says with each forward over a prompt what is kept of the state behind it
(`HiddenBlock.border`), so that all stages keep the same. But each drops what it must, and a stage
that took another one's place has nothing: before a request begins behind a prefix, the ids of those
rows travel round the stages (`Link.held_by_all`), and it begins behind the most that all of them
still have.
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

    def held(self, ids: Sequence[int], ends: Sequence[int]) -> list[int]:
        """Rows of `ids`, which forwards that end at `ends` read, behind which a state is kept."""
        ...

    def behind(self, ids: Sequence[int], ends: Sequence[int], live: int) -> "RequestState | None":
        """A copy of the state behind all of `ids`; None where it is not here, or has no room."""
        ...

    def keep(self, state: "RequestState", live: int) -> None:
        """Keeps a copy of it behind all rows that it has, which are those of `state.read`."""
        ...

    def shrink(self, live: int) -> None:
        """Drops what does not fit."""
        ...

    def clear(self) -> None: ...
