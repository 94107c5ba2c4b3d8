"""The gRPC streams between the runners of neighbouring stages."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from ...placement.errors import ExoNodeError, PeerLost, from_code
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ...proto.grpc_options import CHANNEL_OPTIONS
from .frames import HiddenBlock, cut, cut_all

log = logging.getLogger(__name__)

DECODE_DEADLINE_S = 8.0
PREFILL_DEADLINE_S = 60.0
"""How long the answer to a block may take; a stage whose process hangs shows in nothing else."""
MOST_ROWS = 512
"""Of a chunk."""
RENEW_S = 3.0
"""Between two signs that a request lives though nothing of it moves: a third of its lease."""


@dataclass(frozen=True, slots=True)
class Address:
    """A runner that can be dialled; `name` is what its certificate must carry."""

    host: str
    port: int
    name: str


class OutgoingStream:
    """Frames to the next stage, in order. All methods run on the event loop."""

    def __init__(
        self,
        address: Address,
        credentials: grpc.ChannelCredentials,
        on_frame: Callable[[pb.Frame], None],
        on_lost: Callable[[PeerLost], None],
    ) -> None:
        """`on_frame` gets what comes up the stream; `on_lost` is called once, when it breaks."""
        name = ("grpc.ssl_target_name_override", address.name)
        self._channel = grpc.aio.secure_channel(
            f"{address.host}:{address.port}", credentials, options=[*CHANNEL_OPTIONS, name]
        )
        self._address = address
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._frames: asyncio.Queue[pb.Frame] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._call: grpc.aio.StreamStreamCall[pb.Frame, pb.Frame] | None = None

    async def open(self, timeout_s: float = 5.0) -> None:
        """Raises PeerLost when the neighbour cannot be reached or is not of this cluster."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError as fault:
            await self._channel.close()  # or it would go on dialling
            raise PeerLost(f"the next stage at {self._where} does not answer") from fault
        self._call = peer_pb2_grpc.StageStub(self._channel).Stream()
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    def send(self, frames: Iterable[pb.Frame]) -> None:
        for frame in frames:
            self._frames.put_nowait(frame)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        _ = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    @property
    def _where(self) -> str:
        return f"{self._address.host}:{self._address.port}"

    async def _write(self) -> None:
        assert self._call is not None
        while True:
            frame = await self._frames.get()
            try:
                await self._call.write(frame)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader sees the same end, with its status

    async def _read(self) -> None:
        assert self._call is not None
        status = "the stream ended"
        try:
            async for frame in self._call:
                self._on_frame(frame)
        except grpc.aio.AioRpcError as fault:
            status = f"{fault.code().name.lower()}: {fault.details()}"
        self._on_lost(PeerLost(f"the next stage at {self._where} is gone ({status})"))


class Ring:
    """The generator's end of the pipeline: sends blocks on and matches answers to requests.

    What `pipeline.Link` has is called on the compute thread, the rest on the event loop.
    """

    def __init__(self, placement: str, num_stages: int, dtype: str, hidden_size: int) -> None:
        self._placement = placement
        self._num_stages = num_stages
        self._dtype = dtype
        self._hidden_size = hidden_size
        self._loop = asyncio.get_running_loop()
        self._stream: OutgoingStream | None = None
        self._waiting: dict[tuple[str, int], Future[Any]] = {}
        """Each request waits for one thing at a time: a block, or the prefixes that all hold."""
        self._failed: dict[tuple[str, int], ExoNodeError] = {}
        self._active: set[tuple[str, int]] = set()
        self._behind: set[tuple[str, int]] = set()
        """Requests with blocks under way that get no answer: the next answer waits for them."""
        self._chunks: dict[tuple[tuple[str, int], int], Future[None]] = {}
        """Those under way, by request and position."""
        self._repeats_s: dict[tuple[str, int], float] = {}
        """What stages may need for rows that are repeated before they compute what follows."""
        self._lost: str | None = None
        self._renewal: asyncio.TimerHandle | None = None

    def connect(self, stream: OutgoingStream) -> None:
        """Requests that were on their way over an earlier stream fail: part of them is lost."""
        self._fail_active("the stages of this placement were connected anew")
        self._stream, self._lost = stream, None
        if self._renewal is None:
            self._renewal = self._loop.call_later(RENEW_S, self._renew)

    def send(self, block: HiddenBlock) -> "Future[HiddenBlock] | None":
        key = (block.request, block.attempt)
        self.check(*key)
        self._active.add(key)
        frames = list(cut(block, self._placement, 1, self._dtype, self._hidden_size))
        answer: Future[HiddenBlock] | None = None
        if block.reply == pb.REPLY_NONE:
            self._behind.add(key)
            needs_s = PREFILL_DEADLINE_S * (block.rows / MOST_ROWS)
            self._repeats_s[key] = self._repeats_s.get(key, 0.0) + needs_s
        else:
            answer = self._waiting[key] = Future()
        quick = block.reply == pb.REPLY_ALL and key not in self._behind
        deadline = DECODE_DEADLINE_S if quick else self._slow_deadline_s([key])
        _ = self._loop.call_soon_threadsafe(self._dispatch, [key], frames, deadline)
        return answer

    def send_chunk(self, block: HiddenBlock) -> "Future[None]":
        key = (block.request, block.attempt)
        self.check(*key)
        self._active.add(key)
        self._behind.add(key)
        frames = list(cut(block, self._placement, 1, self._dtype, self._hidden_size))
        computed = self._chunks[key, block.position] = Future()
        _ = self._loop.call_soon_threadsafe(self._dispatch_chunk, key, block.position, frames)
        return computed

    def check(self, request: str, attempt: int) -> None:
        if self._lost is not None:
            raise PeerLost(self._lost)
        if (failure := self._failed.pop((request, attempt), None)) is not None:
            raise failure

    def send_all(self, blocks: Sequence[HiddenBlock]) -> "list[Future[HiddenBlock]]":
        sent, going = list[Future[HiddenBlock]](), list[HiddenBlock]()
        for block in blocks:
            key = (block.request, block.attempt)
            sent.append(future := Future())
            if self._lost is not None:
                future.set_exception(PeerLost(self._lost))
            elif (failure := self._failed.pop(key, None)) is not None:
                future.set_exception(failure)
            else:
                self._active.add(key)
                self._waiting[key] = future
                going.append(block)
        keys = [(block.request, block.attempt) for block in going]
        frames = cut_all(going, self._placement, 1, self._dtype, self._hidden_size)
        quick = self._behind.isdisjoint(keys)
        deadline = DECODE_DEADLINE_S if quick else self._slow_deadline_s(keys)
        _ = self._loop.call_soon_threadsafe(self._dispatch, keys, frames, deadline)
        return sent

    def rollback(self, request: str, attempt: int, position: int) -> None:
        self._tell(request, attempt, rollback=pb.Rollback(position=position))

    def held_by_all(
        self,
        request: str,
        attempt: int,
        ids: Sequence[int],
        schedule: Sequence[int],
        held: Sequence[int],
    ) -> "Future[list[int]]":
        key = (request, attempt)
        self.check(*key)
        self._active.add(key)
        future: Future[list[int]] = Future()
        self._waiting[key] = future
        frame = self._frame(key, prefix=pb.PrefixQuery(tokens=ids, schedule=schedule, held=held))
        _ = self._loop.call_soon_threadsafe(self._dispatch, [key], [frame], PREFILL_DEADLINE_S)
        return future

    def _slow_deadline_s(self, keys: Sequence[tuple[str, int]]) -> float:
        """Of an answer behind chunks of prompts, and behind rows that stages compute again."""
        return PREFILL_DEADLINE_S + max(self._repeats_s.get(key, 0.0) for key in keys)

    def release(self, request: str, attempt: int) -> None:
        key = (request, attempt)
        self._active.discard(key)
        self._behind.discard(key)
        if (awaited := self._waiting.pop(key, None)) is not None:
            _ = awaited.cancel()  # others may have gone with it, and wait for all to be back
        for known in (self._failed, self._repeats_s):
            _ = known.pop(key, None)
        self._none_under_way(key)
        self._tell(request, attempt, release=pb.Release())

    def answer(self, block: HiddenBlock) -> None:
        """A block that came round the ring; one that nobody waits for any more is dropped."""
        key = (block.request, block.attempt)
        self._behind.discard(key)
        future = self._waiting.pop(key, None)
        if future is not None and not future.done():
            future.set_result(block)

    def computed(self, frame: pb.Frame) -> None:
        """All stages have computed a chunk; one that is over nobody waits for."""
        key = (frame.request, int(frame.attempt))
        if (future := self._chunks.pop((key, int(frame.computed.position)), None)) is not None:
            future.set_result(None)

    def prefix(self, frame: pb.Frame) -> None:
        """All stages have said what they keep; of an attempt that is over nobody waits for it."""
        future = self._waiting.pop((frame.request, int(frame.attempt)), None)
        if future is not None and not future.done():
            future.set_result([int(rows) for rows in frame.prefix.held])

    def fail(self, frame: pb.Frame) -> None:
        """A stage refused or lost something of this request."""
        f = frame.failure
        self._fail((frame.request, frame.attempt), from_code(f.code, f.message, f.param or None))

    def lose(self, fault: PeerLost) -> None:
        """The next stage is gone: every request under way, and every later one, fails."""
        self._lost = fault.message
        self._fail_active(fault.message)

    def _fail_active(self, why: str) -> None:
        for key in list(self._active):
            # One error each: its traceback holds on to the request's frames, and so to its caches.
            self._fail(key, PeerLost(why))

    def _fail(self, key: tuple[str, int], fault: ExoNodeError) -> None:
        future = self._waiting.pop(key, None)
        if future is None:
            if key in self._active:
                _ = self._failed.setdefault(key, fault)
        elif not future.done():
            future.set_exception(fault)
        self._none_under_way(key)

    def _none_under_way(self, key: tuple[str, int]) -> None:
        """Whoever waits for one of its chunks need not any more."""
        for known in [known for known in list(self._chunks) if known[0] == key]:
            if (future := self._chunks.pop(known, None)) is not None:
                future.set_result(None)

    def _dispatch(
        self, keys: Sequence[tuple[str, int]], frames: list[pb.Frame], deadline_s: float
    ) -> None:
        if self._stream is None or self._lost is not None:  # since `send` looked
            why = self._lost or "the stages of this placement are not connected yet"
            for key in keys:
                self._fail(key, PeerLost(why))
            return
        self._stream.send(frames)
        for key in keys:
            future = self._waiting.get(key)
            if future is not None:
                handle = self._loop.call_later(deadline_s, self._late, key, future, deadline_s)
                future.add_done_callback(
                    lambda _, handle=handle: self._loop.call_soon_threadsafe(handle.cancel)
                )

    def _dispatch_chunk(self, key: tuple[str, int], position: int, frames: list[pb.Frame]) -> None:
        self._dispatch([key], frames, PREFILL_DEADLINE_S)
        future = self._chunks.get((key, position))
        if future is not None:
            deadline_s = self._slow_deadline_s([key])
            handle = self._loop.call_later(deadline_s, self._late_chunk, key, position, deadline_s)
            future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(handle.cancel))

    def _late_chunk(self, key: tuple[str, int], position: int, deadline_s: float) -> None:
        if (key, position) in self._chunks:
            self._fail(key, PeerLost(f"a stage did not answer within {deadline_s:.0f} s"))

    def _late(self, key: tuple[str, int], future: "Future[HiddenBlock]", deadline_s: float) -> None:
        if self._waiting.get(key) is future:
            self._fail(key, PeerLost(f"a stage did not answer within {deadline_s:.0f} s"))

    def _renew(self) -> None:
        """A request whose reader is slow must not lose its state on the other stages."""
        for request, attempt in list(self._active):
            self._tell(request, attempt, renew=pb.Renew())
        self._renewal = self._loop.call_later(RENEW_S, self._renew)

    def _frame(
        self,
        key: tuple[str, int],
        *,
        rollback: pb.Rollback | None = None,
        release: pb.Release | None = None,
        renew: pb.Renew | None = None,
        prefix: pb.PrefixQuery | None = None,
    ) -> pb.Frame:
        return pb.Frame(
            placement=self._placement,
            request=key[0],
            attempt=key[1],
            rollback=rollback,
            release=release,
            renew=renew,
            prefix=prefix,
        )

    def _tell(
        self,
        request: str,
        attempt: int,
        *,
        rollback: pb.Rollback | None = None,
        release: pb.Release | None = None,
        renew: pb.Renew | None = None,
    ) -> None:
        key = (request, attempt)
        frame = self._frame(key, rollback=rollback, release=release, renew=renew)

        def send() -> None:
            if self._stream is not None:
                self._stream.send([frame])

        _ = self._loop.call_soon_threadsafe(send)
