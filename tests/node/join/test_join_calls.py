"""The calls of a joining node: the table of its state machine, random events, its tasks."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joiners import Joiner, joiner, party, run, until

from exo_node.node.join.asker import Asker
from exo_node.node.join.calls import (
    MAX_ADDRESSES,
    MAX_FAILURES,
    Apply,
    CallAction,
    CallEnded,
    CallEvent,
    CallLost,
    CallState,
    DialMember,
    Discovered,
    Greeted,
    JoinApplication,
    JoinCall,
    ReportCluster,
    Settled,
    Unsettled,
    step,
)
from exo_node.node.join.handshake import PeerIdentity
from exo_node.node.machine.timing import LOCAL

TIMING = LOCAL
NOW, TIME = 100.0, 5.0
QUIET_UNTIL = NOW + TIMING.forget_after_s
A, B = "10.0.0.1:1", "10.0.0.2:1"

FRESH, FRESH_OPEN = party("b"), party("b", open=True)
SETTLED, SETTLED_OPEN = party("b", fresh=False), party("b", fresh=False, open=True)
OTHER = party("a", fresh=False)
OTHER_OPEN = party("a", fresh=False, open=True)
OTHER_FRESH = party("a")
LARGER_FRESH_OPEN = party("c", open=True)
OLDER_OPEN = replace(OTHER_OPEN, cluster="0" * 16)
"""A node of a cluster with the smaller fingerprint, so this node's cluster dissolves."""
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
    """The largest number of calls, including this one."""
    return CallState(calls={**dict(list(FULL.calls.items())[1:]), address: call})


def waiting_at(approver: PeerIdentity) -> JoinCall:
    return JoinCall(application=JoinApplication(approver, A, TIME))


Row = tuple[CallState, CallEvent, CallState, CallAction | None]
ROWS: dict[str, Row] = {
    # ------------------------------------------------------------------ discovery
    "a new address is called": (CallState(), Discovered(A), CALLED, None),
    "a called address is not called twice": (CALLED, Discovered(A), CALLED, None),
    "a quiet address is not called": (quiet(), Discovered(A), quiet(), None),
    "a quiet address is called after its time": (
        CallState(quiet={A: NOW}),
        Discovered(A),
        CALLED,
        None,
    ),
    "an address beyond the limit is not called": (FULL, Discovered(A), FULL, None),
    "the address with the most failures makes room": (
        full_but(B, JoinCall(failures=1)),
        Discovered(A),
        full_but(A, JoinCall()),
        None,
    ),
    "an address with an application makes no room": (
        full_but(A, replace(WAITING, failures=1)),
        Discovered(B),
        full_but(A, replace(WAITING, failures=1)),
        None,
    ),
    # ------------------------------------------------------------------- greetings
    "a member of the own cluster is dialled": (
        CALLED,
        greeted(FRESH, replace(OTHER, cluster=FRESH.cluster)),
        CALLED,
        DialMember(OTHER.address),
    ),
    "a fresh node asks an established one by digits": (
        CALLED,
        greeted(FRESH, OTHER),
        after(WAITING),
        Apply(APPLICATION, by_name=False),
    ),
    "a fresh node asks a fresh one by digits": (
        CALLED,
        greeted(FRESH, OTHER_FRESH),
        after(waiting_at(OTHER_FRESH)),
        Apply(JoinApplication(OTHER_FRESH, A, TIME), by_name=False),
    ),
    "an open node asks an open one by name": (
        CALLED,
        greeted(FRESH_OPEN, OTHER_OPEN),
        after(waiting_at(OTHER_OPEN)),
        Apply(JoinApplication(OTHER_OPEN, A, TIME), by_name=True),
    ),
    "an open node asks a cluster of another name by digits": (
        after(JoinCall(), other_names=frozenset({OTHER.cluster})),
        greeted(FRESH_OPEN, OTHER_OPEN),
        after(waiting_at(OTHER_OPEN), other_names=frozenset({OTHER.cluster})),
        Apply(JoinApplication(OTHER_OPEN, A, TIME), by_name=False),
    ),
    "an established open node asks the older open cluster by name": (
        CALLED,
        greeted(SETTLED_OPEN, OLDER_OPEN),
        after(waiting_at(OLDER_OPEN)),
        Apply(JoinApplication(OLDER_OPEN, A, TIME), by_name=True),
    ),
    "an established node never asks by digits": (
        after(JoinCall(), other_names=frozenset({OLDER_OPEN.cluster})),
        greeted(SETTLED_OPEN, OLDER_OPEN),
        after(JoinCall(), other_names=frozenset({OLDER_OPEN.cluster})),
        None,
    ),
    "a closed cluster is not asked": (
        after(JoinCall(), closed=frozenset({OTHER.cluster})),
        greeted(FRESH, OTHER),
        after(JoinCall(), closed=frozenset({OTHER.cluster})),
        None,
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
        None,
    ),
    "the side that is asked looks again while it is fresh": (
        CALLED,
        greeted(FRESH_OPEN, LARGER_FRESH_OPEN),
        after(JoinCall(again_s=TIMING.look_again_s)),
        None,
    ),
    "an established node that is asked has no more to do": (
        CALLED,
        greeted(SETTLED, OTHER_FRESH),
        CALLED,
        ReportCluster(OTHER_FRESH, A),
    ),
    "two established clusters are reported": (
        CALLED,
        greeted(SETTLED, OTHER),
        CALLED,
        ReportCluster(OTHER, A),
    ),
    # ------------------------------------------------------------------------ ends
    "an address with no more to ask is quiet": (CALLED, CallEnded(A), quiet(), None),
    "an address is called again after the delay of its greeting": (
        after(JoinCall(failures=3, again_s=7.0)),
        CallEnded(A),
        after(JoinCall(7.0)),
        None,
    ),
    "a lost call is repeated later": (
        CALLED,
        CallLost(A),
        after(JoinCall(2 * TIMING.retry_s, failures=1)),
        None,
    ),
    "each further one is repeated later still": (
        after(JoinCall(failures=1)),
        CallLost(A),
        after(JoinCall(4 * TIMING.retry_s, failures=2)),
        None,
    ),
    "the delay has a limit": (
        after(JoinCall(failures=MAX_FAILURES - 2)),
        CallLost(A),
        after(JoinCall(TIMING.max_retry_s, failures=MAX_FAILURES - 1)),
        None,
    ),
    "an address that is always lost is quiet": (
        after(JoinCall(failures=MAX_FAILURES - 1)),
        CallLost(A),
        quiet(),
        None,
    ),
    "a lost call ends its application": (
        after(WAITING),
        CallLost(A),
        after(JoinCall(2 * TIMING.retry_s, failures=1)),
        None,
    ),
    # -------------------------------------------------------------------- refusals
    "a denial closes the cluster": (
        after(WAITING),
        CallEnded(A, "denied"),
        quiet(closed=frozenset({OTHER.cluster})),
        None,
    ),
    "a denial without an application closes none": (CALLED, CallEnded(A, "denied"), quiet(), None),
    "another name is asked by digits soon": (
        after(WAITING),
        CallEnded(A, "wrong_name"),
        after(JoinCall(TIMING.retry_s), other_names=frozenset({OTHER.cluster})),
        None,
    ),
    "too many tries are repeated late": (
        after(WAITING),
        CallEnded(A, "too_many"),
        after(JoinCall(TIMING.max_retry_s)),
        None,
    ),
    **{
        f"a refusal by {reason} is repeated soon": (
            after(WAITING),
            CallEnded(A, reason),
            after(JoinCall(TIMING.retry_s)),
            None,
        )
        for reason in ("wrong_code", "busy", "not_yet")
    },
    **{
        f"a refusal by {reason} is final for a while": (
            after(replace(WAITING, again_s=1.0)),
            CallEnded(A, reason),
            quiet(),
            None,
        )
        for reason in ("protocol", "duplicate", "malformed", "a reason of a later version")
    },
    # -------------------------------------------------------------------- settling
    "a node that settles withdraws": (
        CallState(calls={A: WAITING, B: JoinCall()}),
        Settled(),
        CallState(calls={B: JoinCall()}, withdrawn=(A,)),
        None,
    ),
    "an open node that settles still asks": (
        after(WAITING, is_open=True),
        Settled(),
        after(WAITING, is_open=True),
        None,
    ),
    "a node that settles again has nothing to withdraw": (
        CallState(withdrawn=(A,)),
        Settled(),
        CallState(),
        None,
    ),
    "a node that stays alone asks again": (
        CallState(withdrawn=(A,)),
        Unsettled(),
        CALLED,
        None,
    ),
    # ---------------------------------------------------------------------- others
    **{
        f"{type(event).__name__} of a cancelled call changes nothing": (
            quiet(),
            event,
            quiet(),
            None,
        )
        for event in (greeted(FRESH, OTHER), CallEnded(A, "denied"), CallLost(A))
    },
}


@pytest.mark.parametrize(("state", "event", "next_state", "action"), ROWS.values(), ids=ROWS)
def test_transition(
    state: CallState, event: CallEvent, next_state: CallState, action: CallAction | None
) -> None:
    assert step(state, event, NOW, TIMING) == (next_state, action)


ADDRESSES = st.sampled_from([f"10.0.0.{n}:1" for n in range(MAX_ADDRESSES + 20)])
OWN = st.sampled_from([FRESH, FRESH_OPEN, SETTLED, SETTLED_OPEN])
OTHERS = st.sampled_from([OTHER, OTHER_OPEN, OTHER_FRESH, LARGER_FRESH_OPEN, OLDER_OPEN])
REASONS = st.sampled_from(["", "denied", "wrong_name", "busy", "too_many", "malformed"])
EVENTS: st.SearchStrategy[CallEvent] = st.one_of(
    st.builds(Discovered, ADDRESSES),
    st.builds(Greeted, ADDRESSES, OWN, OTHERS, st.just(TIME)),
    st.builds(CallEnded, ADDRESSES, REASONS),
    st.builds(CallLost, ADDRESSES),
    st.sampled_from([Settled(), Unsettled()]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, max_size=120), st.booleans(), st.sampled_from([0, MAX_ADDRESSES]))
def test_any_events_leave_bounded_calls_and_one_application_for_each_cluster(
    events: list[CallEvent], is_open: bool, called: int
) -> None:
    state = CallState(is_open=is_open)
    discoveries = [Discovered(f"10.0.0.{n}:1") for n in range(called)]
    for number, event in enumerate((*discoveries, *events)):
        state, action = step(state, event, float(number), TIMING)
        if isinstance(action, Apply):
            assert action.application.approver.cluster not in state.closed
            assert action.application in state.applications()
        assert max(len(state.calls), len(state.quiet)) <= MAX_ADDRESSES
        assert not state.calls.keys() & state.quiet.keys()
        clusters = [each.approver.cluster for each in state.applications()]
        assert len(clusters) == len(set(clusters))


def test_one_task_repeats_the_calls_of_an_address_until_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
            tasks = tasks_of(node)
            [task] = tasks.values()
        assert task.cancelled() and calls == [A] * 3

    run(scenario)


def test_a_node_that_settles_cancels_its_call_and_calls_again_where_it_stays_alone() -> None:
    async def scenario() -> None:
        async with joiner("old", fresh=False) as old, joiner("new") as new:
            new.discover(old)
            await until(lambda: old.has_waiting(new))
            [task] = tasks_of(new).values()
            new.joining.asker.settle()
            assert not tasks_of(new) and new.joining.asker.code is None
            await until(lambda: task.cancelled() and not old.waiting())
            new.joining.asker.unsettle()
            await until(lambda: old.has_waiting(new) and new.joining.asker.code)

    run(scenario)


def test_an_address_that_is_quiet_has_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async def call(asker: Asker, address: str) -> CallEnded:
            return CallEnded(address)

        monkeypatch.setattr(Asker, "_call", call)
        async with joiner() as node:
            node.discover(A)
            [task] = tasks_of(node).values()
            await until(task.done)
            assert not tasks_of(node) and not node.loops.trouble()

    run(scenario)


def tasks_of(node: Joiner) -> "dict[str, asyncio.Task[None]]":
    return node.joining.asker._tasks  # pyright: ignore[reportPrivateUsage]
