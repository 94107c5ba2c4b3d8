"""The gRPC streams between the runners of neighbouring stages.

`Ring` is the first stage's end of the pipeline: it sends blocks and matches the answers to trips.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from ...placement.errors import ExoNodeError, PeerLost, from_code
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ...proto.grpc_options import CHANNEL_OPTIONS
from .copy_query import ExactCopies
from .frames import HiddenBlock, cut
from .link import COPY_QUERY, Key, Trip

DECODE_DEADLINE_S = 8.0
PREFILL_DEADLINE_S = 60.0
"""Seconds until a block must be answered; nothing else detects a stage whose process hangs."""
RENEW_S = 3.0
"""Seconds between renewals of a request's lease, while its reader is slow: a third of the lease."""
NOT_CONNECTED = "the stages of this placement are not connected yet"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a runner; `name` must be in its certificate."""

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
        """`on_frame` takes frames that the next stage sends back; `on_lost` is called once, when
        the stream breaks."""
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
        """Connects. Raises PeerLost if the next stage is out of reach or of another cluster."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError as fault:
            await self._channel.close()  # or it would keep trying to connect
            raise PeerLost(f"the next stage at {self._where} does not answer") from fault
        self._call = peer_pb2_grpc.StageStub(self._channel).Stream()
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    def send(self, frames: Iterable[pb.Frame]) -> None:
        """Queues frames, to be sent in order."""
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
        try:
            async for frame in self._call:
                self._on_frame(frame)
        except grpc.aio.AioRpcError as fault:
            _LOG.info("%s: %s: %s", self._where, fault.code().name, fault.details())
        self._on_lost(PeerLost(f"the next stage at {self._where} is gone"))


class Ring:
    """A `StageLink` over gRPC. The methods of `StageLink` are called on the compute thread, and run
    on the event loop like all others."""

    def __init__(self, placement: str, dtype: str, hidden_size: int) -> None:
        self._placement = placement
        self._dtype = dtype
        self._hidden_size = hidden_size
        self._loop = asyncio.get_running_loop()
        self._stream: OutgoingStream | None = None
        self._trips: dict[tuple[Key, int], Trip] = {}
        """Trips in flight, by their first member and its position."""
        self._deadlines: dict[Trip, asyncio.TimerHandle] = {}
        self._active: set[Key] = set()
        """Requests that may have a state on other stages."""
        self._failed: dict[Key, ExoNodeError] = {}
        """Errors of requests that had nothing in flight; their next trip fails with them."""
        self._lost = NOT_CONNECTED
        """Why nothing can be sent; empty if it can."""
        self._renewal: asyncio.TimerHandle | None = None
        self._on_back: Callable[[], None] = lambda: None

    def listen(self, on_back: Callable[[], None]) -> None:
        self._on_back = on_back

    def send(self, block: HiddenBlock) -> Trip:
        first = block.members[0]
        trip = Trip(tuple(member.key for member in block.members), first.position)
        frames = list(cut(block, self._placement, 1, self._dtype, self._hidden_size))
        # More rows than one take longer: a round of copies.
        is_row = block.is_round and block.rows == 1
        deadline_s = DECODE_DEADLINE_S if is_row else PREFILL_DEADLINE_S
        _ = self._loop.call_soon_threadsafe(self._set_out, trip, frames, deadline_s)
        return trip

    def ask_prefixes(
        self, key: Key, ids: Sequence[int], schedule: Sequence[int], ends: Sequence[int]
    ) -> Trip:
        trip = Trip((key,))
        query = pb.PrefixQuery(tokens=ids, schedule=schedule, held=ends)
        frame = pb.Frame(placement=self._placement, request=key[0], attempt=key[1], prefix=query)
        _ = self._loop.call_soon_threadsafe(self._set_out, trip, [frame], PREFILL_DEADLINE_S)
        return trip

    def ask_copies(self, key: Key, copies: ExactCopies) -> Trip:
        trip = Trip((key,), COPY_QUERY)
        frame = pb.Frame(
            placement=self._placement, request=key[0], attempt=key[1], copies=copies.to_wire()
        )
        _ = self._loop.call_soon_threadsafe(self._set_out, trip, [frame], DECODE_DEADLINE_S)
        return trip

    def release(self, key: Key) -> None:
        _ = self._loop.call_soon_threadsafe(self._release, key)

    # ---- the event loop

    def connect(self, stream: OutgoingStream) -> None:
        """Uses a new stream. Requests in flight on an earlier one fail, since parts of them are
        lost."""
        self._fail_active("the stages of this placement were connected anew")
        self._stream, self._lost = stream, ""
        if self._renewal is None:
            self._renewal = self._loop.call_later(RENEW_S, self._renew)

    def answer(self, block: HiddenBlock) -> None:
        """Takes a block from the last stage; it is dropped if its trip has ended."""
        if (trip := self._trip_of(block.members[0].key, block.members[0].position)) is not None:
            trip.block = block
            self._back(trip)

    def computed(self, frame: pb.Frame) -> None:
        """Takes the confirmation that all stages have computed a chunk."""
        position = int(frame.computed.position)
        if (trip := self._trip_of((frame.request, int(frame.attempt)), position)) is not None:
            self._back(trip)

    def prefix(self, frame: pb.Frame) -> None:
        """Takes the answer of all stages to a prefix query."""
        if (trip := self._trip_of((frame.request, int(frame.attempt)), 0)) is not None:
            trip.prefix_rows = [int(rows) for rows in frame.prefix.held]
            self._back(trip)

    def copies(self, frame: pb.Frame) -> None:
        """Takes the answer of all stages to a query for copies."""
        if (trip := self._trip_of((frame.request, int(frame.attempt)), COPY_QUERY)) is not None:
            trip.copies = ExactCopies.from_wire(frame.copies)
            self._back(trip)

    def fail(self, frame: pb.Frame) -> None:
        """Takes a failure: a stage refused or lost a part of this request."""
        failure = frame.failure
        fault = from_code(failure.code, failure.message, failure.param or None)
        self._fail((frame.request, int(frame.attempt)), fault)

    def lose(self, fault: PeerLost) -> None:
        """Fails all requests in flight and all later ones: the next stage is gone."""
        self._lost = fault.message
        self._fail_active(fault.message)

    def _set_out(self, trip: Trip, frames: Sequence[pb.Frame], deadline_s: float) -> None:
        faults = {key: fault for key in trip.members if (fault := self._failed.pop(key, None))}
        if self._stream is None or self._lost:
            faults = {key: PeerLost(self._lost) for key in trip.members}
        if faults:  # a part of the requests is lost
            others = f"request {next(iter(faults))[0]}, of the same forward, failed"
            for key in trip.members:
                _ = trip.fail(key, faults.get(key) or PeerLost(others))
            self._back(trip)
            return
        assert self._stream is not None
        self._active.update(trip.members)
        self._trips[trip.members[0], trip.position] = trip
        self._stream.send(frames)
        self._deadlines[trip] = self._loop.call_later(deadline_s, self._late, trip, deadline_s)

    def _trip_of(self, key: Key, position: int) -> Trip | None:
        return self._trips.get((key, position))

    def _back(self, trip: Trip) -> None:
        _ = self._trips.pop((trip.members[0], trip.position), None)
        if (deadline := self._deadlines.pop(trip, None)) is not None:
            deadline.cancel()
        trip.is_back = True
        self._on_back()

    def _late(self, trip: Trip, deadline_s: float) -> None:
        late = f"a stage did not answer within {deadline_s:.0f} s"
        for key in trip.members:
            self._fail(key, PeerLost(late))

    def _fail_active(self, why: str) -> None:
        for key in list(self._active):
            # One error each, since a traceback keeps the request's frames and so its caches alive.
            self._fail(key, PeerLost(why))

    def _fail(self, key: Key, fault: ExoNodeError) -> None:
        mine = [trip for trip in self._trips.values() if key in trip.members]
        if not mine and key in self._active:
            _ = self._failed.setdefault(key, fault)
        for trip in mine:
            if trip.fail(key, fault):
                self._back(trip)

    def _release(self, key: Key) -> None:
        self._active.discard(key)
        _ = self._failed.pop(key, None)
        for trip in [trip for trip in self._trips.values() if key in trip.members]:
            if trip.members == (key,) or trip.fail(key, PeerLost(f"request {key[0]} is over")):
                self._back(trip)
        self._notify_stages(key, release=pb.Release())

    def _renew(self) -> None:
        """Renews all leases: a request whose reader is slow must keep its state on other stages."""
        for key in list(self._active):
            self._notify_stages(key, renew=pb.Renew())
        self._renewal = self._loop.call_later(RENEW_S, self._renew)

    def _notify_stages(
        self, key: Key, *, release: pb.Release | None = None, renew: pb.Renew | None = None
    ) -> None:
        if self._stream is not None:
            frame = pb.Frame(
                placement=self._placement,
                request=key[0],
                attempt=key[1],
                release=release,
                renew=renew,
            )
            self._stream.send([frame])
