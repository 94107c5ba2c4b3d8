"""Why a node ends by itself: it has another cluster key now, or its id is another process's."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Final, Literal

from ...placement.errors import DuplicateIdentity

log = logging.getLogger(__name__)

EXIT_DUPLICATE: Final = 3
"""The exit status of a node whose id is another process's."""


@dataclass(frozen=True, slots=True)
class RestartWithKey:
    """The cluster key on disk is another one: the node has to be built anew with it."""

    how: Literal["approved", "given", "left", "rekeyed"]
    peers: tuple[str, ...] = ()
    """host:port to dial then."""


Outcome = RestartWithKey | int
"""To be built anew with another key, or to exit with that status."""


class NodeExit:
    """Decided once; made on the node's event loop."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._is_member = False

    @property
    def decided(self) -> bool:
        return self.outcome.done()

    def was_accepted(self) -> None:
        """Another node takes this process for the member with its id."""
        self._is_member = True

    def rekeyed(self, news: RestartWithKey) -> None:
        self._decide(news)

    def give_up(self, fault: DuplicateIdentity) -> None:
        """This process is the second one: it ends, unless others know it as their member."""
        if self.decided:
            return
        if self._is_member:
            log.error("%s", fault.message)
            return
        log.error("this node ends: %s", fault.message)
        self._decide(EXIT_DUPLICATE)

    def _decide(self, outcome: Outcome) -> None:
        if not self.decided:
            self.outcome.set_result(outcome)
