"""What a stage holds of one request, the generator's stage or another."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...mtp.rollback import can_roll_back, rollback
from .prefixes import PromptRead

if TYPE_CHECKING:
    from .merged import Group


@dataclass(slots=True)
class RequestState:
    """All of it fits `position` rows."""

    caches: list[Any]
    """One entry for each layer of the whole model; see `StageModel.make_caches`."""
    position: int = 0
    last_rows: int = 0
    """Of the last forward: how far it goes back."""
    read: PromptRead = field(default_factory=PromptRead)
    """Of a pipeline's stage: the prompt, as far as forwards here read it."""
    group: "Group | None" = None
    """Where its rows are while forwards are shared: `caches` are empty then."""

    def alone(self) -> None:
        """From here on `caches` hold its rows. Raises StateLost where a shared forward failed."""
        if self.group is not None:
            self.group.take_out(self)

    def view(self) -> "RequestState":
        """This state, or one with views of its rows; what is written to it is lost."""
        return self if self.group is None else self.group.view(self)

    def wrote(self, schedule: Sequence[int]) -> None:
        """Forwards of so many rows each were run."""
        self.position += sum(schedule)
        self.last_rows = schedule[-1]

    def can_go_back(self, own: Sequence[Any], position: int) -> bool:
        """Whether the rows from `position` on are some of the last forward's and can be dropped."""
        self.alone()
        return 0 < self.position - position <= self.last_rows and can_roll_back(own)

    def go_back(self, own: Sequence[Any], position: int) -> None:
        """Drops the rows from `position` on. `own`: the caches of the layers that are here."""
        self.alone()
        rollback(own, self.position - position)
        self.position, self.last_rows = position, 0
        self.read.roll_back(position)
