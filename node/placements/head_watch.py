"""The head's rhythm: a pass over placements each second, and at once when the head changes."""

from dataclasses import dataclass

from ...placement.ids import ModelId
from ..cluster.cluster import Cluster
from ..cluster.desired import Desired, DesiredPlacements
from ..machine.events import EventLog
from ..machine.timing import Timing
from .placements import Placements


@dataclass(eq=False, repr=False)
class HeadWatch:
    """Begins and ends this node's time as the head."""

    _cluster: Cluster
    _placements: Placements
    _desired: DesiredPlacements
    _events: EventLog
    _timing: Timing

    def __post_init__(self) -> None:
        self._superseded: set[ModelId] = set()
        """Models with an event already: the last heartbeats of a head that lost may come late."""

    async def run(self) -> None:
        """Looks now and then, and when the head changes, until it is cancelled."""
        while True:
            await self.look()
            every_s = self._timing.watch_s
            within_s = every_s / 10 if self._placements.is_taking_over else every_s
            await self._cluster.wait_for_news(within_s)

    async def look(self) -> None:
        """During an election nothing is done: the old head may be the new one."""
        head = self._cluster.head
        if head is not None and head == self._cluster.self_id:
            for desired in self._desired.take(self._cluster.leads).values():
                self._continue(desired)
            was_taking_over = self._placements.is_taking_over
            self._placements.lead(head, self._cluster.term)
            if self._placements.is_taking_over and not was_taking_over:
                self._cluster.send_heartbeats()  # each node's answer holds its runners
            self._placements.look()
        elif head is not None:
            self._superseded.clear()
            await self._placements.let_go()

    def _continue(self, desired: Desired) -> None:
        """Another head, as of the other side of a partition, was asked for this."""
        model = desired.model
        own = self._desired.get(model)
        if own is None or (desired.requested and not own.requested):
            self._desired.note(desired)
        elif desired.requested and own.options != desired.options and model not in self._superseded:
            self._superseded.add(model)
            text = f"what was asked of {model} at a head that is none now does not hold here"
            _ = self._events.add("superseded", f"{text}; ask again if it should", model=model)
