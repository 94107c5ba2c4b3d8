"""The first stage's connection to the other stages, and the calls in flight there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ...placement.errors import ExoNodeError
from .copy_query import ExactCopies
from .frames import HiddenBlock

Key = tuple[str, int]
"""A request and its attempt."""
COPY_QUERY: Final = -1
"""The position of a query for copies, which no block has."""


@dataclass(slots=True, eq=False)
class Trip:
    """A call in flight through all stages. Its result is set once, and then `is_back`."""

    members: tuple[Key, ...]
    position: int = 0
    """Committed rows of the first member, which together with its key identify the trip, or
    COPY_QUERY."""
    is_back: bool = False
    """Whether the result is complete. Set last: before, another thread owns the other fields."""
    block: HiddenBlock | None = None
    """The answer to a block of hidden states."""
    prefix_rows: list[int] = field(default_factory=list[int])
    """The answer to a prefix query: rows after which all stages have cached the state."""
    copies: ExactCopies | None = None
    """The answer to a query for copies."""
    faults: dict[Key, ExoNodeError] = field(default_factory=dict[Key, ExoNodeError])
    """Errors by member; other members have their rows in `block`."""

    def fail(self, key: Key, fault: ExoNodeError) -> bool:
        """Records a member's first error. Returns whether all members have failed."""
        if key in self.members:
            _ = self.faults.setdefault(key, fault)
        return len(self.faults) == len(self.members)


class StageLink(Protocol):
    """The other stages. Called on the compute thread; never blocks and raises nothing."""

    def listen(self, on_back: Callable[[], None]) -> None:
        """Sets the function that is called, on any thread, whenever a trip is back."""
        ...

    def send(self, block: HiddenBlock) -> Trip:
        """Sends a block through the stages. The trip gets each member's error: PeerLost if a stage
        is gone or late, or the error of a stage that refused it."""
        ...

    def ask_prefixes(
        self, key: Key, ids: Sequence[int], schedule: Sequence[int], ends: Sequence[int]
    ) -> Trip:
        """Queries after which of `ends` all stages have cached the state; the attempt may begin
        after one of them.

        They are row counts of `ids`, which forwards of `schedule` rows each read.
        """
        ...

    def ask_copies(self, key: Key, copies: ExactCopies) -> Trip:
        """Queries which of the first stage's `copies` all stages compute exactly, for a request
        that has nothing else in flight."""
        ...

    def release(self, key: Key) -> None:
        """Frees a request's state on every stage, and ends the trips that only it waits for."""
        ...
