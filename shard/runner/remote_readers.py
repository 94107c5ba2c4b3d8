"""The calls to the readers of one prompt that this runner answers."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import grpc

from ...placement.errors import ExoNodeError, InvalidFrame, PeerLost
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ...proto.fields import changed
from ...proto.uncut_reads import next_reply
from ..checkpoint.files import Buffer
from ..checkpoint.prefix_files import PrefixReceiver, ReceivedPrefix
from ..engine.compute import ComputeThread
from ..engine.prefixes.encoding import DeviceBytes
from ..engine.reading.layer_rows import LayerForm, Selection
from ..engine.reading.link import LayerRange, ReadOutcome, ReadTrip
from ..engine.request import Parameters
from ..model.stage_limits import StageLimits
from ..pipeline.frames import HiddenBlock, cut
from .prefix_exchange import chunks_of, connected, reason_of

log = logging.getLogger(__name__)

SILENCE_S: Final = 5.0
"""Seconds without a word after which a reader is lost. The first one waits for a small model."""
OPENING_S: Final = 30.0
FORWARD_S: Final = 60.0
"""Seconds for one forward of a reader that lives, its way back included."""


@dataclass(slots=True, eq=False)
class _Forward:
    """A forward on its way, as one reader computes it."""

    trip: ReadTrip
    block: HiddenBlock
    data: Callable[[], bytes]
    """Makes the block's bytes, on another thread."""
    selection: Selection
    """The part that the last reader returns."""


@dataclass(slots=True, eq=False)
class _Call:
    """One reader of one prompt."""

    source: pb.Reader
    unsent: "asyncio.Queue[_Forward]" = field(default_factory=asyncio.Queue)
    forwards: deque[_Forward] = field(default_factory=deque[_Forward])
    """The forwards that it has not returned, unsent ones included."""
    task: "asyncio.Task[None] | None" = None


class RemoteReaders:
    """A `Readers` over gRPC, whose methods hand over to the event loop."""

    def __init__(
        self,
        sources: Sequence[pb.Reader],
        key: str,
        credentials: grpc.ChannelCredentials,
        limits: StageLimits,
        parameters: Parameters,
        reason: str,
        wake: Callable[[], None],
    ) -> None:
        """`key`: see `persistent_files.shared_prefix_key`. `wake`: called when one is back."""
        self.layers: Sequence[LayerRange] = [
            LayerRange(each.first_layer, each.end_layer) for each in sources
        ]
        self.outcome = ReadOutcome(reason=reason)
        self._key = key
        self._credentials = credentials
        self._limits = replace(limits, stage=1)
        self._name = parameters.key
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._calls = [_Call(source) for source in sources]
        self._forms: Sequence[LayerForm] = ()
        self._fault: ExoNodeError | None = None

    def open(
        self,
        forms: Sequence[LayerForm],
        begin: pb.ReadBegin,
        states: Sequence[Iterator[Buffer]],
    ) -> None:
        self._forms = forms
        self.outcome.nodes = [call.source.source.node for call in self._calls]
        _ = self._loop.call_soon_threadsafe(self._open, begin, states)

    def send(self, block: HiddenBlock, data: Callable[[], bytes], selection: Selection) -> ReadTrip:
        forward = _Forward(ReadTrip(), block, data, selection)
        _ = self._loop.call_soon_threadsafe(self._pass_on, 0, forward)
        return forward.trip

    def close(self) -> None:
        _ = self._loop.call_soon_threadsafe(self._close)

    # ---- the event loop

    def _open(self, begin: pb.ReadBegin, states: Sequence[Iterator[Buffer]]) -> None:
        begin.request, begin.attempt = self._name
        begin.key = self._key
        for number, call in enumerate(self._calls):
            own = changed(
                begin,
                placement=call.source.source.placement,
                first_layer=call.source.first_layer,
                end_layer=call.source.end_layer,
                hidden=begin.hidden or number < len(self._calls) - 1,
            )
            state = states[number] if states else iter(())
            run = self._run(number, call, own, state)
            call.task = asyncio.create_task(run, name="a reader's call")
            call.task.add_done_callback(self._note_end)

    def _pass_on(self, number: int, forward: _Forward) -> None:
        """Sends the rows of a forward to a reader."""
        if self._fault is not None:
            forward.trip.fault, forward.trip.is_back = self._fault, True
            self._wake()
            return
        call = self._calls[number]
        call.forwards.append(forward)
        call.unsent.put_nowait(forward)

    async def _run(
        self, number: int, call: _Call, begin: pb.ReadBegin, state: Iterator[Buffer]
    ) -> None:
        """Drives one reader until it is closed. A fault of the reader ends all of them."""
        try:
            async with connected(call.source.source, self._credentials) as channel:
                stream = peer_pb2_grpc.ReadingStub(channel).Read()
                writing = asyncio.create_task(self._write(stream, call, begin, state))
                writing.add_done_callback(self._note_end)
                try:
                    await self._read(number, call, stream)
                finally:
                    _ = writing.cancel()
                    _ = stream.cancel()
                    _ = await asyncio.wait([writing])
        except (ExoNodeError, grpc.RpcError, TimeoutError, ValueError) as fault:
            node = call.source.source.node
            self._fail(PeerLost(f"{node} reads no more: {reason_of(fault)}"))

    async def _write(
        self, stream: Any, call: _Call, begin: pb.ReadBegin, state: Iterator[Buffer]
    ) -> None:
        await stream.write(pb.ReadRequest(begin=begin))
        if begin.rows:
            async for chunk in chunks_of(state):
                self.outcome.bytes += len(chunk.data)
                await stream.write(pb.ReadRequest(prefix=chunk))
            await stream.write(pb.ReadRequest(prefix=pb.FileChunk()))
        placement, limits = call.source.source.placement, self._limits
        while True:
            forward = await call.unsent.get()
            data = await asyncio.to_thread(forward.data)
            self.outcome.bytes += len(data)
            block = replace(forward.block, data=data)
            for frame in cut(block, placement, limits.stage, limits.dtype, limits.hidden_size):
                await stream.write(pb.ReadRequest(frame=frame))

    async def _read(self, number: int, call: _Call, stream: Any) -> None:
        """Takes what a reader returns, in order. Raises what it got."""
        receiver: PrefixReceiver | None = None
        feeding: asyncio.Future[None] | None = None
        returned_at, patience = time.monotonic(), OPENING_S
        while True:
            reply = await next_reply(stream, patience)
            if not isinstance(reply, pb.ReadReply):  # the end
                raise PeerLost("its stream ended")
            patience = SILENCE_S
            if feeding is not None:  # so one piece is checked while the next one comes
                await feeding
                feeding = None
            if not call.forwards:
                returned_at = time.monotonic()
                if reply.data:
                    raise InvalidFrame("it returned more than it was sent", param="data")
                continue
            if not reply.ends and time.monotonic() - returned_at > FORWARD_S:
                raise PeerLost(f"it returned no forward within {FORWARD_S:.0f} s")
            if not reply.data and not reply.ends:
                continue
            forward, form = call.forwards[0], self._forms[number]
            selection = self._selection(number, forward)
            receiver = receiver or PrefixReceiver(
                form.bytes(selection), partial(form.check, selection), DeviceBytes.of
            )
            feeding = self._loop.run_in_executor(None, receiver.feed, reply.data)
            self.outcome.other_kind |= reply.other_kind
            if reply.ends:
                await feeding
                if self._fault is not None:  # of another reader meanwhile
                    raise self._fault
                received, receiver, feeding = receiver.finish(), None, None
                returned_at = time.monotonic()
                self._take(number, call.forwards.popleft(), received)

    def _selection(self, number: int, forward: _Forward) -> Selection:
        is_last = number == len(self._calls) - 1
        return forward.selection if is_last else forward.selection.with_all_hidden()

    def _take(self, number: int, forward: _Forward, received: ReceivedPrefix) -> None:
        self.outcome.bytes += received.size
        trip = forward.trip
        trip.results.append(received)
        if number < len(self._calls) - 1:
            hidden, size = received.content_of("hidden"), Selection(0, 0, False, forward.block.rows)
            if len(hidden) != self._forms[number].bytes(size):
                raise ValueError("its hidden states have another size")
            forward.data = partial(bytes, hidden)
            self._pass_on(number + 1, forward)
            return
        trip.is_back = True
        self._wake()

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        """Ends all readers with any other fault that ended a task: one of this runner, such as of
        its device. Otherwise the prompt would wait for forwards that never return."""
        fault = None if task.cancelled() else task.exception()
        if fault is None or isinstance(fault, (asyncio.InvalidStateError, grpc.RpcError)):
            return  # the stream ended while `_write` used it; `_read` gets the reason
        if not isinstance(fault, ExoNodeError):
            log.error("a call to a reader failed here", exc_info=fault)
            fault = PeerLost(reason_of(fault))
        self._fail(fault)

    def _fail(self, fault: ExoNodeError) -> None:
        self._fault = self._fault or fault
        trips = [forward.trip for call in self._calls for forward in call.forwards]
        for call in self._calls:
            call.forwards.clear()
        for trip in trips:
            trip.fault, trip.is_back = self._fault, True
        self._wake()

    def _close(self) -> None:
        self._fault = self._fault or PeerLost("the reading has ended")
        for call in self._calls:
            if call.task is not None:
                _ = call.task.cancel()


def readers_of(
    key: str,
    credentials: grpc.ChannelCredentials,
    limits: StageLimits,
    compute: ComputeThread,
    request: pb.GenerateRequest,
    parameters: Parameters,
) -> RemoteReaders | None:
    """The readers that a request names, if any. `key`: see `persistent_files.shared_prefix_key`."""
    borders = [(each.first_layer, each.end_layer) for each in request.readers]
    if not borders or any(a[1] != b[0] for a, b in pairwise(borders)):
        return None
    return RemoteReaders(
        request.readers,
        key,
        credentials,
        limits,
        parameters,
        request.read_reason,
        lambda: compute.post(lambda: None),
    )
