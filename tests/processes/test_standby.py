"""A spare in a process of its own: sent copies by its stage's runner, and put in its place."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from engines import ORACLE
from runners import KEY, NODE, Placement, WireAnswer, eventually, runner_host, shared
from small import LAYERS, expected, small_checkpoint

from exo_node.mtp.rebuild import REPORT_EVERY
from exo_node.node.machine.timing import LAN
from exo_node.node.placements.placements import Endpoint
from exo_node.node.runners.supervisor import RunnerProcess
from exo_node.node.trust.certificates import channel_credentials, runner_credentials
from exo_node.placement.errors import InvalidFrame
from exo_node.placement.ids import PlacementId
from exo_node.proto import peer_pb2 as pb
from exo_node.proto import peer_pb2_grpc

STORY: dict[str, Any] = next(row for row in ORACLE if row["prompt"] == "Tell me a story.")
TOKENS = 60
AFTERWARDS = 15
"""What an answer tells once its spare has taken over."""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def two(loop: asyncio.Runner) -> Iterator[Placement]:
    # A frame may have as many rows as a chunk: no fewer than are rebuilt at once, which a spare may
    # lack where copies are slow.
    fields = {"prefill_chunk": REPORT_EVERY, "lease_s": 100}
    with shared(loop, (0, 2, LAYERS), folder=small_checkpoint(), **fields) as placement:
        yield placement


@asynccontextmanager
async def a_spare(two: Placement) -> AsyncGenerator[tuple[RunnerProcess, Endpoint]]:
    """Another runner of stage 1, to which that stage's sends copies."""
    process = RunnerProcess(two.processes[1].spec, two.exited.append, LAN.runners)
    try:
        endpoint = Endpoint(NODE, await process.start(runner_host(), lambda _: None))
        assert await two.client.follow(two.endpoints[1], endpoint, two.name) == ""
        yield process, endpoint
    finally:
        await process.stop()


async def begun(
    two: Placement, request: pb.GenerateRequest, tokens: int
) -> tuple[WireAnswer, AsyncGenerator[Any, None]]:
    got, events = WireAnswer(), two.generate(request)
    while len(got.ids) < tokens:
        got.add(await anext(events))
    return got, events


async def shares(got: WireAnswer, events: AsyncGenerator[Any, None]) -> None:
    """Reads on until it shared a forward. On a slow machine the first answer is far when the last
    one begins."""
    while max(r.forward.batch for r in got.rounds) < 2:
        got.add(await anext(events))


def test_a_spare_takes_its_stages_place_with_what_it_was_sent(
    loop: asyncio.Runner, two: Placement, caplog: pytest.LogCaptureFixture
) -> None:
    """Of four answers, which share their forwards by two."""

    async def play() -> None:
        async with a_spare(two) as (spare, endpoint):
            fields: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}
            requests = [two.request(STORY["prompt_ids"], **fields) for _ in range(4)]
            streams = await asyncio.gather(*(begun(two, each, 45) for each in requests))
            _ = await asyncio.gather(*(shares(got, events) for got, events in streams))
            assert [max(r.forward.batch for r in got.rounds) for got, _ in streams] == [2] * 4
            _ = await eventually(lambda: spare.state.cache_bytes > 0, 180)
            assert spare.state.live_requests == 0, "a copy is no request that runs"
            for request, (_, events) in zip(requests, streams, strict=True):
                await two.client.park(two.endpoints[0], request.request, 1)
                await events.aclose()
            before, two.endpoints[1] = two.endpoints[1], endpoint
            await two.connect()
            for request, (got, _) in zip(requests, streams, strict=True):
                request.MergeFrom(pb.GenerateRequest(attempt=2, replay=got.rounds))
            rests = await asyncio.gather(*(begun(two, each, AFTERWARDS) for each in requests))
            told = [got.ids + rest.ids for (got, _), (rest, _) in zip(streams, rests, strict=True)]
            for _, events in rests:
                await events.aclose()
            # What a runner logs comes by another way than its answers.
            _ = await eventually(lambda: "goes on from a copy of" in caplog.text, 180)
            two.endpoints[1] = before
            await two.connect()
        longest = max(map(len, told))
        whole = await two.answer(STORY["prompt_ids"], max_tokens=longest, ignore_eos=True)
        assert told == [whole.ids[: len(ids)] for ids in told]

    with caplog.at_level("INFO", logger="exo_node.runner"):
        loop.run(play())


def test_a_spare_drops_what_ended(loop: asyncio.Runner, two: Placement) -> None:
    async def play() -> None:
        async with a_spare(two) as (spare, _):
            request = two.request(STORY["prompt_ids"], max_tokens=4000, ignore_eos=True)
            _, events = await begun(two, request, 30)
            _ = await eventually(lambda: spare.state.cache_bytes > 0, 180)
            await events.aclose()
            # Sooner than its lease of a hundred seconds.
            _ = await eventually(lambda: spare.state.cache_bytes == 0, 180)

    loop.run(play())


# --------------------------------------------------------------------------- what is refused


async def keep(two: Placement, data: bytes) -> None:
    """Sent to stage 1 by a client that is of the cluster but no runner."""
    address, name = two.address(1)
    async with grpc.aio.secure_channel(
        address,
        channel_credentials(runner_credentials(NODE, KEY)),
        [("grpc.ssl_target_name_override", name)],
    ) as channel:
        pieces = iter([pb.CopyPiece(data=data[:3]), pb.CopyPiece(data=data[3:])])
        _ = await peer_pb2_grpc.StandbyStub(channel).Keep(pieces, timeout=180)


def a_copy(two: Placement, **changes: Any) -> bytes:
    known = {"placement": two.name, "request": "r1", "attempt": 1, "begin": 0, "position": 4}
    fields: dict[str, Any] = known | changes
    return pb.StateCopy(**fields).SerializeToString()


BAD: dict[str, Callable[[Placement], bytes]] = {
    "copy": lambda _: b"no such message",
    "copy.placement": lambda two: a_copy(two, placement="p9"),
    "copy.request": lambda two: a_copy(two, request="a b"),
    "copy.begin": lambda two: a_copy(two, begin=2),
    "copy.layers": a_copy,
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_copy_is_refused_by_name_and_harms_nothing(
    loop: asyncio.Runner, two: Placement, field: str
) -> None:
    async def play() -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await keep(two, BAD[field](two))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        told = dict(caught.value.trailing_metadata() or ())
        assert (told["exo-code"], told["exo-param"]) == ("invalid_frame", field)
        answer = await two.answer(STORY["prompt_ids"], max_tokens=3)
        assert answer.ids == list(expected(STORY["prompt_ids"], 3, chunk=REPORT_EVERY).ids)

    loop.run(play())


def test_a_runner_follows_in_its_own_placement_only(loop: asyncio.Runner, two: Placement) -> None:
    async def play() -> None:
        with pytest.raises(InvalidFrame) as caught:
            _ = await two.client.follow(
                two.endpoints[1], two.endpoints[0], PlacementId("p-another")
            )
        assert caught.value.param == "placement"

    loop.run(play())


def test_a_spare_that_is_gone_costs_no_answer(loop: asyncio.Runner, two: Placement) -> None:
    async def play() -> None:
        request = two.request(STORY["prompt_ids"], max_tokens=TOKENS, ignore_eos=True)
        whole = await two.answer(STORY["prompt_ids"], max_tokens=TOKENS, ignore_eos=True)
        async with a_spare(two) as (spare, _):
            got, events = await begun(two, request, 20)
            await spare.stop(kill=True)
            async for event in events:
                got.add(event)
        assert got.ids == whole.ids

    loop.run(play())
