"""A node that stops: it refuses new work, and running requests end or fail with a reason."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import chain, count, repeat

from fakes import Script
from http_node import serving_fakes

from exo_node.node.api.http.drain import Drain
from exo_node.node.chat.requests import Event, Started, TextDelta
from exo_node.node.machine.timing import LOCAL


def until_cut_off(leaving: Drain) -> Script:
    """An answer under which the node's time is up."""

    async def script() -> AsyncGenerator[Event]:
        yield Started((1,))
        yield TextDelta("so far", (7,))
        leaving.cut_off()
        _ = await asyncio.Event().wait()

    return script


def test_a_stream_that_is_cut_off_ends_with_one_error_that_says_why() -> None:
    leaving = Drain(LOCAL)
    with serving_fakes(between=leaving.around) as node:
        node.chat.scripts["demo"] = until_cut_off(leaving)
        reply = node.chat_reply(stream=True)
        assert node.chat.closed.wait(60), "its runner is told"
    assert reply.status == 200
    texts = [line[6:] for line in reply.body.decode().splitlines() if line.startswith("data: ")]
    events = [json.loads(each) for each in texts if each != "[DONE]"]
    assert "so far" in str(events[:-1])
    [error] = [event["error"] for event in events if "error" in event]
    assert error["code"] == "peer_lost" and "this node stops" in error["message"]
    assert leaving.running == 0


def test_an_answer_in_one_piece_that_is_cut_off_is_a_503() -> None:
    leaving = Drain(LOCAL)
    with serving_fakes(between=leaving.around) as node:
        node.chat.scripts["demo"] = until_cut_off(leaving)
        reply = node.chat_reply()
        assert (reply.status, reply.error["code"]) == (503, "peer_lost")
        assert node.chat.closed.wait(60)


def test_new_work_is_refused_and_looking_is_not() -> None:
    leaving = Drain(replace(LOCAL, drain_s=0.2))
    with serving_fakes(between=leaving.around) as node:
        assert node.chat_reply().status == 200
        leaving.begin()
        reply = node.chat_reply()
        assert (reply.status, reply.error["code"]) == (503, "peer_lost")
        assert node.ask("GET", "/v1/models").status == 200
        assert asyncio.run(leaving.drained(lambda: 0, lambda: 0))
        assert not asyncio.run(leaving.drained(lambda: 1, lambda: 0))


async def test_what_continues_is_waited_for_and_what_does_not_is_not() -> None:
    leaving = Drain(replace(LOCAL, drain_s=0.3, tick_s=0.05))
    looks = count()

    def a_step_each_look(until: int) -> bool:
        return next(looks) < until

    # Three times as long as what is still has, and then for good.
    assert await leaving.drained(lambda: a_step_each_look(18), lambda: next(looks))
    steps = chain(range(12), repeat(12))
    start = asyncio.get_running_loop().time()
    assert not await leaving.drained(lambda: 1, lambda: next(steps))
    assert asyncio.get_running_loop().time() - start >= 11 * 0.05 + 0.3
