"""The nodes that wait to be let in, and the limits on attempts. Pure: time is an argument.

Neither side reveals anything until a person has typed digits, so the number of waiting nodes is
bounded for memory alone. Attempts are limited at the side that does not start them: the joiner.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...placement.errors import JoinRequestNotFound
from .handshake import PeerIdentity

MAX_PENDING: Final = 64
BURST: Final = 8
"""Attempts in a row, from all addresses; they are refilled one by one."""
BURST_OF_ONE: Final = 4
"""Attempts in a row from one address."""
REFILL_S: Final = 30.0
REFILL_OF_ONE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A node that waits to be let in; its connection is open."""

    id: str
    party: PeerIdentity
    address: str
    """The IP address of the connection."""


def largest_crowd(sources: Sequence[str]) -> list[int]:
    """The indices of the entries from the address with the most, in order; `sources` are addresses.

    Evicting one of these keeps no other address out.
    """
    counts = Counter(sources)
    most = max(counts.values())
    return [index for index, source in enumerate(sources) if counts[source] == most]


class Bucket:
    """A token bucket: `burst` tokens at first, then one every `refill_s`."""

    def __init__(self, burst: int, refill_s: float) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._tokens = float(burst)
        self._updated_at = 0.0

    def wait_s(self, now: float) -> float:
        """Seconds until there is a token, or 0 if there is one."""
        return max(0.0, (1 - self._tokens_at(now)) * self._refill_s)

    def take(self, now: float) -> None:
        """Takes a token."""
        self._tokens, self._updated_at = self._tokens_at(now) - 1, now

    def is_full(self, now: float) -> bool:
        return self._tokens_at(now) >= self._burst

    def _tokens_at(self, now: float) -> float:
        passed_s = max(0.0, now - self._updated_at)
        return min(float(self._burst), self._tokens + passed_s / self._refill_s)


class GuessLimit:
    """Limits how often others may guess this node's digits: each guess is one in a million."""

    def __init__(self) -> None:
        self._shared = Bucket(BURST, REFILL_S)
        self._by_source: dict[str, Bucket] = {}

    def wait_s(self, source: str, now: float) -> float:
        """Seconds until another attempt from there may start, or 0 if it starts now, and counts."""
        self._by_source = {s: b for s, b in self._by_source.items() if not b.is_full(now)}
        own = self._by_source.get(source) or Bucket(BURST_OF_ONE, REFILL_OF_ONE_S)
        wait = max(self._shared.wait_s(now), own.wait_s(now))
        if wait == 0:
            self._shared.take(now)
            own.take(now)
            self._by_source[source] = own
        return wait


class PendingRequests:
    """One node's waiting requests, oldest first."""

    def __init__(self) -> None:
        self._pending: dict[str, PendingRequest] = {}

    def add(self, request: PendingRequest) -> list[str]:
        """Returns the ids of evicted requests: the same node's previous one, and one more where
        there are too many, which may be this one."""
        pending = self._pending
        evicted_ids = [old.id for old in pending.values() if old.party.node == request.party.node]
        for id_ in evicted_ids:
            del pending[id_]
        pending[request.id] = request
        if len(pending) > MAX_PENDING:
            crowd = list(pending.values())
            # The newest: a crowd from many addresses evicts no node that waits already.
            victim = crowd[largest_crowd([each.address for each in crowd])[-1]].id
            del pending[victim]
            evicted_ids.append(victim)
        return evicted_ids

    def pending(self) -> list[PendingRequest]:
        """Oldest first."""
        return list(self._pending.values())

    def get(self, id_: str) -> PendingRequest:
        """The request with that id. Raises JoinRequestNotFound."""
        if (request := self._pending.get(id_)) is None:
            raise not_found()
        return request

    def remove(self, id_: str) -> None:
        """Removes a request that was decided or whose connection ended; the id may be unknown."""
        _ = self._pending.pop(id_, None)


def not_found() -> JoinRequestNotFound:
    return JoinRequestNotFound(
        "no node asks to join under that id any more; `exo-node nodes` lists who does", param="id"
    )
