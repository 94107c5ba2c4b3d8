"""Two heads that connect the same runners at once leave no ring of mixed epochs."""

import asyncio
from typing import Any, cast

import pytest

from exo_node.placement.errors import InvalidRequest
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.pipeline.ring import Address
from exo_node.shard.runner import stage_service
from exo_node.shard.runner.runner_service import EpochFence
from exo_node.shard.runner.stage_service import NextStage

EARLIER = pb.Epoch(term=3, number=2, head="a")
LATER = pb.Epoch(term=4, number=1, head="b")
RING = range(3)


class _Stream:
    """An outgoing stream that opens once `may_open` is set."""

    may_open = asyncio.Event()

    def __init__(self, address: Address, *_: object) -> None:
        self.address = address
        self.closed = False

    async def open(self) -> None:
        _ = await _Stream.may_open.wait()

    async def close(self) -> None:
        self.closed = True


class _Stage:
    """One runner of the ring, with the port that its last connection leads to."""

    def __init__(self, number: int) -> None:
        self.fence = EpochFence(number)
        self._following = NextStage(cast(Any, None), self.fence)
        self.port = 0

    async def connect(self, port: int, epoch: pb.Epoch) -> None:
        address = Address("127.0.0.1", port, "runner")
        stream = await self._following.connect(address, epoch, cast(Any, None), cast(Any, None))
        self.port = cast(_Stream, cast(object, stream)).address.port


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[_Stage]:
    monkeypatch.setattr(stage_service, "OutgoingStream", _Stream)
    monkeypatch.setattr(_Stream, "may_open", asyncio.Event())
    return [_Stage(number) for number in RING]


@pytest.mark.parametrize(
    ("epoch", "is_accepted"),
    [
        (pb.Epoch(term=2, number=9, head="z"), False),
        (pb.Epoch(term=3, number=1, head="z"), False),
        (EARLIER, False),
        (pb.Epoch(term=3, number=2, head="b"), True),
        (LATER, True),
    ],
)
def test_a_runner_enters_a_higher_epoch_only(epoch: pb.Epoch, is_accepted: bool) -> None:
    fence = EpochFence(0)
    fence.enter(EARLIER)
    if is_accepted:
        fence.enter(epoch)
    else:
        with pytest.raises(InvalidRequest):
            fence.enter(epoch)
    assert fence.epoch == (epoch if is_accepted else EARLIER)


async def test_a_runner_in_no_epoch_is_not_connected(stages: list[_Stage]) -> None:
    with pytest.raises(InvalidRequest, match="in no epoch"):
        await stages[0].connect(1, EARLIER)


async def test_a_connection_of_another_epoch_is_refused(stages: list[_Stage]) -> None:
    """The later head has taken two of three runners when the earlier one connects all."""
    _Stream.may_open.set()
    for stage in stages:
        stage.fence.enter(EARLIER)
    for stage in stages[:2]:
        stage.fence.enter(LATER)
        await stage.connect(20, LATER)
    calls = (stage.connect(10, EARLIER) for stage in stages)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(outcome, InvalidRequest) for outcome in outcomes] == [True, True, False]
    stages[2].fence.enter(LATER)
    await stages[2].connect(20, LATER)
    assert [stage.port for stage in stages] == [20, 20, 20]


async def test_a_stream_that_opens_after_a_later_epoch_is_closed(stages: list[_Stage]) -> None:
    stage = stages[0]
    stage.fence.enter(EARLIER)
    connecting = asyncio.ensure_future(stage.connect(10, EARLIER))
    await asyncio.sleep(0)
    stage.fence.enter(LATER)
    _Stream.may_open.set()
    await stage.connect(20, LATER)
    with pytest.raises(InvalidRequest, match="another epoch, of b"):
        await connecting
    assert stage.port == 20
