"""The calls of a joining node: a table of its state machine, random events, and its executor."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joiners import joiner, party, run, until

from exo_node.node.join.asker import Asker
from exo_node.node.join.calls import (
    MAX_ADDRESSES,
    MAX_FAILURES,
    Apply,
    CallAction,
    CallCrashed,
    CallEnded,
    CallEvent,
    CallLost,
    CallState,
    CancelCalls,
    DialMember,
    Discovered,
    Greeted,
    JoinApplication,
    JoinCall,
    ReportCluster,
    Settled,
    StartCalls,
    Unsettled,
    step,
)
from exo_node.node.join.handshake import PeerIdentity
from exo_node.node.machine.timing import LOCAL

TIMING = LOCAL.join
NOW, TIME = 100.0, 5.0
QUIET_UNTIL = NOW + TIMING.quiet_s
A, B = "10.0.0.1:1", "10.0.0.2:1"

FRESH, FRESH_OPEN = party("b"), party("b", open=True)
SETTLED, SETTLED_OPEN = party("b", fresh=False), party("b", fresh=False, open=True)
OTHER = party("a", fresh=False)
OTHER_OPEN = party("a", fresh=False, open=True)
OTHER_FRESH = party("a")
LARGER_FRESH_OPEN = party("c", open=True)
OLDER_OPEN = replace(OTHER_OPEN, cluster="0" * 16)
"""Of a cluster whose fingerprint is smaller than this node's, which therefore dissolves."""
APPLICATION = JoinApplication(OTHER, A, TIME)
WAITING = JoinCall(application=APPLICATION)
CALLED = CallState(calls={A: JoinCall()})
FULL = CallState(calls={f"10.0.1.{n}:1": JoinCall() for n in range(MAX_ADDRESSES)})


def after(call: JoinCall, **changed: Any) -> CallState:
    return CallState(calls={A: call}, **changed)


def quiet(**changed: Any) -> CallState:
    return CallState(quiet={A: QUIET_UNTIL}, **changed)


def greeted(own: PeerIdentity, other: PeerIdentity) -> Greeted:
    return Greeted(A, own, other, TIME)


def full_but(address: str, call: JoinCall) -> CallState:
    """As many calls as there may be, one of them this one."""
    return CallState(calls={**dict(list(FULL.calls.items())[1:]), address: call})


def waiting_at(approver: PeerIdentity) -> JoinCall:
    return JoinCall(application=JoinApplication(approver, A, TIME))


Row = tuple[CallState, CallEvent, CallState, tuple[CallAction, ...]]
ROWS: dict[str, Row] = {
    # ------------------------------------------------------------------ discovery
    "a new address is called": (CallState(), Discovered(A), CALLED, (StartCalls(A),)),
    "a called address is not called twice": (CALLED, Discovered(A), CALLED, ()),
    "a quiet address is not called": (quiet(), Discovered(A), quiet(), ()),
    "a quiet address is called after its time": (
        CallState(quiet={A: NOW}),
        Discovered(A),
        CALLED,
        (StartCalls(A),),
    ),
    "an address beyond the limit is not called": (FULL, Discovered(A), FULL, ()),
    "the address with the most failures makes room": (
        full_but(B, JoinCall(failures=1)),
        Discovered(A),
        full_but(A, JoinCall()),
        (CancelCalls(B), StartCalls(A)),
    ),
    "an address with an application makes no room": (
        full_but(A, replace(WAITING, failures=1)),
        Discovered(B),
        full_but(A, replace(WAITING, failures=1)),
        (),
    ),
    # ------------------------------------------------------------------- greetings
    "a member of the own cluster is dialled": (
        CALLED,
        greeted(FRESH, replace(OTHER, cluster=FRESH.cluster)),
        CALLED,
        (DialMember(OTHER.address),),
    ),
    "a fresh node asks an established one by digits": (
        CALLED,
        greeted(FRESH, OTHER),
        after(WAITING),
        (Apply(APPLICATION, by_name=False),),
    ),
    "a fresh node asks a fresh one by digits": (
        CALLED,
        greeted(FRESH, OTHER_FRESH),
        after(waiting_at(OTHER_FRESH)),
        (Apply(JoinApplication(OTHER_FRESH, A, TIME), by_name=False),),
    ),
    "an open node asks an open one by name": (
        CALLED,
        greeted(FRESH_OPEN, OTHER_OPEN),
        after(waiting_at(OTHER_OPEN)),
        (Apply(JoinApplication(OTHER_OPEN, A, TIME), by_name=True),),
    ),
    "an open node asks a cluster of another name by digits": (
        after(JoinCall(), other_names=frozenset({OTHER.cluster})),
        greeted(FRESH_OPEN, OTHER_OPEN),
        after(waiting_at(OTHER_OPEN), other_names=frozenset({OTHER.cluster})),
        (Apply(JoinApplication(OTHER_OPEN, A, TIME), by_name=False),),
    ),
    "an established open node asks the older open cluster by name": (
        CALLED,
        greeted(SETTLED_OPEN, OLDER_OPEN),
        after(waiting_at(OLDER_OPEN)),
        (Apply(JoinApplication(OLDER_OPEN, A, TIME), by_name=True),),
    ),
    "an established node never asks by digits": (
        after(JoinCall(), other_names=frozenset({OLDER_OPEN.cluster})),
        greeted(SETTLED_OPEN, OLDER_OPEN),
        after(JoinCall(), other_names=frozenset({OLDER_OPEN.cluster})),
        (),
    ),
    "a closed cluster is not asked": (
        after(JoinCall(), closed=frozenset({OTHER.cluster})),
        greeted(FRESH, OTHER),
        after(JoinCall(), closed=frozenset({OTHER.cluster})),
        (),
    ),
    "a cluster is asked at one address at a time": (
        CallState(calls={A: JoinCall(), B: JoinCall(application=replace(APPLICATION, address=B))}),
        greeted(FRESH, OTHER),
        CallState(
            calls={
                A: JoinCall(again_s=TIMING.look_again_s),
                B: JoinCall(application=replace(APPLICATION, address=B)),
            }
        ),
        (),
    ),
    "the side that is asked looks again while it is fresh": (
        CALLED,
        greeted(FRESH_OPEN, LARGER_FRESH_OPEN),
        after(JoinCall(again_s=TIMING.look_again_s)),
        (),
    ),
    "an established node that is asked has no more to do": (
        CALLED,
        greeted(SETTLED, OTHER_FRESH),
        CALLED,
        (ReportCluster(OTHER_FRESH, A),),
    ),
    "two established clusters are reported": (
        CALLED,
        greeted(SETTLED, OTHER),
        CALLED,
        (ReportCluster(OTHER, A),),
    ),
    # ------------------------------------------------------------------------ ends
    "an address with no more to ask is quiet": (CALLED, CallEnded(A), quiet(), ()),
    "an address is called again after the delay of its greeting": (
        after(JoinCall(failures=3, again_s=7.0)),
        CallEnded(A),
        after(JoinCall(7.0)),
        (),
    ),
    "a lost call is repeated later": (
        CALLED,
        CallLost(A),
        after(JoinCall(2 * TIMING.retry_s, failures=1)),
        (),
    ),
    "each further one is repeated later still": (
        after(JoinCall(failures=1)),
        CallLost(A),
        after(JoinCall(4 * TIMING.retry_s, failures=2)),
        (),
    ),
    "the delay has a limit": (
        after(JoinCall(failures=MAX_FAILURES - 2)),
        CallLost(A),
        after(JoinCall(TIMING.max_retry_s, failures=MAX_FAILURES - 1)),
        (),
    ),
    "an address that is always lost is quiet": (
        after(JoinCall(failures=MAX_FAILURES - 1)),
        CallLost(A),
        quiet(),
        (),
    ),
    "a lost call ends its application": (
        after(WAITING),
        CallLost(A),
        after(JoinCall(2 * TIMING.retry_s, failures=1)),
        (),
    ),
    "a crashed call ends its application and is repeated at once": (
        after(replace(WAITING, delay_s=3.0, failures=2)),
        CallCrashed(A),
        after(JoinCall(failures=2)),
        (),
    ),
    # -------------------------------------------------------------------- refusals
    "a denial closes the cluster": (
        after(WAITING),
        CallEnded(A, "denied"),
        quiet(closed=frozenset({OTHER.cluster})),
        (),
    ),
    "a denial without an application closes none": (CALLED, CallEnded(A, "denied"), quiet(), ()),
    "another name is asked by digits soon": (
        after(WAITING),
        CallEnded(A, "wrong_name"),
        after(JoinCall(TIMING.retry_s), other_names=frozenset({OTHER.cluster})),
        (),
    ),
    "too many tries are repeated late": (
        after(WAITING),
        CallEnded(A, "too_many"),
        after(JoinCall(TIMING.too_many_s)),
        (),
    ),
    **{
        f"a refusal by {reason} is repeated soon": (
            after(WAITING),
            CallEnded(A, reason),
            after(JoinCall(TIMING.retry_s)),
            (),
        )
        for reason in ("wrong_code", "busy", "not_yet")
    },
    **{
        f"a refusal by {reason} is final for a while": (
            after(replace(WAITING, again_s=1.0)),
            CallEnded(A, reason),
            quiet(),
            (),
        )
        for reason in ("protocol", "duplicate", "malformed", "a reason of a later version")
    },
    # -------------------------------------------------------------------- settling
    "a node that settles withdraws": (
        CallState(calls={A: WAITING, B: JoinCall()}),
        Settled(),
        CallState(calls={B: JoinCall()}, withdrawn=(A,)),
        (CancelCalls(A),),
    ),
    "an open node that settles still asks": (
        after(WAITING, is_open=True),
        Settled(),
        after(WAITING, is_open=True),
        (),
    ),
    "a node that settles again has nothing to withdraw": (
        CallState(withdrawn=(A,)),
        Settled(),
        CallState(),
        (),
    ),
    "a node that stays alone asks again": (
        CallState(withdrawn=(A,)),
        Unsettled(),
        CALLED,
        (StartCalls(A),),
    ),
    # ---------------------------------------------------------------------- others
    **{
        f"{type(event).__name__} of a cancelled call changes nothing": (quiet(), event, quiet(), ())
        for event in (greeted(FRESH, OTHER), CallEnded(A, "denied"), CallLost(A), CallCrashed(A))
    },
}


@pytest.mark.parametrize(
    ("state", "event", "next_state", "actions"), ROWS.values(), ids=ROWS.keys()
)
def test_transition(
    state: CallState, event: CallEvent, next_state: CallState, actions: tuple[CallAction, ...]
) -> None:
    assert step(state, event, NOW, TIMING) == (next_state, actions)


ADDRESSES = st.sampled_from([f"10.0.0.{n}:1" for n in range(MAX_ADDRESSES + 20)])
OWN = st.sampled_from([FRESH, FRESH_OPEN, SETTLED, SETTLED_OPEN])
OTHERS = st.sampled_from([OTHER, OTHER_OPEN, OTHER_FRESH, LARGER_FRESH_OPEN, OLDER_OPEN])
REASONS = st.sampled_from(["", "denied", "wrong_name", "busy", "too_many", "malformed"])
EVENTS: st.SearchStrategy[CallEvent] = st.one_of(
    st.builds(Discovered, ADDRESSES),
    st.builds(Greeted, ADDRESSES, OWN, OTHERS, st.just(TIME)),
    st.builds(CallEnded, ADDRESSES, REASONS),
    st.builds(CallLost, ADDRESSES),
    st.builds(CallCrashed, ADDRESSES),
    st.sampled_from([Settled(), Unsettled()]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, max_size=120), st.booleans(), st.sampled_from([0, MAX_ADDRESSES]))
def test_any_events_leave_bounded_calls_with_one_task_each(
    events: list[CallEvent], is_open: bool, called: int
) -> None:
    state, tasks = CallState(is_open=is_open), set[str]()
    discoveries = [Discovered(f"10.0.0.{n}:1") for n in range(called)]
    for number, event in enumerate((*discoveries, *events)):
        state, actions = step(state, event, float(number), TIMING)
        for action in actions:
            match action:
                case StartCalls(address):
                    assert address not in tasks
                    tasks.add(address)
                case CancelCalls(address):
                    tasks.remove(address)
                case Apply(application):
                    assert application.approver.cluster not in state.closed
                    assert state.calls[application.address].application == application
                case DialMember() | ReportCluster():
                    pass
        if isinstance(event, (CallEnded, CallLost)) and event.address not in state.calls:
            tasks.discard(event.address)  # its task ends by itself
        assert tasks == state.calls.keys()
        assert max(len(state.calls), len(state.quiet)) <= MAX_ADDRESSES
        assert not state.calls.keys() & state.quiet.keys()
        clusters = [each.approver.cluster for each in state.applications()]
        assert len(clusters) == len(set(clusters))


def test_the_executor_repeats_calls_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        calls: list[str] = []

        async def call(asker: Asker, address: str) -> CallEnded:
            calls.append(address)
            return CallEnded(address, "busy")

        monkeypatch.setattr(Asker, "_call", call)
        async with joiner() as node:
            for _ in range(3):
                node.discover(A)
            await until(lambda: len(calls) == 3)
            asker = node.joining.asker
            tasks: dict[str, Any] = asker._tasks  # pyright: ignore[reportPrivateUsage]
            [task] = tasks.values()
        assert task.cancelled() and calls == [A] * 3

    run(scenario)
