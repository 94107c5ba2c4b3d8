"""A stage behind the generator: frames that are read from one stream, and the slots they take."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from exo_node.proto import peer_pb2 as pb
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.pipeline.frames import HiddenBlock, cut
from exo_node.shard.runner.stage_service import CHUNKS_AHEAD
from exo_node.shard.runner.worker_service import WorkerService

HIDDEN = 4
STAGES = 2
LIMITS = StageLimits("p1", 1, "float32", HIDDEN, 8, 64, 512)


class Worker:
    """Writes down what it computes."""

    def __init__(self) -> None:
        self.chunks: list[tuple[str, int]] = []

    def forward(self, block: HiddenBlock) -> list[HiddenBlock]:
        self.chunks.append((block.request, block.position))
        return []

    def release(self, request: str, attempt: int) -> None:
        del request, attempt


class Compute:
    """Runs nothing before it is told to."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def post(self, run: Callable[[], None]) -> None:
        self._jobs.append(run)

    def run(self) -> None:
        while self._jobs:
            self._jobs.pop(0)()


class Following:
    def send(self, frames: list[pb.Frame]) -> None:
        """Nothing is behind this stage."""


def chunks(request: str, count: int) -> Iterable[pb.Frame]:
    for at in range(count):
        block = HiddenBlock(request, 1, at, 1, (1,), pb.REPLY_COMPUTED, bytes(4 * HIDDEN))
        yield from cut(block, LIMITS.placement, LIMITS.stage, LIMITS.dtype, HIDDEN)


def test_chunks_of_a_request_that_is_over_leave_room_for_others() -> None:
    """As many of its chunks wait as may, and none is computed."""
    worker, compute = Worker(), Compute()
    parts: list[Any] = [Following(), compute, worker]
    spec = pb.StageSpec(placement="p1", stage=1, num_stages=STAGES)
    service = WorkerService(spec, LIMITS, *parts)
    most = STAGES + CHUNKS_AHEAD

    async def frames() -> AsyncIterator[pb.Frame]:
        for frame in chunks("over", most):
            yield frame
        yield pb.Frame(placement="p1", request="over", attempt=1, release=pb.Release())
        for frame in chunks("other", most):
            yield frame

    async def run() -> list[pb.Frame]:
        context: Any = None
        async with asyncio.timeout(30):
            up = [frame async for frame in service.Stream(frames(), context)]
        compute.run()
        return up

    assert asyncio.run(run()) == []
    assert worker.chunks == [("other", at) for at in range(most)]
