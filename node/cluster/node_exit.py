"""Why a node ends by itself: it has another cluster key now, or its id is another process's."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from ...placement.errors import DuplicateIdentity

log = logging.getLogger(__name__)

EXIT_DUPLICATE: Final = 3
"""The exit status of a node whose id is another process's."""


@dataclass(frozen=True, slots=True)
class RestartWithKey:
    """The cluster key on disk is another one: the node has to be rebuilt with it."""

    peers: tuple[str, ...] = ()
    """host:port to dial then."""


Outcome = RestartWithKey | int
"""A restart with another key, or an exit status."""


class NodeExit:
    """Decided once. To be constructed on the node's event loop."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._is_member = False

    @property
    def decided(self) -> bool:
        return self.outcome.done()

    def note_accepted(self) -> None:
        """Another node has accepted this process as the member with its id."""
        self._is_member = True

    def decide(self, outcome: Outcome) -> None:
        """Does nothing after the first decision."""
        if not self.decided:
            self.outcome.set_result(outcome)

    def give_up(self, fault: DuplicateIdentity) -> None:
        """This process is the second one: it ends, unless another node has accepted it."""
        if self.decided:
            return
        if self._is_member:
            log.error("%s", fault.message)
            return
        log.error("this node ends: %s", fault.message)
        self.decide(EXIT_DUPLICATE)
