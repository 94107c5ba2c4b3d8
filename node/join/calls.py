"""The calls of a node to the join ports of other clusters, as one state machine. Pure.

`asker.py` runs one task for each address in `calls`, and reports how each call ends:

    unknown  --discover-----------------------------> called, at once
    called   --greet, its cluster may be asked------> called, with an application
    called   --end----------------------------------> called again after a delay, or quiet
    called   --settle, it has an application--------> unknown
    quiet    --discover----------------------------> called after the rest of `forget_after_s`

One address of a cluster is asked at a time. The others are called again every `look_again_s`, so
that one of them takes over when that one fails.
"""

from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from ..machine.timing import Timing
from .handshake import PeerIdentity, relation

MAX_ADDRESSES: Final = 128
MAX_FAILURES: Final = 60
"""In a row, about ten minutes: a node that comes back calls by itself."""
_TEMPORARY: Final = ("busy", "wrong_code")
"""Reasons of a refusal after which another call is soon worth it."""


@dataclass(frozen=True, slots=True)
class JoinApplication:
    """This node's request to be let into a cluster; its connection is open."""

    approver: PeerIdentity
    address: str
    since: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class JoinCall:
    """An address that is called now, or after `delay_s`."""

    delay_s: float = 0.0
    """Seconds from the end of one call to the next."""
    failures: int = 0
    """Calls in a row that got no proper answer."""
    again_s: float | None = None
    """The delay after the call in progress, or None if there is nothing more to ask."""
    application: JoinApplication | None = None


CallAction: TypeAlias = JoinApplication | Literal["dial", "report"] | None
"""The step after a greeting: an application on this connection; `dial` for a member of this node's
own cluster; `report` for another established cluster, which only a person can unite with this."""


@dataclass(slots=True)
class CallState:
    """All that decides on the next call. `now` is in seconds of any clock.

    Methods do nothing for an address that is not called any more.
    """

    timing: Timing
    closed: frozenset[str] = frozenset()
    """Clusters that are not asked: a person denied this node there, or made it leave."""
    closed_names: dict[str, str] = field(default_factory=dict[str, str])
    """The name of a node of each closed cluster that was reached."""
    calls: dict[str, JoinCall] = field(default_factory=dict[str, JoinCall])
    """The called addresses; the asker keeps one task for each."""
    quiet: dict[str, float] = field(default_factory=dict[str, float])
    """When each address that answered may be called again, oldest first."""

    def applications(self) -> list[JoinApplication]:
        """The clusters at which this node waits to be let in."""
        return [call.application for call in self.calls.values() if call.application is not None]

    def discover(self, address: str, now: float) -> None:
        """A join port (host:port) that may be of another cluster."""
        self.quiet = {each: until for each, until in self.quiet.items() if until > now}
        if address in self.calls:
            return
        if len(self.calls) >= MAX_ADDRESSES:
            idle = {each: c.failures for each, c in self.calls.items() if c.application is None}
            worst = max(idle, key=lambda each: idle[each], default="")
            if not idle.get(worst):
                return
            del self.calls[worst]
        self.calls[address] = JoinCall(max(0.0, self.quiet.pop(address, now) - now))

    def ask_again(self) -> None:
        """Asks closed clusters, at a person's request; each is called every `look_again_s`."""
        self.closed = frozenset()
        self.closed_names.clear()

    def greet(
        self, address: str, own: PeerIdentity, other: PeerIdentity, unix_s: float
    ) -> CallAction:
        """Both sides of a call have sent their hello; returns the action that is due."""
        if (call := self.calls.get(address)) is None:
            return None
        again = replace(call, again_s=self.timing.look_again_s)
        match relation(own, other):
            case "same":
                return "dial"
            case "asked" | "apart":
                return "report"
            case "ask" | "both":
                pass
        if other.cluster in self.closed:  # its node may come to be in another one
            self.calls[address] = again
            self.closed_names[other.cluster] = other.name
            return None
        if any(each.approver.cluster == other.cluster for each in self.applications()):
            self.calls[address] = again
            return None
        application = JoinApplication(other, address, unix_s)
        self.calls[address] = replace(call, application=application)
        return application

    def end(self, address: str, refusal: str | None, now: float) -> None:
        """A call ended with an answer; `refusal` is the `handshake.Reason` of one, "" for none.

        It is None if the other side did not answer or proved nothing, or a defect ended the call.
        """
        if (call := self.calls.pop(address, None)) is None:
            return
        failures = 0 if refusal is not None else call.failures + 1
        delay_s = self._delay_s(call, refusal)
        if delay_s is not None and failures < MAX_FAILURES:
            self.calls[address] = JoinCall(delay_s, failures)
            return
        self.quiet[address] = now + self.timing.forget_after_s
        if len(self.quiet) > MAX_ADDRESSES:
            del self.quiet[next(iter(self.quiet))]

    def settle(self) -> None:
        """Another node is in this one's cluster: it leaves that for no other."""
        self.calls = {a: call for a, call in self.calls.items() if call.application is None}

    def _delay_s(self, call: JoinCall, refusal: str | None) -> float | None:
        """The pause before the next call, or None if there is nothing more to ask there."""
        if refusal is None:
            delay_s = self.timing.retry_s * 2 ** (call.failures + 1)
            return min(delay_s, self.timing.max_retry_s)
        if call.application is not None and refusal == "denied":
            self.closed |= {call.application.approver.cluster}
            return self.timing.look_again_s
        if refusal == "too_many":
            return self.timing.max_retry_s
        if refusal:
            return self.timing.retry_s if refusal in _TEMPORARY else None
        return call.again_s
