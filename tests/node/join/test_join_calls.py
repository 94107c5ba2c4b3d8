"""The calls of a joining node: the table of its state machine, random events, its tasks."""

import asyncio
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joiners import Impostor, Joiner, asking, joiner, party, until

from exo_node.node.join.asker import Asker
from exo_node.node.join.calls import (
    MAX_ADDRESSES,
    MAX_FAILURES,
    CallAction,
    CallState,
    JoinApplication,
    JoinCall,
)
from exo_node.node.join.handshake import PeerIdentity, transcript
from exo_node.node.join.state import prove_digits
from exo_node.node.machine.timing import LOCAL
from exo_node.placement.errors import PeerLost
from exo_node.proto import peer_pb2 as pb

TIMING = LOCAL
NOW, TIME = 100.0, 5.0
QUIET_UNTIL = NOW + TIMING.forget_after_s
A, B = "10.0.0.1:1", "10.0.0.2:1"

FRESH, SETTLED = party("b"), party("b", fresh=False)
OTHER, OTHER_FRESH = party("a", fresh=False), party("a")
APPLICATION = JoinApplication(OTHER, A, TIME)
FRESH_APPLICATION = JoinApplication(OTHER_FRESH, A, TIME)
WAITING = JoinCall(application=APPLICATION)

Step = Callable[[CallState], CallAction]


def calls(**fields: Any) -> CallState:
    return CallState(TIMING, **fields)


CALLED = calls(calls={A: JoinCall()})
FULL = {f"10.0.1.{n}:1": JoinCall() for n in range(MAX_ADDRESSES)}


def after(call: JoinCall, **fields: Any) -> CallState:
    return calls(calls={A: call}, **fields)


def quiet(**fields: Any) -> CallState:
    return calls(quiet={A: QUIET_UNTIL}, **fields)


def full_but(address: str, call: JoinCall) -> CallState:
    """The largest number of calls, including this one."""
    return calls(calls={**dict(list(FULL.items())[1:]), address: call})


def discover(address: str, now: float = NOW) -> Step:
    return lambda state: state.discover(address, now)


def greet(own: PeerIdentity, other: PeerIdentity, address: str = A) -> Step:
    return lambda state: state.greet(address, own, other, TIME)


def end(refusal: str | None = "", address: str = A) -> Step:
    return lambda state: state.end(address, refusal, NOW)


SETTLE: Step = CallState.settle
LOST = end(None)

Row = tuple[CallState, Step, CallState, CallAction]
ROWS: dict[str, Row] = {
    # discovery
    "a new address is called": (calls(), discover(A), CALLED, None),
    "a called address is not called twice": (CALLED, discover(A), CALLED, None),
    "a quiet address is called after the rest of its time":
        (quiet(), discover(A), after(JoinCall(TIMING.forget_after_s)), None),
    "a quiet address is called after its time": (calls(quiet={A: NOW}), discover(A), CALLED, None),
    "an address beyond the limit is not called":
        (calls(calls=FULL), discover(A), calls(calls=FULL), None),
    "the address with the most failures makes room":
        (full_but(B, JoinCall(failures=1)), discover(A), full_but(A, JoinCall()), None),
    "an address with an application makes no room":
        (full_but(A, replace(WAITING, failures=1)), discover(B),
         full_but(A, replace(WAITING, failures=1)), None),
    # greetings
    "a member of the own cluster is dialled":
        (CALLED, greet(FRESH, replace(OTHER, cluster=FRESH.cluster)), CALLED, "dial"),
    "a fresh node asks an established one by digits":
        (CALLED, greet(FRESH, OTHER), after(WAITING), APPLICATION),
    "a fresh node asks a fresh one by digits":
        (CALLED, greet(FRESH, OTHER_FRESH),
         after(JoinCall(application=FRESH_APPLICATION)), FRESH_APPLICATION),
    "a closed cluster is not asked":
        (after(JoinCall(), closed=frozenset({OTHER.cluster})), greet(FRESH, OTHER),
         after(JoinCall(again_s=TIMING.look_again_s), closed=frozenset({OTHER.cluster}),
               closed_names={OTHER.cluster: OTHER.name}), None),
    "a closed cluster is asked where a person says so":
        (after(JoinCall(), closed=frozenset({OTHER.cluster}), closed_names={OTHER.cluster: "x"}),
         CallState.ask_again, CALLED, None),
    "a node of a closed cluster that is in another one is asked":
        (after(JoinCall(), closed=frozenset({"0" * 16})), greet(FRESH, OTHER),
         after(WAITING, closed=frozenset({"0" * 16})), APPLICATION),
    "a cluster is asked at one address at a time":
        (calls(calls={A: JoinCall(), B: WAITING}), greet(FRESH, OTHER),
         calls(calls={A: JoinCall(again_s=TIMING.look_again_s), B: WAITING}), None),
    "an established node that is asked has no more to do":
        (CALLED, greet(SETTLED, OTHER_FRESH), CALLED, "report"),
    "two established clusters are reported": (CALLED, greet(SETTLED, OTHER), CALLED, "report"),
    # ends
    "an address with no more to ask is quiet": (CALLED, end(), quiet(), None),
    "an address is called again after the delay of its greeting":
        (after(JoinCall(failures=3, again_s=7.0)), end(), after(JoinCall(7.0)), None),
    "a lost call is repeated later":
        (CALLED, LOST, after(JoinCall(2 * TIMING.retry_s, failures=1)), None),
    "each further one is repeated later still":
        (after(JoinCall(failures=1)), LOST, after(JoinCall(4 * TIMING.retry_s, failures=2)), None),
    "the delay has a limit":
        (after(JoinCall(failures=MAX_FAILURES - 2)), LOST,
         after(JoinCall(TIMING.max_retry_s, failures=MAX_FAILURES - 1)), None),
    "an address that is always lost is quiet":
        (after(JoinCall(failures=MAX_FAILURES - 1)), LOST, quiet(), None),
    "a lost call ends its application":
        (after(WAITING), LOST, after(JoinCall(2 * TIMING.retry_s, failures=1)), None),
    # refusals
    "a denial closes the cluster":
        (after(WAITING), end("denied"),
         after(JoinCall(TIMING.look_again_s), closed=frozenset({OTHER.cluster})), None),
    "a denial without an application closes none": (CALLED, end("denied"), quiet(), None),
    "too many tries are repeated late":
        (after(WAITING), end("too_many"), after(JoinCall(TIMING.max_retry_s)), None),
    **{
        f"a refusal by {reason} is repeated soon":
            (after(WAITING), end(reason), after(JoinCall(TIMING.retry_s)), None)
        for reason in ("wrong_code", "busy")
    },
    **{
        f"a refusal by {reason} is final for a while":
            (after(replace(WAITING, again_s=1.0)), end(reason), quiet(), None)
        for reason in ("protocol", "duplicate", "malformed", "a reason of a later version")
    },
    # settling
    "a node that settles withdraws":
        (calls(calls={A: WAITING, B: JoinCall()}), SETTLE, calls(calls={B: JoinCall()}), None),
    # others
    **{
        f"the {name} of a cancelled call changes nothing": (quiet(), step, quiet(), None)
        for name, step in
        (("greeting", greet(FRESH, OTHER)), ("denial", end("denied")), ("loss", LOST))
    },
}  # fmt: skip


@pytest.mark.parametrize(("before", "step", "expected", "action"), ROWS.values(), ids=ROWS)
def test_transition(before: CallState, step: Step, expected: CallState, action: CallAction) -> None:
    state = deepcopy(before)
    assert (step(state), state) == (action, expected)


ADDRESSES = st.sampled_from([f"10.0.0.{n}:1" for n in range(MAX_ADDRESSES + 20)])
OWN = st.sampled_from([FRESH, SETTLED])
OTHERS = st.sampled_from([OTHER, OTHER_FRESH, replace(OTHER, cluster="0" * 16)])
REASONS = st.sampled_from([None, "", "denied", "busy", "too_many", "malformed"])
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(greet, OWN, OTHERS, ADDRESSES), st.builds(end, REASONS, ADDRESSES), st.just(SETTLE)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS | ADDRESSES, max_size=120), st.sampled_from([0, MAX_ADDRESSES]))
def test_any_steps_leave_bounded_calls_and_one_application_for_each_cluster(
    steps: list[Step | str], called: int
) -> None:
    state = calls()
    discoveries = [f"10.0.0.{n}:1" for n in range(called)]
    for number, each in enumerate((*discoveries, *steps)):
        step = discover(each, NOW + number) if isinstance(each, str) else each
        action = step(state)
        if isinstance(action, JoinApplication):
            assert action.approver.cluster not in state.closed
            assert action in state.applications()
        assert max(len(state.calls), len(state.quiet)) <= MAX_ADDRESSES
        assert not state.calls.keys() & state.quiet.keys()
        clusters = [each.approver.cluster for each in state.applications()]
        assert len(clusters) == len(set(clusters))


async def test_one_task_repeats_the_calls_of_an_address_until_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses: list[str] = []

    async def call(asker: Asker, address: str) -> str:
        addresses.append(address)
        return "busy"

    monkeypatch.setattr(Asker, "_call", call)
    async with joiner() as node:
        for _ in range(3):
            node.discover(A)
        await until(lambda: len(addresses) == 3)
        tasks = tasks_of(node)
        [task] = tasks.values()
    assert task.cancelled() and addresses == [A] * 3


async def test_a_node_that_settles_cancels_its_call() -> None:
    async with asking() as (old, new):
        [task] = tasks_of(new).values()
        new.joining.asker.settle()
        assert not tasks_of(new) and new.joining.asker.code is None
        await until(lambda: task.cancelled() and not old.waiting())


async def test_a_node_whose_approved_node_goes_away_still_asks_the_same_cluster() -> None:
    """Nothing was withdrawn, so there is nothing to resume: the request keeps its id."""
    async with asking() as (old, new):
        waiting, code = old.request_of(new), new.code
        async with Impostor(fresh=True).calling(new.address) as (line, own, other):
            await line.send(pb.JoinFrame(ask=pb.JoinAsk()))
            await until(new.waiting)
            request = new.waiting()[0]
            typing = asyncio.create_task(new.joining.approver.let_in(request.id, "123456"))
            _ = await line.receive("begin", person=True)
            await prove_digits(line, "joiner", transcript(own, other), "123456")
            _ = await line.receive("approved")
        with pytest.raises(PeerLost, match="went away before it had the key"):
            _ = await typing
        assert new.joining.state.fresh
        assert old.waiting() == [waiting] and new.code == code


async def test_an_address_that_is_quiet_has_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(asker: Asker, address: str) -> str:
        return ""

    monkeypatch.setattr(Asker, "_call", call)
    async with joiner() as node:
        node.discover(A)
        [task] = tasks_of(node).values()
        await until(task.done)
        assert not tasks_of(node) and not node.loops.trouble()


def tasks_of(node: Joiner) -> "dict[str, asyncio.Task[None]]":
    return node.joining.asker._tasks  # pyright: ignore[reportPrivateUsage]
