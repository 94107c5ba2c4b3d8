"""Measures a hop between stages without layers: a generator's end, and stages that echo.

Processes are set up like runners: mutual TLS on loopback, the runners' own services, links and
threads. The reference is a bare bidirectional gRPC stream between the same two processes.
"""

import asyncio
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

from runners import KEY, NODE

from exo_node.node.machine.timing import LAN
from exo_node.node.rpc.channels import Channels
from exo_node.node.runners.runner_client import Endpoint, RunnerClient
from exo_node.node.trust.certificates import runner_credentials
from exo_node.placement.ids import PlacementId, runner_name
from exo_node.proto import peer_pb2 as pb
from exo_node.proto import peer_pb2_grpc
from exo_node.proto.grpc_options import SERVER_OPTIONS
from exo_node.shard.engine.compute import ComputeThread
from exo_node.shard.engine.stage import StageOutput, StageWorker
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.tensors import from_bytes, to_bytes
from exo_node.shard.pipeline.frames import BlockMember, HiddenBlock
from exo_node.shard.pipeline.link import Key, Trip
from exo_node.shard.pipeline.ring import Ring
from exo_node.shard.runner.epoch_fence import EpochFence
from exo_node.shard.runner.next_stage import NextStage
from exo_node.shard.runner.ring_service import RingService
from exo_node.shard.runner.stage_service import StageService
from exo_node.shard.runner.worker_service import WorkerService

PLACEMENT = PlacementId("hops")
DTYPE, HIDDEN = "bfloat16", 5120
"""One row is 10 KiB: a token of a model of 27 billion parameters."""
WARM_UP = 50
EPOCH = pb.Epoch(number=1)
KINDS = ("bare", "frames", "arrays")
"""A bare stream; frames through links and threads; frames that are arrays on both sides."""


class Echo:
    """Stands in for a stage's layers: returns the block, through an array for kind `arrays`."""

    def forward(self, block: HiddenBlock) -> StageOutput:
        if block.members[0].request.startswith("arrays"):
            assert to_bytes(from_bytes(block.data, DTYPE, (1, block.rows, HIDDEN))) == block.data
        return StageOutput(block)

    def release(self, key: Key) -> None:
        pass

    renew = release


class Chain:
    """The processes of one chain, connected in a ring; the first one measures."""

    def __init__(self, processes: Sequence["subprocess.Popen[str]"]) -> None:
        self._processes = processes

    async def microseconds(self, kind: str, trips: int) -> list[float]:
        """Microseconds of a hop: round trips divided by the number of processes (bare: by 2)."""
        reply = await asyncio.to_thread(self._ask, {"kind": kind, "trips": trips})
        if not reply:
            raise SystemExit(f"the hops of kind {kind} failed: the reason is above")
        hops = 2 if kind == "bare" else len(self._processes)
        return [1e6 * seconds / hops for seconds in reply]

    def _ask(self, question: dict[str, Any]) -> list[float]:
        process = self._processes[0]
        assert process.stdin is not None and process.stdout is not None
        _ = process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())


@asynccontextmanager
async def chain(stages: int) -> AsyncGenerator[Chain]:
    processes = [_start(stage, stages) for stage in range(stages)]
    channels = Channels(runner_credentials(NODE, KEY))
    try:
        endpoints = [await asyncio.to_thread(_endpoint, process) for process in processes]
        for stage, following in pairwise([*endpoints, endpoints[0]]):
            await RunnerClient(channels, LAN).connect(stage, following, PLACEMENT, EPOCH)
        yield Chain(processes)
    finally:
        await channels.close()
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            _ = await asyncio.to_thread(process.wait)


def _start(stage: int, stages: int) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, __file__, str(stage), str(stages)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process


def _endpoint(process: "subprocess.Popen[str]") -> Endpoint:
    assert process.stdout is not None
    port = int(process.stdout.readline())
    return Endpoint(NODE, pb.LoadReady(host="127.0.0.1", port=port))


# ---- the child


class Child:
    """One process of the chain."""

    def __init__(self, stage: int, stages: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._compute = ComputeThread()
        self._credentials = runner_credentials(NODE, KEY)
        c = self._credentials
        self._channel_credentials = grpc.ssl_channel_credentials(
            c.authority_pem, c.key_pem, c.certificate_pem
        )
        fence = EpochFence(stage)
        fence.enter(EPOCH)
        self._following = _AddressedNextStage(self._channel_credentials, fence)
        self._ring = None if stage else Ring(PLACEMENT, stages, DTYPE, HIDDEN)
        self._spec = pb.StageSpec(placement=PLACEMENT, stage=stage, num_stages=stages)
        expected = StageLimits(PLACEMENT, stage or stages, DTYPE, HIDDEN, 512, 1 << 30, 1 << 20)
        self._service: StageService
        if self._ring is None:
            worker = cast(StageWorker, cast(object, Echo()))
            self._service = WorkerService(
                self._spec, expected, self._following, self._compute, worker
            )
        else:
            self._service = RingService(self._spec, expected, self._following, self._ring)

    async def run(self) -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        peer_pb2_grpc.add_StageServicer_to_server(self._service, server)
        echo = grpc.stream_stream_rpc_method_handler(_echo)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("bench.Bare", {"Echo": echo})]
        )
        c = self._credentials
        credentials = grpc.ssl_server_credentials(
            [(c.key_pem, c.certificate_pem)], c.authority_pem, require_client_auth=True
        )
        print(server.add_secure_port("127.0.0.1:0", credentials), flush=True)
        await server.start()
        questions: asyncio.Queue[str] = asyncio.Queue()
        threading.Thread(target=self._listen, args=(questions,), daemon=True).start()
        while question := await questions.get():
            question_fields = json.loads(question)
            print(
                json.dumps(await self._measure(question_fields["kind"], question_fields["trips"])),
                flush=True,
            )
        await self._following.close()
        await server.stop(0.5)

    def _listen(self, questions: "asyncio.Queue[str]") -> None:
        for line in sys.stdin:
            _ = self._loop.call_soon_threadsafe(questions.put_nowait, line)
        _ = self._loop.call_soon_threadsafe(questions.put_nowait, "")

    async def _measure(self, kind: str, trips: int) -> list[float]:
        return (await self._bare(trips)) if kind == "bare" else (await self._ringed(kind, trips))

    async def _bare(self, trips: int) -> list[float]:
        host, port = self._following.address
        name = ("grpc.ssl_target_name_override", runner_name(NODE))
        data, times = bytes(2 * HIDDEN), list[float]()
        async with grpc.aio.secure_channel(
            f"{host}:{port}", self._channel_credentials, [name]
        ) as channel:
            call = channel.stream_stream("/bench.Bare/Echo")()
            for _ in range(WARM_UP + trips):
                start = time.perf_counter()
                await call.write(data)
                _answer = await call.read()
                times.append(time.perf_counter() - start)
            await call.done_writing()
        return times[WARM_UP:]

    async def _ringed(self, kind: str, trips: int) -> list[float]:
        assert self._ring is not None
        over = asyncio.Event()

        def signal_end() -> None:
            _ = self._loop.call_soon_threadsafe(over.set)

        rounds = Rounds(self._ring, f"{kind}-{time.monotonic_ns()}", WARM_UP + trips, signal_end)
        self._ring.listen(lambda: self._compute.post(lambda: None))
        self._compute.attach(rounds.step)
        self._compute.post(lambda: None)
        _ = await over.wait()
        return rounds.times[WARM_UP:]


class Rounds:
    """Blocks round the ring, one after the other, as an engine sends them."""

    def __init__(self, ring: Ring, request: str, trips: int, on_end: Callable[[], None]) -> None:
        self.times: list[float] = []
        self._ring = ring
        self._key = (request, 1)
        self._trips = trips
        self._on_end = on_end
        self._as_arrays = request.startswith("arrays")
        self._trip: Trip | None = None
        self._start = 0.0

    def step(self) -> bool:
        """Sends the next block if the last one has returned; on the compute thread."""
        if self._trip is not None and not self._trip.is_back:
            return False
        if self._trip is not None and not self._take(self._trip):
            return False
        self._start = time.perf_counter()
        data = bytes(2 * HIDDEN)
        out = to_bytes(from_bytes(data, DTYPE, (1, 1, HIDDEN))) if self._as_arrays else data
        member = BlockMember(*self._key, len(self.times))
        self._trip = self._ring.send(HiddenBlock((member,), 1, (7,), pb.REPLY_ALL, out))
        return True

    def _take(self, trip: Trip) -> bool:
        """Records a trip; returns whether another one follows."""
        fault = trip.faults.get(self._key)
        if fault is None and trip.block is not None:
            if self._as_arrays:
                assert from_bytes(trip.block.data, DTYPE, (1, 1, HIDDEN)).shape[0] == 1
            self.times.append(time.perf_counter() - self._start)
            if len(self.times) < self._trips:
                return True
        else:
            self.times.clear()
            print(fault, file=sys.stderr, flush=True)
        self._ring.release(self._key)
        self._trip = Trip((self._key,))  # never returns, so nothing is left to do
        self._on_end()
        return False


class _AddressedNextStage(NextStage):
    """Records the address of the next stage, for the bare stream."""

    address = ("", 0)

    async def connect(self, address: Any, epoch: Any, on_frame: Any, on_lost: Any) -> Any:
        self.address = (address.host, address.port)
        return await super().connect(address, epoch, on_frame, on_lost)


async def _echo(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


async def _child(stage: int, stages: int) -> None:
    await Child(stage, stages).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)  # the end of the others is expected
    sys.setswitchinterval(1e-4)  # as a runner does
    asyncio.run(_child(int(sys.argv[1]), int(sys.argv[2])))
