"""The runner process: one stage of one placement, a supervised child of its node.

Started as `python -P -m exo_node.shard.runner.main FD` with one inherited socket. It reads its
start message there, reports progress and readiness, and ends with the socket, whatever it is doing.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # until all is imported: what is made by then stays
# isort: split
import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NoReturn

from ..model import loader_import  # noqa: F401  # pyright: ignore[reportUnusedImport]

# What it does has to come before MLX is imported.
# isort: split
import grpc
import grpc.aio

from ...placement.errors import DeviceLost, ExoNodeError, LoadFailed
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ...proto.checked_calls import BoundNumbers
from ...proto.grpc_options import SERVER_OPTIONS
from ..engine.answers.embedding_engine import EmbeddingEngine
from ..engine.answers.text_engine import TextEngine
from ..engine.compute import ComputeThread
from ..engine.layer_engine import LayerEngine
from ..engine.measuring import Measuring
from ..engine.options import EngineOptions
from ..engine.prefixes.disk import PrefixDisk
from ..engine.prefixes.store import PrefixStore
from ..engine.stage import StageWorker
from ..kernels.fused_code import COMPILING, compiling_apart, wait_for_save
from ..kernels.install import used
from ..model.fusing import LaterFusing, may_begin_unfused
from ..model.layer_probe import probe_layers
from ..model.load import Loaded, load
from ..model.open_model import MODEL_FAULTS, headline
from ..model.stage_limits import StageLimits
from ..model.tensors import DTYPES
from ..pipeline.ring import Ring
from ..text.orphans import continue_when_orphaned
from ..text.prompt_encoder import PromptEncoder
from .embedding_service import serve_embeddings
from .generator_service import GeneratorService
from .persistent_files import (
    attempts_of,
    fusing_key,
    prefix_disk_of,
    profile_of,
    shared_prefix_key,
)
from .prefix_exchange import PrefixFetcher, PrefixSender
from .read_service import ReadService
from .remote_readers import readers_of
from .runner_service import EpochFence, RunnerService
from .stage_service import NextStage, RingService, StageService
from .state_report import Parent, StateReport, Watched
from .worker_service import WorkerService

log = logging.getLogger(__name__)


class RunnerLog(logging.Formatter):
    """Prefixes each line of a record, tracebacks included, with its level and name.

    The node limits lines without such a prefix, and would omit the end of a traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"{record.levelname}:{record.name}:"
        return super().format(record).replace("\n", "\n" + prefix)


LAST_WORDS_S = 0.1
"""Seconds in which the event loop still sends an answer the error that ends it."""
SAVE_S = 2.0
"""Seconds in which a runner that ends writes prefixes, and then in which it ends its last piece of
work; its node kills it after `Timing.reply_s`."""


class Runner:
    """Loads one stage and serves it until the node stops it."""

    def __init__(self, start: pb.RunnerStart, parent: Parent) -> None:
        self._start = start
        self._spec = start.stage
        self._parent = parent
        self._compute = ComputeThread(on_death=self._on_compute_death)
        self._stage: StageService | None = None
        self._disk: PrefixDisk | None = None
        self._read_key = ""
        """The key of a runner that reads for others only: see `shared_prefix_key`."""
        self._prompts = PromptEncoder()
        self._fence = EpochFence(self._spec.stage)
        self._report = StateReport(self._spec, parent, self._compute, self._fence)
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Any thread."""
        _ = self._loop.call_soon_threadsafe(self._stop.set)

    def _on_compute_death(self, fault: BaseException) -> NoReturn:
        """Ends the process: without its compute thread a runner only looks alive. The node starts
        another one."""
        message = f"the runner's compute thread died: {type(fault).__name__}; see its log"
        failure = pb.Failure(code=ExoNodeError.code, message=message)
        if isinstance(fault, DeviceLost):
            failure.message, failure.param = fault.message, fault.param or ""
            time.sleep(LAST_WORDS_S)
        self._parent.send(pb.FromRunner(failure=failure))
        logging.shutdown()
        os._exit(1)

    async def run(self) -> None:
        """Loads the stage and serves it. Raises ExoNodeError if it cannot be loaded."""
        watched = asyncio.create_task(self._report.send_while_loading())
        try:
            with compiling_apart() as keep_compiled:
                await self._run(watched, keep_compiled)
                await wait_for_save(self._compute.submit(keep_compiled))
                # A process that ends within a piece of a measurement counts against it.
                await asyncio.to_thread(self._compute.close, SAVE_S)
        finally:
            _ = watched.cancel()

    async def _run(self, watched: "asyncio.Task[None]", keep_compiled: Callable[[], None]) -> None:
        if self._spec.stage == 0:
            self._prompts.start()  # its imports take as long as those of a small model
        waits = self._spec.pooling or self._spec.measure_at_load or not may_begin_unfused()
        loading = self._compute.submit(
            lambda: load(self._spec, self._report.progress, fuses=bool(waits))
        )
        loaded = await asyncio.wrap_future(loading)
        self._prompts.open(Path(self._spec.path))
        for choice in loaded.kernels:
            log.info("kernels: %s", choice)
        following = NextStage(self._credentials(), self._fence)
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(BoundNumbers(),))
        if not waits:
            self._report.fusing = await asyncio.wrap_future(
                self._compute.submit(lambda: self._later_fusing(loaded))
            )
        watch = await self._serve(server, loaded, following)
        service = RunnerService(self._spec, self._report.current, self._fence)
        peer_pb2_grpc.add_RunnerServicer_to_server(service, server)
        addresses = self._listen(server)
        await server.start()
        ready = self._ready(loaded, addresses, watch)
        if self._spec.measure_layers:
            timing = self._compute.submit(lambda: self._layer_times(loaded))
            if (times := await asyncio.wrap_future(timing)) is not None:
                ready.layers.CopyFrom(times)
        _ = watched.cancel()
        self._parent.send(pb.FromRunner(ready=ready))
        if not isinstance(watch, EmbeddingEngine):
            self._compute.attach(watch.step)  # only now: a piece would make the load wait
        reporter = asyncio.create_task(
            self._report.send_while_serving(watch, self._disk, keep_compiled)
        )
        _ = await self._stop.wait()
        reporter.cancel()
        await following.close()
        if self._stage is not None:
            self._stage.end()  # gRPC would cancel them, with a traceback in the log
        await server.stop(grace=0.5)
        await self._save_prefixes(watch)
        await self._prompts.close()

    def _later_fusing(self, loaded: Loaded) -> LaterFusing:
        key, outer = fusing_key(self._spec, loaded), self._spec.stage == 0
        return LaterFusing(loaded.model, loaded.expected, key, outer=outer)

    async def _save_prefixes(self, watch: Watched) -> None:
        """Writes cached states that wait for an idle moment, as far as SAVE_S allows."""
        deadline = time.monotonic() + SAVE_S
        while await asyncio.wrap_future(self._compute.submit(watch.save_prefix)):
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(0.01)

    async def _serve(
        self, server: grpc.aio.Server, loaded: Loaded, following: NextStage
    ) -> Watched:
        spec, expected = self._spec, loaded.expected
        if spec.pooling:
            return await serve_embeddings(server, loaded, spec, self._compute, self._prompts)
        self._disk = prefix_disk_of(spec, loaded)
        if spec.stage >= spec.num_stages:
            return await self._serve_reads(server, loaded)
        if spec.stage:
            budget, caches = spec.prefix_cache_bytes, loaded.model.make_caches
            prefixes = PrefixStore(budget, caches, self._disk)
            worker = StageWorker(
                loaded.model,
                expected,
                time.monotonic,
                prefixes,
                keeps_chunk=spec.keeps_chunk,
                lookup_off_reason=spec.lookup_off_reason,
            )
            worker.measurement_attempts = attempts_of(spec, loaded)
            begin = partial(worker.begin_measuring, batches=spec.batching)
            await asyncio.wrap_future(self._compute.submit(lambda: self._measure(begin())))
            self._stage = WorkerService(spec, expected, following, self._compute, worker)
            peer_pb2_grpc.add_StageServicer_to_server(self._stage, server)
            return worker
        ring = None
        if spec.num_stages > 1:
            ring = Ring(spec.placement, spec.dtype, expected.hidden_size)
            self._stage = RingService(spec, expected, following, ring)
            peer_pb2_grpc.add_StageServicer_to_server(self._stage, server)
        engine = await asyncio.wrap_future(self._compute.submit(lambda: self._engine(loaded, ring)))
        key = await asyncio.to_thread(shared_prefix_key, spec, loaded)
        sender, fetcher = self._prefix_exchange(key, expected, engine) if key else (None, None)
        readers = None
        if key:
            reading = ReadService(expected, key, engine, self._compute)
            peer_pb2_grpc.add_ReadingServicer_to_server(reading, server)
            readers = partial(readers_of, key, self._credentials(), expected, self._compute)
        generator = GeneratorService(
            expected, engine, self._compute, self._prompts, sender, fetcher, readers
        )
        peer_pb2_grpc.add_GeneratorServicer_to_server(generator, server)
        return engine

    async def _serve_reads(self, server: grpc.aio.Server, loaded: Loaded) -> LayerEngine:
        """Serves a runner that has upper layers for the prompts of others. Raises LoadFailed where
        its states may not move."""
        self._read_key = await asyncio.to_thread(shared_prefix_key, self._spec, loaded)
        if not self._read_key:
            raise LoadFailed("its states cannot move between nodes")
        engine = LayerEngine(loaded, EngineOptions.of(self._spec), time.perf_counter)
        service = ReadService(loaded.expected, self._read_key, engine, self._compute)
        peer_pb2_grpc.add_ReadingServicer_to_server(service, server)
        return engine

    def _prefix_exchange(
        self, key: str, expected: StageLimits, engine: TextEngine
    ) -> tuple[PrefixSender, PrefixFetcher]:
        """The two sides of a state's way between replicas."""
        sender = PrefixSender(expected, key, engine.prefix_lookup, self._compute)
        limit, length = self._spec.prefix_cache_bytes, expected.context_length
        fetcher = PrefixFetcher(key, self._credentials(), engine.prefix_lookup, limit, length)
        return sender, fetcher

    def _engine(self, loaded: Loaded, ring: Ring | None) -> TextEngine:
        engine = TextEngine(
            loaded,
            EngineOptions.of(self._spec),
            link=ring,
            profile=profile_of(self._spec, loaded),
            prefix_disk=self._disk,
        )
        self._measure(engine.measurements.begin())
        return engine

    def _measure(self, measuring: Measuring) -> None:
        """Measures at load what is measured between requests otherwise, if the node says so."""
        if self._spec.measure_at_load and not measuring.is_done:
            self._report.progress(pb.LoadProgress(step="measuring, as EXO_MEASURE_AT_LOAD=1 says"))
            measuring.finish(self._report.count)
        elif not measuring.is_done:
            measuring.is_held = COMPILING.locked
            log.info("%s is not measured yet here; it is while no answer runs", self._spec.model)

    def _listen(self, server: grpc.aio.Server) -> list[pb.Address]:
        """Opens a port on each address that the node announces, the usual one first."""
        credentials = self._server_credentials()
        hosts = (self._start.host, *self._spec.listen)
        return [
            pb.Address(host=host, port=server.add_secure_port(f"{host}:0", credentials))
            for host in hosts
        ]

    def _layer_times(self, loaded: Loaded) -> pb.LayerTimes | None:
        """Measured seconds of layers; None for a model whose layers do not run without those
        before them: the planner then estimates, as for a model that was never loaded."""
        self._report.progress(pb.LoadProgress(step="timing its layers"))
        try:
            times = probe_layers(
                loaded.model,
                loaded.expected.hidden_size,
                DTYPES[self._spec.dtype],
                time.perf_counter,
                drafts=self._spec.max_draft_tokens,
                tail=self._spec.stage == 0,
            )
        except (LoadFailed, *MODEL_FAULTS) as fault:
            log.info(
                "the layers of %s cannot be timed alone: %s", self._spec.model, headline(fault)
            )
            return None
        return pb.LayerTimes(model=self._spec.model, dtype=self._spec.dtype, **asdict(times))

    def _credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            self._start.authority, self._start.private_key, self._start.certificate
        )

    def _server_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self._start.private_key, self._start.certificate)],
            root_certificates=self._start.authority,
            require_client_auth=True,
        )

    def _ready(
        self, loaded: Loaded, addresses: Sequence[pb.Address], watch: Watched
    ) -> pb.LoadReady:
        identity, lookup = "off", ""
        if isinstance(watch, TextEngine):
            identity, lookup = watch.measurements.identity, watch.lookup.refusal or "on"
        return pb.LoadReady(
            host=addresses[0].host,
            port=addresses[0].port,
            addresses=addresses,
            pid=os.getpid(),
            weight_bytes=loaded.weight_bytes + loaded.head_bytes,
            checkpoint_bytes_read=loaded.checkpoint_bytes_read,
            first_layer=self._spec.first_layer,
            end_layer=self._spec.end_layer,
            mtp_head=loaded.head_state,
            greedy_identity=identity,
            kernels=used(loaded.kernels),
            images=loaded.images,
            prompt_lookup=lookup,
            read_key=self._read_key,
            published_sampling=loaded.codec.published_sampling if loaded.codec else {},
        )


async def _run(start: pb.RunnerStart, parent: Parent) -> NoReturn:
    runner = Runner(start, parent)
    _watch(parent, runner.stop)
    status = 0
    try:
        await runner.run()
    except ExoNodeError as fault:
        failure = pb.Failure(code=fault.code, message=fault.message, param=fault.param or "")
        parent.send(pb.FromRunner(failure=failure))
        status = 1
    logging.shutdown()
    # Not by sys.exit: MLX's threads still run, and taking the process down under them aborts it.
    # Not by returning: asyncio would first wait for a helper process that is only just starting.
    os._exit(status)


def _watch(parent: Parent, stop: Callable[[], None]) -> None:
    """Starts a thread that ends the process with the socket, even if other threads hang."""

    def read() -> None:
        while (message := parent.receive()) is not None:
            if message.WhichOneof("message") == "stop":
                stop()
        os._exit(0)

    threading.Thread(target=read, name="parent", daemon=True).start()


def main() -> NoReturn:
    """Entry point of the child process; argument 1 is the inherited socket's descriptor."""
    continue_when_orphaned()
    gc.freeze()
    gc.enable()
    # Levels come first so that the node can log the line as its own.
    handler = logging.StreamHandler()
    handler.setFormatter(RunnerLog("%(levelname)s:%(name)s:%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.captureWarnings(True)
    # At the default of 5 ms a hop between threads waits that long while Python is busy.
    sys.setswitchinterval(1e-4)
    parent = Parent(socket.socket(fileno=int(sys.argv[1])))
    message = parent.receive()
    if message is not None:
        asyncio.run(_run(message.start, parent))
    os._exit(0)


if __name__ == "__main__":
    main()
