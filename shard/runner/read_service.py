"""The gRPC service that computes layers of prompts that other runners answer."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final

from ...placement.errors import ExoNodeError, InvalidFrame, InvalidRequest, PeerLost
from ...placement.reading import may_read
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ...proto.bounds import fault as out_of_bounds
from ...proto.uncut_reads import requests_of
from ..checkpoint.files import Buffer
from ..checkpoint.prefix_files import PrefixReceiver, ReceivedPrefix
from ..engine.compute import ComputeThread
from ..engine.layer_engine import ReadsLayers
from ..engine.prefixes.encoding import CONTENT_FAULTS, DeviceBytes
from ..engine.reading.layer_rows import Selection
from ..engine.reading.views import VIEW_FAULTS
from ..engine.request import Request
from ..model.stage_limits import StageLimits
from ..pipeline.frames import REQUEST_NAME, Assembler
from .prefix_exchange import cut
from .refusal import Context, refuse

PULSE_S: Final = 1.0
"""Seconds between the empty replies of a reader that has nothing to return."""
ADMITTED_S: Final = 2.0
"""Seconds after which a prompt is refused that finds no room beside those in progress here."""
MOST_READS: Final = 4
"""Prompts that are read for others at the same time."""
BLOCKS_AHEAD: Final = 5
"""Forwards of one prompt whose rows wait here; gRPC's flow control holds back the rest."""


class ReadService(peer_pb2_grpc.ReadingServicer):
    """Reads layers of prompts that other runners answer."""

    def __init__(
        self, limits: StageLimits, key: str, engine: ReadsLayers, compute: ComputeThread
    ) -> None:
        """`key`: see `persistent_files.shared_prefix_key`."""
        self._limits = replace(limits, stage=1)
        self._key = key
        self._engine = engine
        self._compute = compute
        self._reads = 0

    async def Read(
        self, request_iterator: AsyncIterator[pb.ReadRequest], context: Context
    ) -> AsyncIterator[pb.ReadReply]:
        try:
            async with aclosing(self._read(requests_of(request_iterator))) as replies:
                async for reply in replies:
                    yield reply
        except ExoNodeError as fault:
            await refuse(context, fault)

    async def _read(
        self, requests: AsyncIterator[pb.ReadRequest]
    ) -> AsyncGenerator[pb.ReadReply, None]:
        """The results of each forward. Raises ExoNodeError. Its end frees the layers."""
        begin = (await anext(requests, pb.ReadRequest())).begin
        self._check(begin)
        self._reads += 1
        other = begin.key != self._key
        reading = _Reading(self._limits, self._engine, self._compute, begin, other_kind=other)
        try:
            async for reply in reading.replies(requests):
                yield reply
        finally:
            self._reads -= 1

    def _check(self, begin: pb.ReadBegin) -> None:
        limits = self._limits
        if (violation := out_of_bounds(begin)) is not None:
            raise InvalidRequest(f"{violation.field} {violation.text}", param=violation.field)
        if begin.placement != limits.placement:
            # The port of a runner that is gone may be another's by now.
            raise PeerLost("another placement's runner listens here now")
        if not may_read(begin.key, self._key):
            raise InvalidRequest(
                "this runner's states are of another model, or of another kind of machine",
                param="key",
            )
        if not REQUEST_NAME.fullmatch(begin.request) or begin.attempt < 1:
            raise InvalidRequest("it needs the name of a request, and an attempt", param="request")
        tokens = begin.tokens
        if not 1 <= len(tokens) <= limits.context_length or max(tokens) >= limits.vocabulary:
            raise InvalidRequest(
                f"tokens must be 1 to {limits.context_length} ids of the vocabulary", param="tokens"
            )
        least = max(1, self._engine.first_layer)
        if not least <= begin.first_layer < begin.end_layer <= self._engine.num_layers:
            raise InvalidRequest("the layers are none of the upper ones here", param="layers")
        schedule = begin.schedule
        fits = sum(schedule) == len(tokens) and 1 <= min(schedule) <= max(schedule)
        if not fits or max(schedule) > limits.max_rows:
            raise InvalidRequest(
                f"schedule must be forwards of 1 to {limits.max_rows} rows that add up to those "
                "of tokens",
                param="schedule",
            )
        if self._reads >= MOST_READS:
            raise PeerLost(f"{MOST_READS} prompts are being read for others already")


class _Reading:
    """One prompt that another runner answers."""

    def __init__(
        self,
        limits: StageLimits,
        engine: ReadsLayers,
        compute: ComputeThread,
        begin: pb.ReadBegin,
        *,
        other_kind: bool,
    ) -> None:
        self._other_kind = other_kind
        self._limits = limits
        self._engine = engine
        self._compute = compute
        self._begin = begin
        self._ahead = asyncio.Semaphore(BLOCKS_AHEAD)
        self._loop = asyncio.get_running_loop()
        self._replies: asyncio.Queue[pb.ReadReply | BaseException] = asyncio.Queue()
        """The replies of at most BLOCKS_AHEAD forwards, or the error that ends them."""
        self._files = ThreadPoolExecutor(1, "read-files")
        self._request: Request | None = None
        self._began_at = time.monotonic()

    async def replies(
        self, requests: AsyncIterator[pb.ReadRequest]
    ) -> AsyncGenerator[pb.ReadReply, None]:
        taking = asyncio.create_task(self._take(requests))
        taking.add_done_callback(self._note_end)
        try:
            while True:
                try:
                    async with asyncio.timeout(PULSE_S):
                        reply = await self._replies.get()
                except TimeoutError:
                    self._require_room()
                    yield pb.ReadReply()
                    continue
                if isinstance(reply, BaseException):
                    raise _as_public(reply)
                yield reply
                if reply.ends:
                    self._ahead.release()
        finally:
            _ = taking.cancel()
            self._compute.post(self._end)

    def _require_room(self) -> None:
        """Raises PeerLost if the prompt waits here for the end of others."""
        request, waited_s = self._request, time.monotonic() - self._began_at
        if request is not None and request.phase == "waiting" and waited_s > ADMITTED_S:
            raise PeerLost("its runner has no room for the prompt beside those in progress")

    def _note_end(self, work: "asyncio.Task[None] | Future[None]") -> None:
        """Any thread: returns the fault that ended a task or a thread's work, whatever it is, to
        the caller, which would wait for replies otherwise."""
        if not work.cancelled() and (fault := work.exception()) is not None:
            self._enqueue(fault)

    async def _take(self, requests: AsyncIterator[pb.ReadRequest]) -> None:
        """Takes the state and the forwards that the caller sends."""
        prefix = await self._prefix(requests) if self._begin.rows else None
        self._compute.attach(self._engine.step)
        request = await self._on_compute(partial(self._start, prefix))
        read, assembler = request.read, Assembler(self._limits)
        assert read is not None
        async for message in requests:
            frame = message.frame
            if not frame.HasField("hidden"):
                raise InvalidFrame("a forward has hidden states", param="frame")
            if (frame.request, frame.attempt) != (self._begin.request, self._begin.attempt):
                raise InvalidFrame("the forward is of another request", param="request")
            if (block := assembler.add(frame)) is not None:
                _ = await self._ahead.acquire()
                (hidden,) = await asyncio.to_thread(DeviceBytes.of, [block.data])
                add = partial(read.add, block, hidden, request.prompt, request.ends)
                await self._on_compute(add)

    async def _prefix(self, requests: AsyncIterator[pb.ReadRequest]) -> ReceivedPrefix:
        begin, selection = self._begin, Selection(0, self._begin.rows, True, 0)
        form = await self._on_compute(
            partial(self._engine.layer_form, begin.first_layer, begin.end_layer)
        )
        receiver = PrefixReceiver(form.bytes(selection), partial(form.check, selection))
        async for message in requests:
            if not message.HasField("prefix"):
                raise InvalidFrame("the state after the first rows is missing", param="prefix")
            if not message.prefix.data:
                return receiver.finish()
            await asyncio.to_thread(receiver.feed, message.prefix.data)
        raise PeerLost("the caller is gone")

    async def _on_compute(self, work: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._compute.submit(work))

    def _start(self, prefix: ReceivedPrefix | None) -> Request:
        self._request = self._engine.begin_read(self._begin, prefix, self._deliver, self._enqueue)
        return self._request

    def _deliver(self, pieces: Iterator[Buffer]) -> None:
        self._files.submit(self._send, pieces).add_done_callback(self._note_end)

    def _send(self, pieces: Iterator[Buffer]) -> None:
        """Makes the replies of a forward, on a thread of its own."""
        for data in cut(pieces):
            self._enqueue(pb.ReadReply(data=data))
        self._enqueue(pb.ReadReply(ends=True, other_kind=self._other_kind))

    def _enqueue(self, reply: pb.ReadReply | BaseException) -> None:
        _ = self._loop.call_soon_threadsafe(self._replies.put_nowait, reply)

    def _end(self) -> None:
        self._files.shutdown(wait=False, cancel_futures=True)
        if self._request is not None:
            self._engine.cancel(self._request)


def _as_public(fault: BaseException) -> BaseException:
    """The error that the caller gets: what it sent has another form, or this runner fails."""
    if isinstance(fault, ExoNodeError) or not isinstance(fault, (*VIEW_FAULTS, *CONTENT_FAULTS)):
        return fault
    return InvalidRequest(f"what was sent cannot be used: {fault}", param="prefix")
