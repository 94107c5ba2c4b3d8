"""What a hop between stages costs without any layer: a generator's end, stages that echo.

Processes as runners are: mutual TLS on loopback, the runners' own services, links and threads. The
reference is a bare bidirectional gRPC stream between the same two processes.
"""

import asyncio
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

from runners import KEY, NODE

from exo_node.mtp.seams import Wait
from exo_node.node.rpc.channels import Channels
from exo_node.node.runners.runner_client import Endpoint, RunnerClient
from exo_node.node.trust.certificates import runner_credentials, runner_name
from exo_node.placement.ids import PlacementId
from exo_node.proto import peer_pb2 as pb
from exo_node.proto import peer_pb2_grpc
from exo_node.proto.grpc_options import SERVER_OPTIONS
from exo_node.shard.engine.compute import ComputeThread
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.tensors import from_bytes, to_bytes
from exo_node.shard.pipeline.frames import HiddenBlock
from exo_node.shard.pipeline.stage import StageWorker
from exo_node.shard.pipeline.streams import Ring
from exo_node.shard.runner.next_stage import NextStage
from exo_node.shard.runner.ring_service import RingService
from exo_node.shard.runner.stage_service import StageService
from exo_node.shard.runner.worker_service import WorkerService

PLACEMENT = PlacementId("hops")
DTYPE, HIDDEN = "bfloat16", 5120
"""One row is 10 KiB: a token of a model of 27 billion parameters."""
WARM_UP = 50
KINDS = ("bare", "frames", "arrays")
"""A bare stream; frames through links and threads; and as arrays on both sides."""


class Echo:
    """In place of a stage's layers: the block as it came, through an array where asked."""

    def forward(self, block: HiddenBlock) -> list[HiddenBlock]:
        if block.request.startswith("arrays"):
            assert to_bytes(from_bytes(block.data, DTYPE, (1, block.rows, HIDDEN))) == block.data
        return [block]

    def release(self, request: str, attempt: int) -> None:
        pass

    renew = release


class Chain:
    """The processes of one chain, connected in a ring; the first one measures."""

    def __init__(self, processes: Sequence["subprocess.Popen[str]"]) -> None:
        self._processes = processes

    async def microseconds(self, kind: str, trips: int) -> list[float]:
        """One way, a hop: the round trips divided by the number of processes, or by 2 for bare."""
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
            await RunnerClient(channels).connect(stage, following, PLACEMENT)
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
        self._following = _Recorded(self._channel_credentials)
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
            asked = json.loads(question)
            print(json.dumps(await self._measure(asked["kind"], asked["trips"])), flush=True)
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
                begun = time.perf_counter()
                await call.write(data)
                _answer = await call.read()
                times.append(time.perf_counter() - begun)
            await call.done_writing()
        return times[WARM_UP:]

    async def _ringed(self, kind: str, trips: int) -> list[float]:
        over, times = asyncio.Event(), list[float]()

        def done(fault: BaseException | None) -> None:
            if fault is not None:
                times.clear()
                print(fault, file=sys.stderr, flush=True)
            _ = self._loop.call_soon_threadsafe(over.set)

        request = f"{kind}-{time.monotonic_ns()}"
        _run = self._compute.drive(self._trips(request, WARM_UP + trips), times.append, done)
        # The reader of a generation, which would pause without one.
        _run.read(1 << 30)
        _ = await over.wait()
        return times[WARM_UP:]

    def _trips(self, request: str, trips: int) -> Generator[Any, None, None]:
        """Blocks round the ring, one after the other, as the pipeline's verifier sends them."""
        assert self._ring is not None
        data = bytes(2 * HIDDEN)
        shape = (1, 1, HIDDEN)
        for position in range(trips):
            begun = time.perf_counter()
            out = to_bytes(from_bytes(data, DTYPE, shape)) if request[0] == "a" else data
            block = HiddenBlock(request, 1, position, 1, (7,), pb.REPLY_ALL, out)
            answer = self._ring.send(block)
            assert answer is not None
            yield Wait(answer)
            back = answer.result()
            if request[0] == "a":
                assert from_bytes(back.data, DTYPE, shape).shape == shape
            yield time.perf_counter() - begun
        self._ring.release(request, 1)


class _Recorded(NextStage):
    """Remembers where the next stage is, for the bare stream."""

    address = ("", 0)

    async def connect(self, address: Any, on_frame: Any, on_lost: Any) -> Any:
        self.address = (address.host, address.port)
        return await super().connect(address, on_frame, on_lost)


async def _echo(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


async def _child(stage: int, stages: int) -> None:
    await Child(stage, stages).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)  # that the others stop is no news
    sys.setswitchinterval(1e-4)  # as a runner does
    asyncio.run(_child(int(sys.argv[1]), int(sys.argv[2])))
