"""The generator's way through the other stages and back, and what is on that way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...placement.errors import ExoNodeError
from .frames import HiddenBlock

Key = tuple[str, int]
"""A request and its attempt."""


@dataclass(slots=True, eq=False)
class Trip:
    """What one call sent round all stages; what came of it is set once, then `is_back`."""

    members: tuple[Key, ...]
    position: int = 0
    """The committed rows of the first member: with its name this tells a trip from others."""
    is_back: bool = False
    """Whether nothing more will come. Set last: other fields are another thread's before."""
    block: HiddenBlock | None = None
    """What came back, where hidden states were asked for."""
    held: list[int] = field(default_factory=list[int])
    """Of a question for prefixes: the rows behind which all stages keep the state."""
    faults: dict[Key, ExoNodeError] = field(default_factory=dict[Key, ExoNodeError])
    """What went wrong, by member. The others of a block that came back have their rows."""

    def fail(self, key: Key, fault: ExoNodeError) -> bool:
        """What went wrong with one member first counts; whether nobody waits any more."""
        if key in self.members:
            _ = self.faults.setdefault(key, fault)
        return len(self.faults) == len(self.members)


class Link(Protocol):
    """The other stages. Called on the compute thread; never blocks and raises nothing."""

    def listen(self, returned: Callable[[], None]) -> None:
        """`returned` is called, on any thread, whenever a trip is back."""
        ...

    def send(self, block: HiddenBlock) -> Trip:
        """Sends a block round the stages. Each member's fault, PeerLost where a stage is gone or
        late or what a stage refused, is in the trip."""
        ...

    def ask_prefixes(
        self, key: Key, ids: Sequence[int], schedule: Sequence[int], held: Sequence[int]
    ) -> Trip:
        """Asks which of `held` all stages keep the state behind: rows of `ids`, which forwards of
        `schedule` rows each read. The attempt may begin behind one of them.
        """
        ...

    def release(self, key: Key) -> None:
        """Tells every stage that the request is over, and brings back what is only its own."""
        ...
