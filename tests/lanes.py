"""The small model in stages, in this process, whose trips come back when a test says so.

Every linear layer is perturbed by a request's own rows: a row that another forward than the
recorded one gave would show, and one that others share would not.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engines import Answer, answer, engine_of, load_quietly, request
from loopback import LoopbackLink
from readers import Reader, prompt
from shims import by_own_rows, perturb
from small import LAYERS, small_spec

from exo_node.mtp.types import Sampling
from exo_node.placement.errors import PeerLost
from exo_node.shard.engine.prefixes.store import PrefixStore
from exo_node.shard.engine.request import EngineRequest
from exo_node.shard.engine.stage import StageWorker
from exo_node.shard.engine.text_engine import TextEngine
from exo_node.shard.model.load import Loaded
from exo_node.shard.pipeline.frames import HiddenBlock
from exo_node.shard.pipeline.link import Key, Trip

TWO, THREE = (0, 2, LAYERS), (0, 1, 3, LAYERS)
CHUNK = 8
"""Rows of a forward over a prompt."""
SIZE = 0.1
"""Size of the perturbation."""


@dataclass(slots=True, eq=False)
class Away:
    """A message in flight, and whether the stages have computed it."""

    kind: str
    """question, chunk, log, round, or release."""
    keys: frozenset[Key]
    work: Callable[[], Trip | None]
    trip: Trip | None = None
    """None: of a release, which nobody waits for."""
    result: Trip | None = None
    is_computed: bool = False


class HoldingLink(LoopbackLink):
    """While it `holds`, stages compute nothing, and nothing comes back, before a test says so.

    What concerns one request keeps its order, as frames do.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.holds = False
        self.away: list[Away] = []
        self.sent: list[HiddenBlock] = []

    @property
    def rounds(self) -> list[int]:
        """How many requests each round had."""
        return [len(block.members) for block in self.sent if block.is_round]

    def send(self, block: HiddenBlock) -> Trip:
        self.sent.append(block)
        keys = tuple(member.key for member in block.members)
        trip = Trip(keys, block.members[0].position)
        kind = "round" if block.is_round else "log" if block.replayed else "chunk"
        work = functools.partial(super().send, block)
        return self._set_out(Away(kind, frozenset(keys), work, trip))

    def ask_prefixes(
        self, key: Key, ids: Sequence[int], schedule: Sequence[int], ends: Sequence[int]
    ) -> Trip:
        work = functools.partial(super().ask_prefixes, key, ids, schedule, ends)
        return self._set_out(Away("question", frozenset([key]), work, Trip((key,))))

    def release(self, key: Key) -> None:
        """Trips of this request alone are back at once, as in `Ring`; the stages follow later."""
        for away in self.away:
            if away.trip is not None and away.trip.members == (key,):
                away.trip.is_back = True
        work = functools.partial(super().release, key)
        self.away.append(Away("release", frozenset([key]), work))
        if not self.holds:
            self.flush()

    def _set_out(self, away: Away) -> Trip:
        assert away.trip is not None
        self.away.append(away)
        if not self.holds:
            self.flush()
        return away.trip

    def able(self) -> list[Away]:
        """The messages that may proceed: of each request the first that is not over."""
        keys, able = set[Key](), list[Away]()
        for away in self.away:
            if keys.isdisjoint(away.keys):
                able.append(away)
            keys |= away.keys
        return able

    def compute(self, away: Away) -> None:
        """All stages do it; what came of it is not back yet."""
        behind = itertools.takewhile(lambda each: each is not away, self.away)
        assert not away.is_computed
        assert all(each.is_computed or away.keys.isdisjoint(each.keys) for each in behind)
        away.result, away.is_computed = away.work(), True

    def bring(self, away: Away) -> None:
        """It is back; of what came back before, nobody hears."""
        if not away.is_computed:
            self.compute(away)
        self.away.remove(away)
        if away.trip is None or away.trip.is_back:
            return
        assert away.result is not None
        away.trip.block, away.trip.prefix_rows = away.result.block, away.result.prefix_rows
        for key, fault in away.result.faults.items():
            _ = away.trip.fail(key, fault)
        away.trip.is_back = True

    def lose(self, away: Away) -> None:
        """It never comes back."""
        self.away.remove(away)
        assert away.trip is not None
        if not away.trip.is_back:
            for key in away.trip.members:
                _ = away.trip.fail(key, PeerLost("a stage did not answer within 8 s"))
            away.trip.is_back = True

    def flush(self) -> None:
        """All of it is back."""
        while self.away:
            self.bring(self.away[0])


@functools.cache
def _loaded(bounds: tuple[int, ...]) -> list[Loaded]:
    """Once for all of a process: what requests leave behind is not in here."""
    stages = len(bounds) - 1
    parts = [
        load_quietly(
            small_spec(
                first_layer=a,
                end_layer=b,
                stage=i,
                num_stages=stages,
                native_mtp=False,
                prefill_chunk=CHUNK,
            )
        )
        for i, (a, b) in enumerate(itertools.pairwise(bounds))
    ]
    for part in parts:
        assert perturb(part.model.model, by_own_rows, size=SIZE) > 4
    return parts


class Split:
    """The generator's engine and the workers of the other stages. `room`: of each for prefixes."""

    def __init__(self, bounds: Sequence[int] = TWO, *, room: int = 0, **changes: Any) -> None:
        self.parts = _loaded(tuple(bounds))
        self._room = room
        self.workers = [self.worker(number) for number in range(len(self.parts) - 1)]
        self.link = HoldingLink(self.workers, [part.expected for part in self.parts[1:]])
        fields = {"num_stages": len(self.parts), "end_layer": bounds[1], "prefill_chunk": CHUNK}
        stage_spec = small_spec(**(fields | {"prefix_cache_bytes": room} | changes))
        ticks = itertools.count(1)

        def clock() -> float:
            """Whose turn it is depends on what took how long: here as much in each run."""
            return next(ticks) / 1000

        self.engine: TextEngine = engine_of(self.parts[0], stage_spec, self.link, clock=clock)

    def worker(self, number: int) -> StageWorker:
        """One that knows nothing yet."""
        part = self.parts[number + 1]
        prefixes = PrefixStore(self._room, part.model.make_caches)
        return StageWorker(part.model, part.expected, time.monotonic, prefixes)

    def replace(self, number: int) -> None:
        """Replaces a stage by a runner without state."""
        self.workers[number] = self.worker(number)

    @property
    def leftovers(self) -> dict[str, object]:
        """Remaining state of requests, on any stage; empty if there is none."""
        engine: Any = self.engine._engine  # pyright: ignore[reportPrivateUsage]
        executor: Any = engine.executor
        states = {
            "requests": engine._requests,
            "in flight": list(engine._in_flight),
            "prefill": engine._prefill_forward,
            "prefill logs": executor._prefill_logs,
            "borders": executor._borders,
            "border rows": executor._border_rows,
            "generator": _held_by(executor.rounds),
            "bytes": self.engine.cache_bytes(),
            "on the way": self.link.away,
        }
        for number, worker in enumerate(self.workers, 1):
            internals: Any = worker
            states[f"stage {number}"] = [*internals._requests, *_held_by(internals._rounds)]
            states[f"bytes {number}"] = worker.cache_bytes()
        return {name: each for name, each in states.items() if each}


def _held_by(rounds: Any) -> list[object]:
    return [*rounds.groups.single, *rounds.groups.groups]


@functools.cache
def _whole() -> TextEngine:
    loaded = load_quietly(small_spec())
    assert perturb(loaded.model.model, by_own_rows, size=SIZE) > 4
    return engine_of(loaded, small_spec(prefill_chunk=CHUNK, batching=False))


@functools.cache
def _alone(prompt: tuple[int, ...], tokens: int, sampling: Sampling) -> Answer:
    fields = {"ignore_end": True, "top_logprobs": 0, "sampling": sampling}
    return answer(_whole(), request(prompt, 0, tokens, **fields))


def alone(engine_request: EngineRequest) -> list[tuple[object, ...]]:
    """Ids and log-probabilities by round, of the whole model, which answers nobody else."""
    got = _alone(tuple(engine_request.prompt), engine_request.max_tokens, engine_request.sampling)
    return [(round_.tokens, round_.logprobs) for round_ in got.rounds]


def tokens_of(*readers: Reader) -> list[tuple[object, ...]]:
    """The same of what readers were given, each the next attempt of the one before."""
    return [(round_.tokens, round_.logprobs) for reader in readers for round_ in reader.rounds]


def asks(prompt: Sequence[int], tokens: int, **changes: Any) -> EngineRequest:
    """Greedy unless said otherwise, with log-probabilities, and to its last token."""
    return request(prompt, 0, tokens, **({"ignore_end": True, "top_logprobs": 0} | changes))


def readers_of(count: int, **changes: Any) -> list[Reader]:
    """They come one after the other, and their answers have other lengths."""
    engine_requests = [
        asks(prompt(i, (7, 9, 20)[i % 3]), 14 + 3 * i, **changes) for i in range(count)
    ]
    return [Reader(each, begins=i) for i, each in enumerate(engine_requests)]


def few_tokens(count: int) -> list[Reader]:
    """Requests that come at once and take a few turns."""
    return [Reader(asks(prompt(i), 12)) for i in range(count)]


def lost_of(readers: Sequence[Reader]) -> list[Reader]:
    return [reader for reader in readers if reader.fault is not None]
