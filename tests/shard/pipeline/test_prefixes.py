"""Answers on what stages kept are the cold ones, whatever was asked, evicted or lost before.

Three stages of a small hybrid model whose numbers depend on how many rows a forward has: a prefix
that was read by other forwards than the cold prompt would show.
"""

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

import held_prefixes
import pytest
from budget import seeds
from engines import answer, changed, request
from held_prefixes import cache_of_stage, counted
from pipelines import Pipeline, small_pipeline
from prefixes import ALIEN, CHUNK, FIRST, OTHER, ROOM, SECOND, SYSTEM, turn, two_stages
from shims import by_own_rows, by_rows
from zoo import VOCABULARY

from exo_node.mtp.types import Round
from exo_node.placement.errors import InvalidFrame, PeerLost, StateLost
from exo_node.shard.engine.answers.events import AnswerEnd, Delta
from exo_node.shard.engine.prefixes.memory import PrefixCache
from exo_node.shard.engine.stage import StageWorker

TOKENS = 4
NOTHING = (1, 1, 1)
"""Room for no prefix; prompts are read by the same forwards."""


def pipeline(*rooms: int) -> Pipeline:
    return small_pipeline(rooms=rooms or (ROOM,) * 3, chunk=CHUNK, numbers=by_rows, size=0.4)


@functools.cache
def _alone() -> Pipeline:
    return pipeline(*NOTHING)


@functools.cache
def _cold(prompt: tuple[int, ...]) -> tuple[Round, ...]:
    return _alone().rounds(prompt, TOKENS)


def cold(prompt: Sequence[int]) -> tuple[Round, ...]:
    """The answer of stages with empty caches."""
    return _cold(tuple(prompt))


def ask(warm: Pipeline, prompt: Sequence[int]) -> int:
    """Checks the answer; the rows that were not read again."""
    got = answer(warm.engine, request(prompt, 0, TOKENS, ignore_eos=True, top_logprobs=0))
    assert got.rounds == cold(prompt)
    return got.stats.cached_tokens


def cached_ends(warm: Pipeline) -> list[int]:
    return [warm.engine.prefix_cache_bytes, *(w.prefix_cache_bytes for w in warm.workers)]


def caches_of(warm: Pipeline) -> list[PrefixCache]:
    return [
        held_prefixes.cache_of(warm.engine),
        *(cache_of_stage(worker) for worker in warm.workers),
    ]


def forget(worker: StageWorker) -> None:
    """Clears a stage's cache, as if requests needed the room."""
    prefixes = worker._prefixes  # pyright: ignore[reportPrivateUsage]
    assert prefixes is not None
    prefixes.clear()


def test_what_is_kept_is_not_read_again_on_any_stage() -> None:
    warm = pipeline()
    cached = list[int]()
    for prompt in (FIRST, SECOND, FIRST, OTHER, SECOND, ALIEN):
        warm.forwards.clear()
        cached.append(ask(warm, prompt))
        read = sum(end > cached[-1] for end in _ends(prompt)) + TOKENS - 1
        assert warm.forwards == [1, 2] * read
    # Forwards end at the chunk (160), the system's turn (300), a chunk (460); the last is not kept.
    assert cached == [0, 300, 300, 300, 460, 0]


def test_a_prompt_that_ends_where_a_state_is_kept_reads_its_last_forward() -> None:
    """Its logits are wanted, and nobody kept them."""
    warm = pipeline()
    _ = ask(warm, SECOND)
    assert ask(warm, SECOND[:460]) == 300


def _ends(prompt: Sequence[int]) -> list[int]:
    return [end for end in (160, 300, 460) if end < len(prompt)] + [len(prompt)]


@pytest.mark.smoke
@pytest.mark.parametrize("evicts", [1, 2, 3], ids=["first", "last", "both"])
def test_where_a_stage_evicted_all_read_again_and_keep_it_again(evicts: int) -> None:
    warm = pipeline()
    _ = ask(warm, FIRST)
    for number in (1, 2):
        if number & evicts:
            forget(warm.workers[number - 1])
    warm.forwards.clear()
    assert ask(warm, SECOND) == 0
    assert warm.forwards == [1, 2] * (len(_ends(SECOND)) + TOKENS - 1)
    warm.forwards.clear()
    assert ask(warm, SECOND) == 460
    assert warm.forwards == [1, 2] * TOKENS
    for stage in (warm.engine, *warm.workers):
        assert stage.prefix_hits == {"memory": 460}


@pytest.mark.smoke
def test_they_begin_after_the_most_that_all_of_them_have() -> None:
    warm = pipeline()
    _ = ask(warm, SECOND)
    first, last = (cache_of_stage(worker) for worker in warm.workers)
    evict(first, 460)
    assert ask(warm, [*SECOND, 5]) == 300
    evict(last, 460)
    evict(first, 300)  # it has the longest again, and the other one the one before
    assert ask(warm, [*SECOND, 6]) == 0


def evict(cache: PrefixCache, rows: int) -> None:
    """The state after so many rows."""
    for node in held_prefixes.nodes(cache):
        if node.end == rows:
            cache._evict(node)  # pyright: ignore[reportPrivateUsage]


def test_what_goes_between_the_question_and_the_first_block_begins_the_answer_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another request on that stage may need the room."""
    warm = pipeline()
    _ = ask(warm, FIRST)
    worker = warm.workers[1]
    look = worker.cached_ends

    def goes(*args: Any) -> list[int]:
        rows = look(*args)
        forget(worker)
        return rows

    with monkeypatch.context() as patched:
        patched.setattr(worker, "cached_ends", goes)
        with pytest.raises(StateLost, match="stage 2 has lost the state"):
            _ = answer(warm.engine, request(SECOND, 0, TOKENS, ignore_eos=True, name="anew"))
    assert [worker.live_requests for worker in warm.workers] == [0, 0]
    assert warm.rounds(SECOND, TOKENS, attempt=2, alone=True, name="anew") == cold(SECOND)
    assert ask(warm, SECOND) == 460


def test_the_generator_alone_decides_where_it_continues() -> None:
    warm = pipeline(1, ROOM, ROOM)
    assert [ask(warm, prompt) for prompt in (FIRST, SECOND, SECOND)] == [0, 0, 0]


def test_a_resume_on_stages_that_live_continues_after_the_prefix() -> None:
    """Starts another attempt, as if the link broke or the head changed."""
    warm = pipeline()
    _ = ask(warm, FIRST)
    warm.lose(2, 3)
    log = warm.until_lost(SECOND, TOKENS, name="late")
    survivor = warm.workers[1]
    survivor.forward = functools.partial(StageWorker.forward, survivor)
    again = {"attempt": 2, "replay": log, "name": "late", "top_logprobs": 0}
    got = answer(warm.engine, request(SECOND, 0, TOKENS, ignore_eos=True, **again))
    assert (*log, *got.rounds) == cold(SECOND)
    assert got.stats.cached_tokens == 460, "the first attempt read as far"


def test_a_prefix_of_an_attempt_that_is_over_is_refused() -> None:
    warm = pipeline()
    _ = ask(warm, FIRST)
    worker = warm.workers[0]
    worker.release(("old", 1))
    with pytest.raises(InvalidFrame, match="is over"):
        _ = worker.cached_ends(("old", 1), SYSTEM, [160, 140], [300])
    assert worker.live_requests == 0


def test_bytes_of_each_stage_keep_their_bound_while_requests_run() -> None:
    """A conversation that outgrows half of the room: what is kept gives way to its rows."""
    room = 1100 * 1536
    stages = two_stages("llama", room, by_own_rows)
    warm, (worker,) = stages.engine, stages.workers
    alone = two_stages("llama", 1, by_own_rows).engine
    talk, cached = [(37 * i + 11) % (VOCABULARY - 1) + 1 for i in range(200)], list[int]()
    for number in range(5):
        engine_request = request(talk, 0, 70, ignore_eos=True, top_logprobs=0)
        rounds = list[Round]()
        for event in warm.generate(engine_request):
            assert counted(held_prefixes.cache_of(warm)) + warm.cache_bytes() <= room
            assert counted(cache_of_stage(worker)) + worker.cache_bytes() <= room
            if isinstance(event, Delta):
                rounds.append(event.round)
            elif isinstance(event, AnswerEnd):
                cached.append(event.stats.cached_tokens)
        assert tuple(rounds) == answer(alone, changed(engine_request, name=f"cold-{number}")).rounds
        talk = [*talk, *(t for r in rounds for t in r.tokens), *talk[3:60]]
    assert cached[:3] == [0, 192, 320] and 0 < cached[4] < len(talk) - 150


# --------------------------------------------------------------------------------- random traces


ROOMS = (700_000, 1_500_000, ROOM, ROOM)


class Trace:
    """Requests, cancels, evictions and losses in a random order; every answer is checked."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._rooms = self._draw.choices(ROOMS, k=3)
        self._warm = pipeline(*self._rooms)
        self._names = (f"t{seed}-{number}" for number in itertools.count())
        self._prompts = [FIRST, SECOND, OTHER]
        self.hits = 0

    def run(self, steps: int) -> None:
        kinds = (self._ask, self._ask, self._together, self._cancel, self._evict, self._lose)
        for _ in range(steps):
            self._draw.choice((*kinds, self._restart))()
            for cache, room in zip(caches_of(self._warm), self._rooms, strict=True):
                assert counted(cache) <= room
            assert [worker.live_requests for worker in self._warm.workers] == [0, 0]

    def _prompt(self) -> list[int]:
        """One of before, what begins like it, or its next turn."""
        base = self._draw.choice(self._prompts)
        match self._draw.randrange(4):
            case 0:
                base = base[: self._draw.choice((160, 300, self._draw.randrange(150, len(base))))]
                base += self._draw.choice(([], [5, 6]))
            case 1 | 2:
                rows = self._draw.randrange(5, 260)
                base = [*base, *turn(rows, self._draw.randrange(10**6)), 7, 8]
            case _:
                return base
        if len(base) < 1400:
            self._prompts.append(base)
        return base

    def _ask(self) -> None:
        self.hits += ask(self._warm, self._prompt()) > 0

    def _together(self) -> None:
        prompts = [self._prompt() for _ in range(3)]
        running = {number: self._events(prompt) for number, prompt in enumerate(prompts)}
        rounds_of_each: list[list[Round]] = [[] for _ in prompts]
        while running:
            number = self._draw.choice(list(running))
            event = next(running[number], None)
            if event is None:
                del running[number]
            elif isinstance(event, Delta):
                rounds_of_each[number].append(event.round)
        for prompt, rounds in zip(prompts, rounds_of_each, strict=True):
            assert [(r.tokens, r.logprobs) for r in rounds] == [
                (r.tokens, r.logprobs) for r in cold(prompt)
            ]

    def _events(self, prompt: Sequence[int]) -> Iterator[object]:
        fields = {"ignore_eos": True, "top_logprobs": 0, "name": next(self._names)}
        return self._warm.engine.generate(request(prompt, 0, TOKENS, **fields))

    def _cancel(self) -> None:
        running = cast("Any", self._events(self._prompt()))
        for _ in range(self._draw.randrange(1, 7)):
            _ = next(running, None)
        running.close()

    def _evict(self) -> None:
        number = self._draw.randrange(3)
        room = max(
            0, self._rooms[number] - self._draw.randrange(cached_ends(self._warm)[number] + 1)
        )
        caches_of(self._warm)[number].evict(room)

    def _restart(self) -> None:
        self._warm.replace(self._draw.randrange(3))

    def _lose(self) -> None:
        """A stage is lost, once or twice; the entry node asks again with what it was told."""
        name, prompt, log, anew = next(self._names), self._prompt(), list[Round](), False
        for attempt in itertools.count(1):
            lost = self._draw.choice((1, 2))
            if attempt < 3 and not anew:
                self._warm.lose(lost, self._draw.randrange(6))
            fields = {"attempt": attempt, "replay": tuple(log), "alone": anew}
            engine_request = request(
                prompt, 0, TOKENS, ignore_eos=True, top_logprobs=0, name=name, **fields
            )
            try:
                for event in self._warm.engine.generate(engine_request):
                    if isinstance(event, Delta):
                        log.append(event.round)
                break
            except PeerLost as fault:
                anew = isinstance(fault, StateLost)
            finally:
                self._heal(lost)
        assert tuple(log) == cold(prompt)

    def _heal(self, lost: int) -> None:
        """Replaces a stage by another runner, or lets it return late."""
        if self._draw.random() < 0.6:
            self._warm.replace(lost)
            return
        worker = self._warm.workers[lost - 1]
        worker.forward = functools.partial(StageWorker.forward, worker)


def test_random_traces_are_the_cold_answers() -> None:
    hits = list[int]()
    for seed in seeds(4, 200):
        trace = Trace(seed)
        trace.run(12)
        hits.append(trace.hits)
    assert sum(hits) >= len(hits), "hardly anything was gone on from: it shows nothing"
