"""The socket to the node that started this runner, and the state that is sent over it."""

import asyncio
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import mlx.core as mx

from ...proto import peer_pb2 as pb
from ...proto.framing import HEAD_BYTES, body_bytes, framed
from ..engine.answers.embedding_engine import EmbeddingEngine
from ..engine.answers.text_engine import TextEngine
from ..engine.compute import ComputeThread
from ..engine.layer_engine import LayerEngine
from ..engine.prefixes.disk import PrefixDisk
from ..engine.stage import StageWorker
from ..model.fusing import LaterFusing
from ..model.load import bytes_read
from .runner_service import EpochFence

log = logging.getLogger(__name__)

Watched = TextEngine | EmbeddingEngine | StageWorker | LayerEngine

STATE_EVERY_S = 0.25
READ_PIECE = 4 << 20
KEEP_EVERY_S = 30.0
"""Seconds between copies of compiled code: a new kind of request may compile more."""


class Parent:
    """The socket to the node. Messages are protobuf after a four-byte big-endian length."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = sock.makefile("rb")
        self._lock = threading.Lock()

    def receive(self) -> pb.ToRunner | None:
        """The next message; None when the node is gone."""
        head = self._exactly(HEAD_BYTES)
        if head is None:
            return None
        body = self._exactly(body_bytes(head))
        return None if body is None else pb.ToRunner.FromString(body)

    def send(self, message: pb.FromRunner) -> None:
        """Any thread. A node that is gone is noticed by the reader."""
        data = framed(message.SerializeToString())
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError:
                log.debug("the node is gone")

    def _exactly(self, count: int) -> bytes | None:
        try:
            data = self._reader.read(count)
        except OSError:
            return None
        return data if len(data) == count else None


class StateReport:
    """Sends the runner's state for the node's heartbeat, expires leases, and saves prefixes.

    While the compute thread is busy, its last state is sent again.
    """

    def __init__(
        self, spec: pb.StageSpec, parent: Parent, compute: ComputeThread, fence: EpochFence
    ) -> None:
        self._spec = spec
        self._parent = parent
        self._compute = compute
        self._fence = fence
        self._state = pb.RunnerState()
        self._steps_of_load = 0
        self._kept_at = 0.0
        self.fusing: LaterFusing | None = None
        """The compilation that each report continues, if there is one."""

    def progress(self, progress: pb.LoadProgress) -> None:
        """Reports a step of the load. Any thread."""
        self.count()
        self._parent.send(pb.FromRunner(progress=progress))

    def count(self) -> None:
        """Counts a part of a step, which is progress. Any thread."""
        self._steps_of_load += 1

    def current(self) -> pb.RunnerState:
        """The last state, with what needs no compute thread."""
        state = pb.RunnerState()
        state.CopyFrom(self._state)
        state.progress = self._compute.progress
        state.compute_ended = not self._compute.alive
        if self._fence.epoch is not None:
            state.epoch.CopyFrom(self._fence.epoch)
        return state

    async def send_while_loading(self) -> None:
        """Sends the state with the load's progress: the node ends a load that makes none."""
        while True:
            state = self.current()
            # In whole pieces: reading this number reads a few bytes itself.
            state.progress += self._steps_of_load + bytes_read() // READ_PIECE
            self._parent.send(pb.FromRunner(state=state))
            await asyncio.sleep(STATE_EVERY_S)

    async def send_while_serving(
        self, watch: Watched, disk: PrefixDisk | None, keep_compiled: Callable[[], None]
    ) -> None:
        """Sends the state of what the compute thread serves."""

        def look_from(asked_at: float) -> "asyncio.Future[pb.RunnerState]":
            look = self._compute.submit(lambda: self._look(watch, disk, keep_compiled, asked_at))
            return asyncio.wrap_future(look)

        looking = look_from(time.monotonic())
        while True:
            _ = await asyncio.wait([looking], timeout=STATE_EVERY_S)
            if looking.done():
                self._state = looking.result()
                looking = look_from(time.monotonic())
            self._parent.send(pb.FromRunner(state=self.current()))
            await asyncio.sleep(STATE_EVERY_S)

    def _look(
        self,
        watch: Watched,
        disk: PrefixDisk | None,
        keep_compiled: Callable[[], None],
        asked_at: float,
    ) -> pb.RunnerState:
        """Runs on the compute thread."""
        if asked_at - self._kept_at > KEEP_EVERY_S:
            self._kept_at = asked_at
            keep_compiled()
        elif self.fusing is not None:  # not at once: first comes the answer that the load is for
            self.fusing.step()
            if self.fusing.has_ended:
                self.fusing = None
                keep_compiled()  # a later one may find a forward under way
        _ = watch.save_prefix()
        if isinstance(watch, TextEngine):
            watch.read_answer()
        # What renews a lease waits in the same queue, after a long forward and this.
        waited = time.monotonic() - asked_at
        if isinstance(watch, StageWorker):
            for request in watch.expire(self._spec.lease_s + waited):
                log.info("freed request %s: its lease expired", request)
        hits = Counter(watch.prefix_hits)
        state = pb.RunnerState(
            live_requests=watch.live_requests,
            cache_bytes=watch.cache_bytes(),
            peak_memory_bytes=mx.get_peak_memory(),
            active_memory_bytes=mx.get_active_memory(),
            prefix_cache_bytes=watch.prefix_cache_bytes,
            prefix_disk_bytes=disk.size if disk else 0,
            prefix_disk_rows=hits["disk"],
            prefix_memory_rows=hits["memory"],
            prefix_peer_rows=hits["peer"],
        )
        if isinstance(watch, TextEngine):
            state.head_parked = watch.drafting.parked_reason
            state.head_refusal = watch.drafting.refusal
            state.drafter_kind = watch.drafting.kind
            state.greedy_identity = watch.measurements.identity
            state.prompt_lookup = watch.lookup.refusal or "on"
            state.depth_reason = watch.depth_reason
            state.mtp_speedup = watch.drafting.speedup
        if not isinstance(watch, EmbeddingEngine):
            times = watch.step_times
            state.step_s, state.timed_answers = times.seconds, times.answers
        return state
