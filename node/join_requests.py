"""The requests to join that wait for a person, and the limits on them. Pure: time is an argument.

The limits are part of the security. Whoever sits between two nodes makes an attempt with each, and
may hold what it got with one against many tries with the other: of TRIES codes there and SHOWN here
in the ten minutes that a request lives, one pair is the same with a chance of 1 in 3900.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from ..placement.errors import InvalidRequest, JoinRequestNotFound
from .join import Party, Reason, spaced

PENDING_S = 600.0
MAX_PENDING = 16
MAX_PENDING_PER_ADDRESS = 8
TRIES = 32
"""Within PENDING_S, by all; each is a nonce of this node's that was revealed to one who asks."""
TRIES_PER_ADDRESS = 16
SHOWN = 8
"""Nonces that a node which asks reveals within PENDING_S, to all clusters that it asks: each is a
code for whoever gets it, also where nobody sees it."""

Outcome = Literal["approved"] | Reason


@dataclass(frozen=True, slots=True)
class Request:
    """A node that waits; its connection is still there."""

    id: str
    party: Party
    address: str
    """The IP address that it asks from."""
    code: str
    expires: float


class Attempts:
    """Counts what began within the last PENDING_S seconds."""

    def __init__(self, most: int, most_from_one: int) -> None:
        self._most = most
        self._most_from_one = most_from_one
        self._begun: deque[tuple[float, str]] = deque()

    def admits(self, source: str, now: float) -> bool:
        """Whether another one may begin; counts it if so."""
        while self._begun and self._begun[0][0] <= now - PENDING_S:
            _ = self._begun.popleft()
        from_one = [other for _, other in self._begun].count(source)
        if len(self._begun) >= self._most or from_one >= self._most_from_one:
            return False
        self._begun.append((now, source))
        return True


class Desk:
    """One node's waiting requests. Who decides one learns it as the return value, once."""

    def __init__(self) -> None:
        self._pending: dict[str, Request] = {}
        self._tries = Attempts(TRIES, TRIES_PER_ADDRESS)

    def admits(self, address: str, now: float) -> bool:
        """Whether another attempt from there may begin; counts it if so."""
        waiting = [request.address for request in self._pending.values()]
        if len(waiting) >= MAX_PENDING or waiting.count(address) >= MAX_PENDING_PER_ADDRESS:
            return False
        return self._tries.admits(address, now)

    def add(self, id_: str, party: Party, address: str, code: str, now: float) -> Request:
        """A node asks again only when its last request is gone, so an older one is dropped."""
        for old in [r for r in self._pending.values() if r.party.node == party.node]:
            del self._pending[old.id]
        request = Request(id_, party, address, code, now + PENDING_S)
        self._pending[id_] = request
        return request

    def pending(self, now: float) -> list[Request]:
        """Those that may still be approved, oldest first."""
        return [request for request in self._pending.values() if request.expires > now]

    def is_pending(self, id_: str, now: float) -> bool:
        request = self._pending.get(id_)
        return request is not None and request.expires > now

    def approve(self, id_: str, code: str, now: float) -> Outcome:
        """`approved` where the digits are the request's; else the request is over: one try each.

        Raises JoinRequestNotFound.
        """
        request = self._take(id_, now)
        return "approved" if request.code == code else "wrong_code"

    def deny(self, id_: str, now: float) -> Outcome:
        """Raises JoinRequestNotFound."""
        _ = self._take(id_, now)
        return "denied"

    def withdraw(self, id_: str) -> None:
        """Its connection ended, or its time did; an unknown id is one that was decided."""
        _ = self._pending.pop(id_, None)

    def _take(self, id_: str, now: float) -> Request:
        request = self._pending.pop(id_, None)
        if request is None or request.expires <= now:
            raise JoinRequestNotFound(
                "no node asks to join under that id any more; `exo-node nodes` lists who does",
                param="id",
            )
        return request


def wrong_code(name: str, code: str) -> InvalidRequest:
    """What the person who gave it is told."""
    return InvalidRequest(
        f"{name} does not show {spaced(code)}, so it was refused; it asks again with new digits. "
        "If its screen did show these, somebody is between the two nodes",
        param="code",
    )
