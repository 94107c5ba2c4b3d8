"""Readers in this process: layers of other engines, by the frames and files that runners send."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from engines import Answer
from prefixes import probabilities

from exo_node.mtp.caches.rollback import cache_arrays, holds_rows, row_count, state_arrays
from exo_node.placement.errors import ExoNodeError, PeerLost
from exo_node.proto import peer_pb2 as pb
from exo_node.proto.fields import changed
from exo_node.shard.checkpoint.files import Buffer
from exo_node.shard.checkpoint.prefix_files import PrefixReceiver
from exo_node.shard.engine.answers.events import AnswerEnd, Delta
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.layer_engine import LayerEngine
from exo_node.shard.engine.prefixes.encoding import DeviceBytes
from exo_node.shard.engine.reading.layer_rows import LayerForm, Selection
from exo_node.shard.engine.reading.link import LayerRange, ReadOutcome, ReadTrip
from exo_node.shard.engine.request import Parameters, Request
from exo_node.shard.engine.states.cache_parts import copied, room_of
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.tensors import to_bytes
from exo_node.shard.pipeline.frames import Assembler, HiddenBlock, cut

Change = Callable[[int, int, bytes], bytes]
"""What becomes of the file that a reader returns: its number, the forward's, and the file."""


@dataclass(slots=True)
class _Reader:
    engine: TextEngine | LayerEngine
    layers: LayerRange
    request: Request | None = None
    returned: list[bytes] = field(default_factory=list[bytes])


class LocalReaders:
    """Stepped by `step`; without it nothing comes back, as from readers that hang."""

    def __init__(
        self,
        engines: Sequence[TextEngine | LayerEngine],
        layers: Sequence[LayerRange],
        limits: StageLimits,
        change: Change = lambda _reader, _number, data: data,
    ) -> None:
        """`change` may raise ExoNodeError: the reader is lost then."""
        self.layers = layers
        self.outcome = ReadOutcome()
        self.is_closed = False
        self.closed_reads = 0
        self._limits = limits
        self._change = change
        self._readers = [_Reader(e, r) for e, r in zip(engines, layers, strict=True)]
        self._under_way: list[tuple[ReadTrip, HiddenBlock, Selection]] = []
        self._moved: dict[ReadTrip, int] = {}

    def open(
        self,
        forms: Sequence[LayerForm],
        begin: pb.ReadBegin,
        states: Sequence[Iterator[Buffer]],
    ) -> None:
        self._forms = forms
        self.outcome.nodes = [f"reader-{i}" for i in range(len(self._readers))]
        for number, reader in enumerate(self._readers):
            wire = changed(
                begin,
                request="r",
                attempt=1,
                first_layer=reader.layers.first,
                end_layer=reader.layers.end,
                hidden=begin.hidden or number < len(self._readers) - 1,
            )
            prefix = None
            if states:
                selection, form = Selection(0, begin.rows, True, 0), forms[number]
                receiver = PrefixReceiver(
                    form.bytes(selection), lambda d, f=form, s=selection: f.check(s, d)
                )
                for piece in states[number]:
                    receiver.feed(bytes(piece))
                prefix = receiver.finish()

            def deliver(pieces: Iterator[Buffer], own: _Reader = reader) -> None:
                own.returned.append(b"".join(map(bytes, pieces)))

            reader.request = reader.engine.begin_read(wire, prefix, deliver, self._fail)

    def _fail(self, fault: BaseException) -> None:
        assert isinstance(fault, ExoNodeError), fault
        for trip, *_ in self._under_way:
            trip.fault = trip.fault or fault
            trip.is_back = True

    def send(self, block: HiddenBlock, data: Callable[[], bytes], selection: Selection) -> ReadTrip:
        trip, block = ReadTrip(), replace(block, data=data())
        self._under_way.append((trip, block, selection))
        self._moved[trip] = 0
        self._pass_on(0, block)
        return trip

    def _pass_on(self, number: int, block: HiddenBlock) -> None:
        request = self._readers[number].request
        assert request is not None and request.read is not None
        limits = self._limits
        assembler = Assembler(limits)
        for frame in cut(block, limits.placement, limits.stage, limits.dtype, limits.hidden_size):
            if (whole := assembler.add(pb.Frame.FromString(frame.SerializeToString()))) is not None:
                (hidden,) = DeviceBytes.of([whole.data])
                request.read.add(whole, hidden, request.prompt, request.ends)

    def step(self) -> bool:
        """Steps each reader once, and takes what it returned."""
        if self.is_closed:
            return False
        busy = False
        for number, reader in enumerate(self._readers):
            busy |= reader.engine._engine.step()  # pyright: ignore[reportPrivateUsage]
            while reader.returned:
                try:
                    self._take(number, reader.returned.pop(0))
                except (ExoNodeError, ValueError) as fault:
                    lost = fault if isinstance(fault, ExoNodeError) else PeerLost(str(fault))
                    self._fail(lost)
        return busy

    def _take(self, number: int, data: bytes) -> None:
        trip, block, selection = next(e for e in self._under_way if self._moved[e[0]] == number)
        is_last = number == len(self._readers) - 1
        if not is_last:
            selection = selection.with_all_hidden()
        data = self._change(number, selection.begin, data)
        form = self._forms[number]
        receiver = PrefixReceiver(
            form.bytes(selection), lambda description: form.check(selection, description)
        )
        for begin in range(0, len(data), 100_003):
            receiver.feed(data[begin : begin + 100_003])
        received = receiver.finish()
        self.outcome.bytes += received.size
        trip.results.append(received)
        self._moved[trip] += 1
        if is_last:
            self._under_way = [each for each in self._under_way if each[0] is not trip]
            trip.is_back = True
        else:
            self._pass_on(number + 1, replace(block, data=bytes(received.content_of("hidden"))))

    def close(self) -> None:
        self.is_closed = True
        for reader in self._readers:
            if reader.request is not None:
                reader.engine.cancel(reader.request)
                self.closed_reads += 1


class Drive:
    """One request whose prompt `readers` help to read, if there are any."""

    def __init__(
        self, engine: TextEngine, engine_request: Parameters, readers: LocalReaders | None = None
    ) -> None:
        self._stream = engine.generate(replace(engine_request, readers=readers))
        self._readers = readers
        self.events = list[object]()
        self.has_ended = False

    def step(self, steps: int = 1) -> object:
        """Steps the engine, and the readers `steps` times. Returns an event, if there is one."""
        event = next(self._stream, self)
        self.has_ended = event is self
        if event is not self and event is not None:
            self.events.append(event)
        for _ in range(steps):
            if self._readers is not None:
                _ = self._readers.step()
        return event

    def finish(self, steps: int = 1) -> Answer:
        for _ in range(200_000):
            if self.has_ended:
                break
            _ = self.step(steps)
        deltas = [event for event in self.events if isinstance(event, Delta)]
        end = self.events[-1]
        assert isinstance(end, AnswerEnd)
        rounds = tuple(delta.round for delta in deltas)
        text = "".join(delta.text for delta in deltas) + end.text
        return Answer(tuple(t for r in rounds for t in r.tokens), text, rounds, end)

    def close(self) -> None:
        self._stream.close()


def _described(array: mx.array) -> bytes:
    return repr((array.dtype, array.shape)).encode() + to_bytes(array)


def state_behind_prompt(
    engine: TextEngine, engine_request: Parameters, readers: LocalReaders | None = None
) -> tuple[list[bytes], tuple[object, ...]]:
    """Every array of every layer's cache after the prompt, with its rows and room; and the answer
    with its probabilities."""
    drive = Drive(engine, engine_request, readers)
    while not isinstance(drive.step(), Delta):
        pass
    executor: Any = engine._engine.executor  # pyright: ignore[reportPrivateUsage]
    (state,) = executor._groups.single.values()
    parts = list[bytes]()
    for cache in state.caches:
        if holds_rows(cache):
            count = row_count(cache)
            arrays = [array[..., :count, :] for array in state_arrays(cache)]
            parts.append(repr((count, room_of(cache))).encode())
        else:
            arrays = cache_arrays([copied(cache)])
        parts += map(_described, arrays)
    if state.draft is not None:
        unread = [array for pair in state.draft.unread for array in pair]
        parts += [repr((state.draft.rows, state.draft.unread_rows)).encode()]
        parts += map(_described, unread)
    return parts, probabilities(drive.finish())
