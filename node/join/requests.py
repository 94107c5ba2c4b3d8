"""Which nodes wait to be let in, and the limits on attempts. Pure: time is an argument.

Nothing is revealed to a node that waits, and nothing by it, until a person typed digits. So the
waiting need bounds on memory alone; attempts are bounded where they are begun by the other side,
which is at the joiner.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...placement.errors import JoinRequestNotFound
from .handshake import PeerIdentity

MAX_PENDING: Final = 64
BURST: Final = 8
"""Attempts in a row, from all addresses; as many as are left come back one by one."""
BURST_OF_ONE: Final = 4
"""Of these, from one address."""
REFILL_S: Final = 30.0
REFILL_OF_ONE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """A node that waits; its connection is still there."""

    id: str
    party: PeerIdentity
    address: str
    """The IP address that it asks from."""


def newest_of_a_crowd(sources: Sequence[str]) -> int:
    """Which of the requests from `sources`, oldest first, has to go where there are too many.

    The newest of those from the address with the most. So a crowd from one address keeps nobody
    else out, and one from many addresses does not push out who waits already.
    """
    counts = Counter(sources)
    most = max(counts.values())
    return max(index for index, source in enumerate(sources) if counts[source] == most)


class Bucket:
    """Lets `burst` through at once, then one every `refill_s`."""

    def __init__(self, burst: int, refill_s: float) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._left = float(burst)
        self._at = 0.0

    def wait_s(self, now: float) -> float:
        """Seconds until one may pass; 0: now."""
        left = min(self._burst, self._left + (now - self._at) / self._refill_s)
        return 0.0 if left >= 1 else (1 - left) * self._refill_s

    def take(self, now: float) -> None:
        """One passes."""
        left = self._left + max(0.0, now - self._at) / self._refill_s
        self._left = min(self._burst, left) - 1
        self._at = now

    def is_full(self, now: float) -> bool:
        return self._left + (now - self._at) / self._refill_s >= self._burst


class Attempts:
    """Bounds how often others may try to know this node's digits: each try is one in a million."""

    def __init__(self) -> None:
        self._all = Bucket(BURST, REFILL_S)
        self._of_one: dict[str, Bucket] = {}

    def wait_s(self, source: str, now: float) -> float:
        """Seconds until another attempt from there may begin; 0: it begins, and counts."""
        self._of_one = {s: b for s, b in self._of_one.items() if not b.is_full(now)}
        one = self._of_one.get(source) or Bucket(BURST_OF_ONE, REFILL_OF_ONE_S)
        wait = max(self._all.wait_s(now), one.wait_s(now))
        if wait == 0:
            self._all.take(now)
            one.take(now)
            self._of_one[source] = one
        return wait


class PendingRequests:
    """One node's waiting requests, oldest first."""

    def __init__(self) -> None:
        self._pending: dict[str, Request] = {}

    def add(self, request: Request) -> list[str]:
        """Returns the ids of requests that had to go: the same node's last one, and one more where
        there are too many, which may be this one."""
        pending = self._pending
        gone = [old.id for old in pending.values() if old.party.node == request.party.node]
        for id_ in gone:
            del pending[id_]
        pending[request.id] = request
        if len(pending) > MAX_PENDING:
            crowd = list(pending.values())
            victim = crowd[newest_of_a_crowd([each.address for each in crowd])].id
            del pending[victim]
            gone.append(victim)
        return gone

    def pending(self) -> list[Request]:
        """Oldest first."""
        return list(self._pending.values())

    def get(self, id_: str) -> Request:
        """Raises JoinRequestNotFound."""
        if (request := self._pending.get(id_)) is None:
            raise not_found()
        return request

    def remove(self, id_: str) -> None:
        """It was decided, or its connection ended; an unknown id is one that was decided."""
        _ = self._pending.pop(id_, None)


def not_found() -> JoinRequestNotFound:
    return JoinRequestNotFound(
        "no node asks to join under that id any more; `exo-node nodes` lists who does", param="id"
    )
