"""A runner listens on all addresses of its node, and stages connect over any of them."""

import sys

import pytest
from engines import STORY
from runners import running

SECOND = "127.0.0.2"


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has one loopback address")
async def test_a_split_answers_over_its_runners_second_addresses() -> None:
    async with running((0, 8, 16), listen=[SECOND], measure_layers=True) as placement:
        for endpoint in placement.endpoints:
            ready = endpoint.ready
            first, second = ready.addresses
            assert (first.host, first.port) == (ready.host, ready.port)
            assert second.host == SECOND
            assert ready.layers.decode_s > 0
            ready.host, ready.port = second.host, second.port
        await placement.connect()
        answer = await placement.answer(STORY["prompt"], max_tokens=24)
        assert answer.ids == STORY["greedy_ids"][:24]
