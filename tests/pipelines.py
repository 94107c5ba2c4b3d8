"""Models in stages in this process: the generator's engine, the other stages' workers, their link.

Blocks travel as frames (cut, checked, put together), so that what is tested is what runs. The link
answers at once, or while it `holds` when a test says so; a stage can be lost or replaced.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from engines import CHUNK, DEMO, STORY, answer, load_quietly, request, spec
from forced_copies import EqualCosts, FixedLength, force
from shims import Key as Numbers
from shims import perturb
from small import LAYERS, small_checkpoint

from exo_node.mtp.types import Round
from exo_node.placement.errors import ExoNodeError, PeerLost
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.events import Delta
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.prefixes.disk import PrefixDisk
from exo_node.shard.engine.prefixes.store import PrefixStore
from exo_node.shard.engine.stage import StageOutput, StageWorker
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.pipeline.copy_query import ExactCopies
from exo_node.shard.pipeline.frames import Assembler, HiddenBlock, check_envelope, cut
from exo_node.shard.pipeline.link import COPY_QUERY, Key, Trip

TWO, THREE = (0, 2, LAYERS), (0, 1, 3, LAYERS)
PROMPT: list[int] = STORY["prompt_ids"]
TOKENS = 30
Observe = Callable[[pb.Frame], None]


@dataclass(slots=True, eq=False)
class Message:
    """A message in flight, and whether the stages have computed it."""

    kind: str
    """question, copies, chunk, log, round, or release."""
    keys: frozenset[Key]
    work: Callable[[], Trip | None]
    trip: Trip | None = None
    """None: of a release, which nobody waits for."""
    result: Trip | None = None
    is_computed: bool = False


class Link:
    """A `StageLink` to workers in this process.

    While it `holds`, stages compute nothing, and nothing comes back, before a test says so. What
    concerns one request keeps its order, as frames do.
    """

    def __init__(
        self,
        workers: Sequence[StageWorker],
        limits: Sequence[StageLimits],
        observe: Observe = lambda _: None,
    ) -> None:
        self.holds = False
        self.in_flight: list[Message] = []
        self.sent: list[HiddenBlock] = []
        """The blocks so far, without their data."""
        self.older: set[int] = set()
        """Stages of a version that knows no query for copies: it reads a frame of no kind."""
        self._workers = workers
        self._limits = limits
        self._observe = observe

    @property
    def rounds(self) -> list[int]:
        """How many requests each round had."""
        return [len(block.members) for block in self.sent if block.is_round]

    def listen(self, on_back: Callable[[], None]) -> None:
        """Nothing comes back on another thread."""

    def send(self, block: HiddenBlock) -> Trip:
        self.sent.append(replace(block, data=b""))
        keys = tuple(member.key for member in block.members)
        kind = "round" if block.is_round else "log" if block.replayed else "chunk"
        trip = Trip(keys, block.members[0].position)
        work = functools.partial(self._pass, block)
        return self._set_out(Message(kind, frozenset(keys), work, trip))

    def ask_prefixes(
        self, key: Key, ids: Sequence[int], schedule: Sequence[int], ends: Sequence[int]
    ) -> Trip:
        work = functools.partial(self._common_prefixes, key, ids, schedule, ends)
        return self._set_out(Message("question", frozenset([key]), work, Trip((key,))))

    def ask_copies(self, key: Key, copies: ExactCopies) -> Trip:
        work = functools.partial(self._common_copies, key, copies)
        trip = Trip((key,), COPY_QUERY)
        return self._set_out(Message("copies", frozenset([key]), work, trip))

    def release(self, key: Key) -> None:
        """Trips of this request alone are back at once, as in `Ring`; the stages follow later."""
        for message in self.in_flight:
            if message.trip is not None and message.trip.members == (key,):
                message.trip.is_back = True
        work = functools.partial(self._release, key)
        self.in_flight.append(Message("release", frozenset([key]), work))
        if not self.holds:
            self.flush()

    def able(self) -> list[Message]:
        """The messages that may proceed: of each request the first that is not over."""
        keys, able = set[Key](), list[Message]()
        for message in self.in_flight:
            if keys.isdisjoint(message.keys):
                able.append(message)
            keys |= message.keys
        return able

    def compute(self, message: Message) -> None:
        """All stages do it; the result is not back yet."""
        before = itertools.takewhile(lambda each: each is not message, self.in_flight)
        assert not message.is_computed
        assert all(each.is_computed or message.keys.isdisjoint(each.keys) for each in before)
        message.result, message.is_computed = message.work(), True

    def bring(self, message: Message) -> None:
        """It is back; a trip that came back before stays as it was."""
        if not message.is_computed:
            self.compute(message)
        self.in_flight.remove(message)
        if message.trip is None or message.trip.is_back:
            return
        assert message.result is not None
        message.trip.block = message.result.block
        message.trip.prefix_rows = message.result.prefix_rows
        message.trip.copies = message.result.copies
        for key, fault in message.result.faults.items():
            _ = message.trip.fail(key, fault)
        message.trip.is_back = True

    def lose(self, message: Message) -> None:
        """It never comes back."""
        self.in_flight.remove(message)
        assert message.trip is not None
        if not message.trip.is_back:
            for key in message.trip.members:
                _ = message.trip.fail(key, PeerLost("a stage did not answer within 8 s"))
            message.trip.is_back = True

    def flush(self) -> None:
        """All of it is back."""
        while self.in_flight:
            self.bring(self.in_flight[0])

    def _set_out(self, message: Message) -> Trip:
        assert message.trip is not None
        self.in_flight.append(message)
        if not self.holds:
            self.flush()
        return message.trip

    # ---- the work of the stages

    def _pass(self, block: HiddenBlock) -> Trip:
        trip = Trip(tuple(member.key for member in block.members))
        back: HiddenBlock | None = block
        for worker, limits in zip(self._workers, self._limits, strict=True):
            if back is None:
                return trip
            try:
                passed = worker.forward(self._carry(back, limits))
            except (ExoNodeError, RuntimeError) as fault:
                passed = StageOutput(None, [(key, fault) for key in trip.members])
            back = passed.block
            for key, fault in passed.faults:
                error = fault if isinstance(fault, ExoNodeError) else ExoNodeError(str(fault))
                _ = trip.fail(key, error)
        trip.block = None if back is None else self._returned(back)
        return trip

    def _common_prefixes(
        self, key: Key, ids: Sequence[int], schedule: Sequence[int], ends: Sequence[int]
    ) -> Trip:
        common = list(ends)
        for worker, limits in zip(self._workers, self._limits, strict=True):
            query = pb.PrefixQuery(tokens=ids, schedule=schedule, held=common)
            placement = limits.placement
            frame = pb.Frame(placement=placement, request=key[0], attempt=key[1], prefix=query)
            check_envelope(frame, limits)
            self._observe(frame)
            common = worker.cached_ends(key, query.tokens, query.schedule, query.held)
        return Trip((key,), prefix_rows=common)

    def _common_copies(self, key: Key, copies: ExactCopies) -> Trip:
        trip = Trip((key,))
        try:
            for worker, limits in zip(self._workers, self._limits, strict=True):
                frame = pb.Frame(placement=limits.placement, request=key[0], attempt=key[1])
                if limits.stage not in self.older:
                    frame.copies.CopyFrom(copies.to_wire())
                check_envelope(frame, limits)
                self._observe(frame)
                copies = worker.agree_on_copies(key, ExactCopies.from_wire(frame.copies))
        except ExoNodeError as fault:
            _ = trip.fail(key, fault)
        trip.copies = copies
        return trip

    def _release(self, key: Key) -> None:
        for worker in self._workers:
            worker.release(key)

    def _returned(self, block: HiddenBlock) -> HiddenBlock | None:
        """The way back is checked as the generator's runner checks it."""
        last = self._limits[-1]
        after = replace(last, stage=last.stage + 1)
        if block.data:
            return self._carry(block, after)
        (frame,) = cut(block, after.placement, after.stage, after.dtype, after.hidden_size)
        assert frame.computed.position == block.members[0].position
        return None

    def _carry(self, block: HiddenBlock, limits: StageLimits) -> HiddenBlock:
        assembler = Assembler(limits)
        for frame in cut(block, limits.placement, limits.stage, limits.dtype, limits.hidden_size):
            if limits in self._limits:  # not on the way back to the generator
                self._observe(frame)
            if (whole := assembler.add(frame)) is not None:
                return whole
        raise AssertionError("the block's frames did not make a block")


class Pipeline:
    """The generator's engine and the workers of the other stages.

    `rooms`: bytes of each stage for prefixes, by default what the options say. `disks`: of each
    stage for prefixes. `changes` are the engine's.
    """

    def __init__(
        self,
        parts: Sequence[Loaded],
        options: EngineOptions,
        *,
        rooms: Sequence[int] = (),
        disks: Sequence[PrefixDisk | None] = (),
        observe: Observe = lambda _: None,
        **changes: Any,
    ) -> None:
        self.parts = parts
        self._rooms = rooms or (options.prefix_cache_bytes,) * len(parts)
        self._disks = disks or (None,) * len(parts)
        self._options = replace(options, prefix_cache_bytes=self._rooms[0])
        self._changes = changes
        self.forwards: list[int] = []
        """The stage of each forward that a stage other than the generator's ran."""
        self.workers = [self._worker(number) for number in range(1, len(parts))]
        self.link = Link(self.workers, [x.expected for x in parts[1:]], observe)
        self.engine = self._engine()

    def copy(self, length: int) -> "Pipeline":
        """Answers copy that many tokens wherever their last ones occurred before, whatever was
        measured."""
        force(self.engine.lookup, FixedLength(length))
        self.engine.lookup.exact = exact = ExactCopies([length], [1.0, 1.0], [0.0])
        executor: Any = self.engine._engine.executor  # pyright: ignore[reportPrivateUsage]
        executor._copies._costs = EqualCosts()
        for worker in self.workers:
            worker.copies.exact = exact
        return self

    def replace(self, number: int) -> None:
        """Replaces a stage by a runner without the stage's requests."""
        if number:
            self.workers[number - 1] = self._worker(number)
        else:
            self.engine = self._engine()

    def lose(self, number: int, after: int) -> None:
        """From its forward number `after` on, the stage is gone."""
        worker = self.workers[number - 1]
        alive = worker.forward
        countdown = iter(range(after))

        def forward(block: HiddenBlock) -> StageOutput:
            if next(countdown, None) is None:
                raise PeerLost("the stage is gone")
            return alive(block)

        worker.forward = forward

    def until_lost(
        self, prompt: Sequence[int] = PROMPT, tokens: int = TOKENS, **changes: Any
    ) -> tuple[Round, ...]:
        """The rounds that were handed out before the stage was lost."""
        engine_request = request(prompt, 0, tokens, ignore_eos=True, top_logprobs=0, **changes)
        rounds: list[Round] = []
        with pytest.raises(PeerLost):
            for event in self.engine.generate(engine_request):
                if isinstance(event, Delta):
                    rounds.append(event.round)
        return tuple(rounds)

    def rounds(
        self, prompt: Sequence[int] = PROMPT, tokens: int = TOKENS, **changes: Any
    ) -> tuple[Round, ...]:
        """The rounds of an answer, after those of a log; counts `forwards` anew."""
        self.forwards.clear()
        fields = {"top_logprobs": 0, "ignore_eos": True} | changes
        return answer(self.engine, request(prompt, 0, tokens, **fields)).rounds

    @property
    def leftovers(self) -> dict[str, object]:
        """Remaining state of requests, on any stage; empty if there is none."""
        engine: Any = self.engine._engine  # pyright: ignore[reportPrivateUsage]
        executor: Any = engine.executor
        states = {
            "requests": engine._requests,
            "in flight": list(engine._in_flight),
            "prefill": engine._prefill_forward,
            "borders": executor._borders,
            "copies": {**executor._copies._policies, **executor._kept_rows},
            "generator": _held_by(executor.rounds),
            "bytes": self.engine.cache_bytes(),
            "messages": self.link.in_flight,
        }
        for number, worker in enumerate(self.workers, 1):
            internals: Any = worker
            states[f"stage {number}"] = [*internals._requests, *_held_by(internals._rounds)]
            states[f"bytes {number}"] = worker.cache_bytes()
        return {name: each for name, each in states.items() if each}

    def _engine(self) -> TextEngine:
        (part, *_), (disk, *_) = self.parts, self._disks
        return TextEngine(part, self._options, link=self.link, prefix_disk=disk, **self._changes)

    def _worker(self, number: int) -> StageWorker:
        part, room = self.parts[number], self._rooms[number]
        prefixes = PrefixStore(room, part.model.make_caches, self._disks[number])
        worker = StageWorker(part.model, part.expected, time.monotonic, prefixes)
        internals: Any = worker
        computed = internals._compute

        def counted(block: HiddenBlock, sessions: Any) -> bytes:
            data = computed(block, sessions)
            self.forwards.extend([number] * len(block.replayed or (1,)))
            return data

        internals._compute = counted
        return worker


def _held_by(rounds: Any) -> list[object]:
    return [*rounds.groups.single, *rounds.groups.groups]


def stage_specs(folder: Path, bounds: Sequence[int], **changes: Any) -> list[pb.StageSpec]:
    """Stages [bounds[i], bounds[i+1]); the first is the generator's."""
    fields = {"num_stages": len(bounds) - 1, "num_layers": bounds[-1]} | changes
    pairs = enumerate(itertools.pairwise(bounds))
    return [spec(folder, a, b, i, **fields) for i, (a, b) in pairs]


def pipeline_of(
    bounds: Sequence[int], folder: Path = DEMO, observe: Observe = lambda _: None, **changes: Any
) -> Pipeline:
    """The stages of a folder's model. `changes` are those of the specifications."""
    specs = stage_specs(folder, bounds, **changes)
    parts = [load_quietly(stage_spec) for stage_spec in specs]
    return Pipeline(parts, EngineOptions.of(specs[0]), observe=observe)


@functools.cache
def small_parts(
    bounds: tuple[int, ...], chunk: int, numbers: Numbers | None = None, size: float = 0.0
) -> list[Loaded]:
    """The small model, perturbed by `numbers`, once a process: requests leave nothing in it."""
    specs = stage_specs(small_checkpoint(), bounds, prefill_chunk=chunk)
    parts = [load_quietly(stage_spec) for stage_spec in specs]
    for part in parts:
        assert numbers is None or perturb(part.model.model, numbers, size=size) > 4
    return parts


def small_pipeline(
    bounds: Sequence[int] = THREE,
    *,
    chunk: int = CHUNK,
    numbers: Numbers | None = None,
    size: float = 0.0,
    rooms: Sequence[int] = (),
    observe: Observe = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
    **changes: Any,
) -> Pipeline:
    """The small model's stages. `changes`: of the generator's specification.

    `numbers`: linear layers are perturbed by it, so that other forwards than expected show.
    """
    parts = small_parts(tuple(bounds), chunk, numbers, size)
    fields = {"prefill_chunk": chunk} | changes
    options = EngineOptions.of(stage_specs(small_checkpoint(), bounds, **fields)[0])
    return Pipeline(parts, options, rooms=rooms, observe=observe, clock=clock)
