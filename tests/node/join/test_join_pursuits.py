"""Which join ports are called: how many, how often, and when one is given up."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from exo_node.node.join import pursuits as join_pursuits
from exo_node.node.join.pursuits import MAX_ADDRESSES, MAX_FAILURES, Pursuits
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.tasks import Loops
from exo_node.node.machine.timing import LOCAL, JoinTiming
from exo_node.placement.errors import PeerLost, Untrusted


@dataclass
class Ports:
    """Join ports that answer as the test says: a wait, an error, or (unnamed) not at all."""

    answers: dict[str, float | Exception | None] = field(
        default_factory=dict[str, float | Exception | None]
    )
    calls: Counter[str] = field(default_factory=Counter[str])

    async def approach(self, address: str) -> float | None:
        self.calls[address] += 1
        if address not in self.answers:
            _ = await asyncio.Event().wait()
        answer = self.answers[address]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was waited between two calls; none of it takes any time."""
    asked: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        asked.append(seconds)
        await real(0)

    monkeypatch.setattr(join_pursuits.asyncio, "sleep", sleep)
    return asked


@asynccontextmanager
async def pursuing(
    timing: JoinTiming = LOCAL.join,
) -> AsyncGenerator[tuple[Ports, Pursuits]]:
    ports = Ports()
    pursuits = Pursuits(ports.approach, Loops(EventLog(), LOCAL.loops), timing)
    async with asyncio.timeout(60):
        yield ports, pursuits
        await pursuits.close()


async def turns(count: int = 10) -> None:
    """Lets every task go on so often."""
    loop = asyncio.get_running_loop()
    for _ in range(count):
        passed = loop.create_future()
        _ = loop.call_soon(passed.set_result, None)
        await passed


async def test_an_address_is_called_once_however_often_it_is_seen() -> None:
    async with pursuing() as (ports, pursuits):
        for _ in range(100):
            pursuits.see("a:1")
            await turns(1)
        assert (len(pursuits), ports.calls["a:1"]) == (1, 1)


async def test_where_there_is_nothing_to_ask_the_address_is_left_alone_for_a_while() -> None:
    for quiet_s, calls in ((LOCAL.join.quiet_s, 1), (0.0, 5)):
        async with pursuing(replace(LOCAL.join, quiet_s=quiet_s)) as (ports, pursuits):
            ports.answers["a:1"] = None
            for _ in range(5):
                pursuits.see("a:1")
                await turns()
            assert (len(pursuits), ports.calls["a:1"]) == (0, calls)


@pytest.mark.parametrize("fault", [PeerLost("gone"), Untrusted("no certificate")])
async def test_who_fails_is_called_ever_later_and_then_given_up(
    waits: list[float], fault: Exception
) -> None:
    async with pursuing() as (ports, pursuits):
        ports.answers["a:1"] = fault
        pursuits.see("a:1")
        await turns(20 * MAX_FAILURES)
        assert (len(pursuits), ports.calls["a:1"]) == (0, MAX_FAILURES)
        assert waits == sorted(waits) and len(waits) == MAX_FAILURES - 1
        assert waits[0] < LOCAL.join.max_retry_s == waits[-1]


async def test_an_answer_makes_up_for_earlier_failures(waits: list[float]) -> None:
    answers = iter([PeerLost("gone"), PeerLost("gone"), 3.0, PeerLost("gone"), None])

    async def approach(_: str) -> float | None:
        match next(answers):
            case PeerLost() as fault:
                raise fault
            case answer:
                return answer

    async with pursuing() as (_, _):
        pursuits = Pursuits(approach, Loops(EventLog(), LOCAL.loops), LOCAL.join)
        pursuits.see("a:1")
        await turns(50)
        assert len(pursuits) == 0
        assert len(waits) == 4 and waits[0] == waits[3] < waits[1] and waits[2] == 3.0


async def test_addresses_past_the_limit_are_not_called() -> None:
    async with pursuing() as (ports, pursuits):
        for number in range(MAX_ADDRESSES + 50):
            pursuits.see(f"a:{number}")
        await turns()
        assert len(pursuits) == len(ports.calls) == MAX_ADDRESSES


async def test_past_the_limit_the_one_that_fails_most_makes_room(waits: list[float]) -> None:
    async with pursuing() as (ports, pursuits):
        ports.answers["dead:1"] = PeerLost("gone")
        pursuits.see("dead:1")
        for number in range(MAX_ADDRESSES - 1):
            pursuits.see(f"a:{number}")
        while not waits:
            await turns(1)
        pursuits.see("new:1")
        await turns()
        called = ports.calls["dead:1"]
        await turns()
        assert ports.calls["new:1"] == 1 and ports.calls["dead:1"] == called
        assert len(pursuits) == MAX_ADDRESSES


async def test_a_dropped_address_may_be_seen_again() -> None:
    async with pursuing() as (ports, pursuits):
        pursuits.see("a:1")
        await turns()
        pursuits.drop("a:1")
        pursuits.drop("never:1")
        assert len(pursuits) == 0
        pursuits.see("a:1")
        await turns()
        assert (len(pursuits), ports.calls["a:1"]) == (1, 2)


async def test_after_an_unexpected_error_an_address_is_called_again() -> None:
    async with pursuing() as (ports, pursuits):
        ports.answers["a:1"] = RuntimeError("a defect")
        pursuits.see("a:1")
        await turns()
        assert ports.calls["a:1"] == 1
        ports.answers["a:1"] = None
        while len(pursuits):
            await asyncio.sleep(0.01)
        assert ports.calls["a:1"] == 2


async def test_nothing_is_called_after_the_end() -> None:
    async with pursuing() as (ports, pursuits):
        ports.answers["a:1"] = 0.0
        pursuits.see("a:1")
        await turns(50)
        await pursuits.close()
        called = ports.calls["a:1"]
        await turns(50)
        assert 1 < called == ports.calls["a:1"]
