"""The calls of a node to the join ports of other clusters, as one state machine. Pure.

`step` takes a state, an event and the time and returns the next state and an action that is due.
`asker.py` runs one task for each address in `calls`, and reports how each call ends:

    unknown  --Discovered---------------------------> called, at once
    called   --Greeted, its cluster may be asked----> called, with an application
    called   --CallEnded, CallLost------------------> called again after a delay, or quiet
    called   --Settled, it has an application-------> unknown
    quiet    --Discovered, after `forget_after_s`---> called, at once

One address of a cluster is asked at a time. The others are called again every `look_again_s`, so
that one of them takes over when that one fails.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from ..machine.timing import Timing
from .handshake import PeerIdentity, relation

MAX_ADDRESSES: Final = 128
MAX_FAILURES: Final = 60
"""In a row, about ten minutes: a node that comes back calls by itself."""
_TEMPORARY: Final = ("not_yet", "busy", "wrong_code", "wrong_name")
"""Reasons of a refusal after which another call is soon worth it."""


# ------------------------------------------------------------------------------- state


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
    """The delay after the call in progress; None: there is nothing more to ask."""
    application: JoinApplication | None = None


@dataclass(frozen=True, slots=True)
class CallState:
    """All that decides on the next call."""

    is_open: bool = False
    """Whether this node has --open: its cluster may be left even after it settled."""
    closed: frozenset[str] = frozenset()
    """Clusters that are not asked: a person denied this node there, or made it leave."""
    other_names: frozenset[str] = frozenset()
    """Clusters whose --open name is another one: they are asked by digits."""
    calls: Mapping[str, JoinCall] = field(default_factory=dict[str, JoinCall])
    """The called addresses; the asker keeps one task for each."""
    quiet: Mapping[str, float] = field(default_factory=dict[str, float])
    """When each address that answered may be called again, oldest first."""
    withdrawn: tuple[str, ...] = ()
    """Addresses whose applications ended when this node settled."""

    def applications(self) -> list[JoinApplication]:
        return [call.application for call in self.calls.values() if call.application is not None]


# ------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Discovered:
    """A join port (host:port) that may be of another cluster."""

    address: str


@dataclass(frozen=True, slots=True)
class Greeted:
    """Both sides of a call have sent their hello."""

    address: str
    own: PeerIdentity
    other: PeerIdentity
    time: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call ended with an answer; `refusal` is the `handshake.Reason` of one, "" for none."""

    address: str
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class CallLost:
    """The other side did not answer, its answer proved nothing, or a defect ended the call."""

    address: str


@dataclass(frozen=True, slots=True)
class Settled:
    """This node has company: it leaves its cluster for no other."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The company did not come: what `Settled` withdrew is asked again."""


CallEvent: TypeAlias = Discovered | Greeted | CallEnded | CallLost | Settled | Unsettled


# ----------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Apply:
    """Ask on this connection to be let in: by --open's name, or by digits."""

    application: JoinApplication
    by_name: bool


@dataclass(frozen=True, slots=True)
class DialMember:
    """The address (host:port of a control server) is of this node's own cluster."""

    address: str


@dataclass(frozen=True, slots=True)
class ReportCluster:
    """Another established cluster is at the address: only a person can unite the two."""

    other: PeerIdentity
    address: str


CallAction: TypeAlias = Apply | DialMember | ReportCluster

# ------------------------------------------------------------------------- transitions


def step(
    state: CallState, event: CallEvent, now: float, timing: Timing
) -> tuple[CallState, CallAction | None]:
    """The next state, and the action that is due; `now` in seconds of any clock.

    An event of an address that is not called any more changes nothing.
    """
    match event:
        case Discovered(address):
            return _discover(state, address, now), None
        case Settled():
            return _settle(state), None
        case Unsettled():
            for address in state.withdrawn:
                state = _discover(state, address, now)
            return replace(state, withdrawn=()), None
        case _ if (call := state.calls.get(event.address)) is None:
            return state, None
        case Greeted():
            return _greet(state, event, call, timing)
        case CallEnded():
            return _end(state, event, call, now, timing), None
        case CallLost(address):
            return _lose(state, address, call, now, timing), None


def _discover(state: CallState, address: str, now: float) -> CallState:
    quiet = {each: until for each, until in state.quiet.items() if until > now}
    if address in state.calls or address in quiet:
        return replace(state, quiet=quiet)
    calls = dict(state.calls)
    if len(calls) >= MAX_ADDRESSES:
        idle = {each: c.failures for each, c in calls.items() if c.application is None}
        worst = max(idle, key=lambda each: idle[each], default="")
        if not idle.get(worst):
            return replace(state, quiet=quiet)
        del calls[worst]
    return replace(state, calls={**calls, address: JoinCall()}, quiet=quiet)


def _greet(
    state: CallState, event: Greeted, call: JoinCall, timing: Timing
) -> tuple[CallState, CallAction | None]:
    own, other, address = event.own, event.other, event.address
    again = _set_call(state, address, replace(call, again_s=timing.look_again_s))
    match relation(own, other):
        case "same":
            return state, DialMember(other.address)
        case "asked" if own.fresh:
            return again, None  # it may become established, or go away
        case "asked" | "apart":
            return state, ReportCluster(other, address)
        case "ask" | "both":
            pass
    by_name = own.open and other.open and other.cluster not in state.other_names
    if other.cluster in state.closed or not (own.fresh or by_name):
        return state, None
    if any(each.approver.cluster == other.cluster for each in state.applications()):
        return again, None
    application = JoinApplication(other, address, event.time)
    call = replace(call, application=application)
    return _set_call(state, address, call), Apply(application, by_name)


def _end(
    state: CallState, event: CallEnded, call: JoinCall, now: float, timing: Timing
) -> CallState:
    delay_s = call.again_s
    if event.refusal == "too_many":
        delay_s = timing.max_retry_s
    elif event.refusal:
        delay_s = timing.retry_s if event.refusal in _TEMPORARY else None
    if call.application is not None:
        cluster = call.application.approver.cluster
        if event.refusal == "denied":
            state = replace(state, closed=state.closed | {cluster})
        elif event.refusal == "wrong_name":
            state = replace(state, other_names=state.other_names | {cluster})
    if delay_s is None:
        return _quieten(state, event.address, now + timing.forget_after_s)
    return _set_call(state, event.address, JoinCall(delay_s))


def _lose(state: CallState, address: str, call: JoinCall, now: float, timing: Timing) -> CallState:
    failures = call.failures + 1
    if failures >= MAX_FAILURES:
        return _quieten(state, address, now + timing.forget_after_s)
    delay_s = min(timing.retry_s * 2**failures, timing.max_retry_s)
    return _set_call(state, address, JoinCall(delay_s, failures))


def _settle(state: CallState) -> CallState:
    if state.is_open:
        return state
    addresses = tuple(each.address for each in state.applications())
    calls = {each: call for each, call in state.calls.items() if each not in addresses}
    return replace(state, calls=calls, withdrawn=addresses)


def _quieten(state: CallState, address: str, until: float) -> CallState:
    calls = {each: call for each, call in state.calls.items() if each != address}
    quiet = {**state.quiet, address: until}
    while len(quiet) > MAX_ADDRESSES:
        del quiet[next(iter(quiet))]
    return replace(state, calls=calls, quiet=quiet)


def _set_call(state: CallState, address: str, call: JoinCall) -> CallState:
    return replace(state, calls={**state.calls, address: call})
