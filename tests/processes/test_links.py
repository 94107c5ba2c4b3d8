"""Two stages in two processes: frames that are refused, and lost peers.

On the small model: what is shown here holds whatever the weights are. The demo's oracle is asked
over stages in `test_runner_addresses.py` and over nodes in `test_cluster.py`.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from engines import STORY, SUM, Answer
from runners import KEY, NODE, Placement, WireAnswer, eventually, running
from small import LAYERS, expected, small_checkpoint

from exo_node.node.trust.certificates import channel_credentials, runner_credentials
from exo_node.node.trust.keys import ClusterKey
from exo_node.placement.errors import PeerLost
from exo_node.proto import peer_pb2 as pb
from exo_node.proto import peer_pb2_grpc
from exo_node.shard.pipeline.frames import BlockMember, HiddenBlock, cut
from exo_node.shard.pipeline.ring import Address, OutgoingStream

BOUNDS, HIDDEN, CHUNK = (0, 2, LAYERS), 64, 8
TOKENS = 24
LEASE_S = 3
WITHIN_S = 180.0
"""Long, so that a loaded machine fails no test."""


@pytest.fixture(scope="module")
async def two() -> AsyncIterator[Placement]:
    fields = {"prefill_chunk": CHUNK, "lease_s": LEASE_S, "prefix_cache_bytes": 256 << 20}
    async with running(BOUNDS, small_checkpoint(), **fields) as placement:
        yield placement


def answer_of_one_process(row: dict[str, Any]) -> Answer:
    """The answer of one process with the whole model."""
    return expected(row["prompt_ids"], TOKENS, chunk=CHUNK)


async def answer_of_stages(two: Placement, row: dict[str, Any], **changes: Any) -> WireAnswer:
    return await two.answer(row["prompt"], max_tokens=TOKENS, **changes)


async def started_events(
    two: Placement, tokens: int = 3, **changes: Any
) -> AsyncGenerator[Any, None]:
    """The events of a long answer, after its first `tokens` deltas."""
    request = two.request(STORY["prompt_ids"], max_tokens=4000, ignore_eos=True, **changes)
    events = two.generate(request)
    while tokens:
        event = await anext(events)
        tokens -= event.WhichOneof("event") == "delta"
    return events


async def all_freed(two: Placement) -> float:
    """The seconds until no stage holds a request's state."""
    started_at = time.monotonic()
    while (state := await two.inspect()).live_requests or state.cache_bytes:
        assert time.monotonic() - started_at < WITHIN_S, "the generator still holds state"
        await asyncio.sleep(0.01)
    _ = await eventually(lambda: two.live_requests(1) == 0, WITHIN_S)
    return time.monotonic() - started_at


async def good(two: Placement) -> bool:
    """Whether a request is answered as one process answers it."""
    return (await answer_of_stages(two, SUM)).ids == list(answer_of_one_process(SUM).ids)


# ------------------------------------------------------------- frames refused


@asynccontextmanager
async def raw_stream(two: Placement) -> AsyncGenerator[Any]:
    """A stream to stage 1 by a client that is of the cluster but not the generator."""
    async with grpc.aio.secure_channel(
        two.address(1)[0],
        channel_credentials(runner_credentials(NODE, KEY)),
        [("grpc.ssl_target_name_override", two.address(1)[1])],
    ) as channel:
        yield peer_pb2_grpc.StageStub(channel).Stream()


def a_frame(request: str) -> pb.Frame:
    """The first two rows of one request."""
    return frame_of(2, BlockMember(request, 1, 0))


def frame_of(rows: int, *members: BlockMember) -> pb.Frame:
    count = rows * len(members)
    block = HiddenBlock(members, rows, (1,) * count, pb.REPLY_ALL, bytes(count * HIDDEN * 4))
    [frame] = cut(block, "p1", 1, "float32", HIDDEN)
    return frame


async def test_state_of_a_closed_stream_is_freed_by_its_lease(two: Placement) -> None:
    async with raw_stream(two) as stream:
        await stream.write(a_frame("raw-3"))
        _ = await eventually(lambda: two.live_requests(1) == 1, WITHIN_S)
    _ = await eventually(lambda: two.live_requests(1) == 0, LEASE_S + WITHIN_S)


@pytest.mark.parametrize("place", ["a port nobody listens on", "a runner of another node"])
async def test_a_neighbour_that_is_not_there_is_peer_lost_and_no_longer_dialled(
    two: Placement, place: str
) -> None:
    port = 1 if place.startswith("a port") else two.endpoints[1].ready.port
    stream = OutgoingStream(
        Address("127.0.0.1", port, "another.runner.exo.internal"),
        channel_credentials(runner_credentials(NODE, KEY)),
        lambda _: None,
        lambda _: None,
    )
    with pytest.raises(PeerLost, match=f"127.0.0.1:{port} does not answer"):
        await stream.open(timeout_s=0.3)
    channel = stream._channel  # pyright: ignore[reportPrivateUsage]
    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


# ---------------------------------------------------------------------- trust


@pytest.mark.parametrize("stranger", ["another key", "no certificate", "no encryption"])
@pytest.mark.parametrize("stage", [0, 1])
async def test_a_caller_from_outside_of_the_cluster_is_refused(
    two: Placement, stranger: str, stage: int
) -> None:
    async with strangers_channel(two, stage, stranger) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if stage:
                _ = await peer_pb2_grpc.StageStub(channel).Connect(
                    pb.ConnectRequest(), timeout=WITHIN_S
                )
            else:
                _ = await peer_pb2_grpc.GeneratorStub(channel).Encode(
                    pb.EncodeRequest(), timeout=WITHIN_S
                )
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await good(two)


def strangers_channel(two: Placement, stage: int, kind: str) -> grpc.aio.Channel:
    address, name = two.address(stage)
    if kind == "no encryption":
        return grpc.aio.insecure_channel(address)
    own, other = runner_credentials(NODE, KEY), ClusterKey(b"another-cluster-key-")
    credentials = (
        grpc.ssl_channel_credentials(own.authority_pem)
        if kind == "no certificate"
        # It trusts this cluster, so that the runner is who refuses.
        else grpc.ssl_channel_credentials(
            own.authority_pem,
            runner_credentials(NODE, other).key_pem,
            runner_credentials(NODE, other).certificate_pem,
        )
    )
    return grpc.aio.secure_channel(address, credentials, [("grpc.ssl_target_name_override", name)])


# ----------------------------------------------------------------- lost peers


async def test_a_client_that_goes_away_frees_every_stage_before_a_lease_does(
    two: Placement,
) -> None:
    for _ in range(10):  # a busy machine may be slower than a lease
        events = await started_events(two)
        await two.holds_state()
        _ = await eventually(lambda: two.live_requests(1) == 1, WITHIN_S)
        await events.aclose()
        if await all_freed(two) < LEASE_S:
            return
    raise AssertionError("the lease freed them each time")


async def until_lost(events: AsyncGenerator[Any, None]) -> None:
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(PeerLost, match="next stage"):
            async for _ in events:
                pass


async def freed(placement: Placement) -> None:
    """The generator holds nothing of a lost answer."""
    async with asyncio.timeout(WITHIN_S):
        while (await placement.inspect()).cache_bytes:
            await asyncio.sleep(0.05)


async def test_a_killed_stage_ends_the_answer_and_not_the_generator(two: Placement) -> None:
    generator = two.processes[0].pid
    events = await started_events(two)
    os.kill(two.processes[1].pid, signal.SIGKILL)
    await until_lost(events)
    with pytest.raises(PeerLost):
        _ = await answer_of_stages(two, SUM)
    await freed(two)
    _ = await eventually(lambda: len(two.exited) == 1, WITHIN_S)
    assert "ended by signal 9" in two.exited[0].error
    await two.restart(1)
    assert await good(two)
    assert two.processes[0].pid == generator
    assert two.processes[0].status == "ready"


async def test_a_stopped_stage_is_lost_in_time_and_its_state_freed_when_it_resumes(
    two: Placement,
) -> None:
    events = await started_events(two)
    stopped = two.processes[1].pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        await until_lost(events)
        await freed(two)
    finally:
        os.kill(stopped, signal.SIGCONT)
    _ = await eventually(lambda: two.live_requests(1) == 0, LEASE_S + WITHIN_S)
    await two.connect()
    try:
        assert await good(two)
    except PeerLost:
        # It woke to connections whose pings were not answered, and may give them up only now.
        # An answer goes on by its next attempt then.
        await two.connect()
        assert await good(two)


async def test_a_loss_after_the_neighbour_reaches_the_generator() -> None:
    fields = {"prefill_chunk": CHUNK, "lease_s": LEASE_S}
    async with running((0, 1, 3, LAYERS), small_checkpoint(), **fields) as three:
        assert await good(three)
        events = await started_events(three)
        os.kill(three.processes[2].pid, signal.SIGKILL)
        await until_lost(events)
        await three.restart(2)
        assert await good(three)
        # The release could not pass the middle stage any more, so its lease frees the state.
        _ = await eventually(lambda: three.live_requests(1) == 0, LEASE_S + WITHIN_S)
