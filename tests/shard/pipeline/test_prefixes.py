"""Answers on what stages kept are the cold ones, whatever was asked, evicted or lost before.

Three stages of a small hybrid model whose numbers depend on how many rows a forward has: a prefix
that was read by other forwards than the cold prompt would show.
"""

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import held_prefixes
import pytest
from budget import seeds
from engines import answer, request
from held_prefixes import counted, kept_by
from pipelines import Pipeline
from prefixes import ALIEN, CHUNK, FIRST, OTHER, ROOM, SECOND, SHORT, SYSTEM, turn, two_stages
from shims import by_own_rows
from zoo import VOCABULARY

from exo_node.mtp.types import Round
from exo_node.placement.errors import InvalidFrame, PeerLost, StateLost
from exo_node.shard.engine.events import Delta, Done
from exo_node.shard.engine.prefix_cache import PrefixCache
from exo_node.shard.pipeline import stage as stage_module
from exo_node.shard.pipeline.frames import HiddenBlock
from exo_node.shard.pipeline.stage import StageWorker

TOKENS = 4
NOTHING = (1, 1, 1)
"""Room for no prefix; prompts are read by the same forwards."""


def pipeline(*rooms: int) -> Pipeline:
    return Pipeline(prefill_chunk=CHUNK, tokens=TOKENS, rooms=rooms or (ROOM,) * 3)


@functools.cache
def _alone() -> Pipeline:
    return pipeline(*NOTHING)


@functools.cache
def _cold(prompt: tuple[int, ...]) -> tuple[Round, ...]:
    return _alone().undisturbed(prompt)


def cold(prompt: Sequence[int]) -> tuple[Round, ...]:
    """By stages that never read anything before."""
    return _cold(tuple(prompt))


def ask(warm: Pipeline, prompt: Sequence[int]) -> int:
    """Checks the answer; the rows that were not read again."""
    got = answer(warm.engine, request(prompt, 0, TOKENS, ignore_end=True, top_logprobs=0))
    assert got.rounds == cold(prompt)
    return got.stats.cached_tokens


def kept(warm: Pipeline) -> list[int]:
    return [warm.engine.prefix_cache_bytes, *(w.prefix_cache_bytes for w in warm.workers)]


def caches_of(warm: Pipeline) -> list[PrefixCache]:
    return [held_prefixes.kept(warm.engine), *(kept_by(worker) for worker in warm.workers)]


def forget(worker: StageWorker) -> None:
    """As where requests needed the room."""
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


@pytest.mark.parametrize("evicts", [1, 2, 3], ids=["first", "last", "both"])
def test_a_stage_that_evicted_is_rebuilt_by_the_one_before_it_and_keeps_it_again(
    evicts: int,
) -> None:
    warm = pipeline()
    _ = ask(warm, FIRST)
    lost = [number for number in (1, 2) if number & evicts]
    for number in lost:
        forget(warm.workers[number - 1])
    warm.forwards.clear()
    assert ask(warm, SECOND) == 300
    for number in (1, 2):
        behind = 2 + TOKENS - 1
        assert warm.forwards.count(number) == behind + (2 if number in lost else 0)
    warm.forwards.clear()
    assert ask(warm, SECOND) == 460
    assert warm.forwards == [1, 2] * TOKENS


def test_a_stage_without_room_reads_all_and_the_others_do_not() -> None:
    warm = pipeline(ROOM, 1, ROOM)
    _ = ask(warm, FIRST)
    warm.forwards.clear()
    assert ask(warm, SECOND) == 300
    assert warm.forwards.count(1) == warm.forwards.count(2) + 2
    assert kept(warm)[1] == 0


def test_the_generator_alone_decides_where_it_goes_on() -> None:
    warm = pipeline(1, ROOM, ROOM)
    assert [ask(warm, prompt) for prompt in (FIRST, SECOND, SECOND)] == [0, 0, 0]


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("after", [0, 1, 3], ids=["prompt-0", "prompt-1", "answer"])
def test_a_stage_that_is_lost_behind_a_prefix_is_rebuilt_with_it(lost: int, after: int) -> None:
    warm = pipeline()
    _ = ask(warm, FIRST)
    warm.lose(lost, after)
    log = warm.until_lost(SECOND, request="lost")
    warm.replace(lost)
    assert (*log, *warm.rest(log, 2, SECOND, request="lost")) == cold(SECOND)
    other = 3 - lost
    assert warm.forwards.count(lost) > warm.forwards.count(other), "the survivor kept its rows"
    assert ask(warm, SECOND) == 460


def test_a_lost_generator_and_all_stages_at_once() -> None:
    for gone in ((0,), (0, 1, 2)):
        warm = pipeline()
        _ = ask(warm, FIRST)
        warm.lose(2, 3)
        log = warm.until_lost(SECOND, request="gone")
        for number in gone:
            warm.replace(number)
        if 2 not in gone:
            survivor = warm.workers[1]
            survivor.forward = functools.partial(StageWorker.forward, survivor)
        assert (*log, *warm.rest(log, 2, SECOND, request="gone")) == cold(SECOND)


def test_what_left_a_stage_and_was_too_much_to_keep_begins_the_answer_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm = pipeline()
    _ = ask(warm, FIRST)
    forget(warm.workers[1])
    prefixes: Any = warm.workers[0]._prefixes  # pyright: ignore[reportPrivateUsage]
    for node in prefixes._kept._root.below:
        node.sent = b""
    with pytest.raises(StateLost, match="more was sent than is kept"):
        _ = ask(warm, SECOND)
    name = {"request": "anew"}
    assert warm.rest((), 2, SECOND, rebuild_all=True, **name) == cold(SECOND)
    assert ask(warm, SECOND) == 460


def test_rows_that_follow_wait_for_those_that_are_rebuilt_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a network the rest of the prompt is sent before a stage has said what it lacks."""
    warm = pipeline()
    sent = list[HiddenBlock]()
    first = warm.workers[0]
    computed = first.forward

    def noted(block: HiddenBlock) -> list[HiddenBlock]:
        sent.append(block)
        return computed(block)

    first.forward = noted
    assert ask(warm, SECOND) == 0
    prompt = [replace(block, request="late") for block in sent[: len(_ends(SECOND))]]
    wanted = [replace(b, request="late") for b in _told_by(warm.workers[0], prompt)]
    worker = pipeline().workers[0]
    tokens, schedule = SECOND[:300], [160, 140]
    assert worker.adopt("late", 1, 300, tokens=tokens, schedule=schedule) == (0, None)
    assert [worker.forward(block) for block in prompt[2:]] == [[]] * (len(prompt) - 2)
    rebuilds = [replace(block, rebuilds=True) for block in prompt[:2]]
    out = [each for block in rebuilds for each in worker.forward(block)]
    assert [block.data for block in out] == [block.data for block in wanted[2:]]
    monkeypatch.setattr(stage_module, "TRAIL_BYTES", len(prompt[2].data))
    full = pipeline().workers[0]
    _ = full.adopt("late", 1, 300, tokens=tokens, schedule=schedule)
    assert full.forward(prompt[2]) == []
    with pytest.raises(StateLost, match="wait already"):
        _ = full.forward(prompt[3])


def _told_by(worker: StageWorker, blocks: Sequence[HiddenBlock]) -> list[HiddenBlock]:
    fresh = [replace(block, request="fresh") for block in blocks]
    return [out for block in fresh for out in worker.forward(block)]


def test_a_prefix_of_an_attempt_that_is_over_is_refused() -> None:
    warm = pipeline()
    _ = ask(warm, FIRST)
    worker = warm.workers[0]
    worker.release("old", 1)
    with pytest.raises(InvalidFrame, match="is over"):
        _ = worker.adopt("old", 1, 300, tokens=SYSTEM, schedule=[160, 140])
    assert worker.live_requests == 0


def test_what_a_cancelled_request_read_is_kept() -> None:
    warm = pipeline()
    running = warm.engine.generate(request(SECOND, 0, TOKENS))
    while warm.workers[1].prefix_cache_bytes == 0:
        _ = next(running)
    running.close()
    assert [worker.live_requests for worker in warm.workers] == [0, 0]
    assert ask(warm, SECOND) in (300, 460)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_other_kinds_of_cache_give_the_cold_answers(kind: str) -> None:
    """Full attention, windows whose rows are written over, recurrent states."""
    (warm, worker), (alone, _) = two_stages(kind, ROOM), two_stages(kind, 1)
    ids = [(37 * i + 11) % (VOCABULARY - 1) + 1 for i in range(224)]
    cached = 0
    for number, rows in enumerate((160, 208, 160, 224)):
        prompt = [*ids[:rows], rows % VOCABULARY]
        if number == 3:
            forget(worker)  # it is rebuilt
        got, wanted = (answer(each, request(prompt, 0, TOKENS)) for each in (warm, alone))
        assert got.rounds == wanted.rounds
        cached = got.stats.cached_tokens
    assert cached == 3 * SHORT


def test_bytes_of_each_stage_keep_their_bound_while_requests_run() -> None:
    """A conversation that outgrows half of the room: what is kept gives way to its rows."""
    room = 1100 * 1536
    warm, worker = two_stages("llama", room, by_own_rows)
    alone, _ = two_stages("llama", 1, by_own_rows)
    talk, cached = [(37 * i + 11) % (VOCABULARY - 1) + 1 for i in range(200)], list[int]()
    for number in range(5):
        asked = request(talk, 0, 70, ignore_end=True, top_logprobs=0)
        rounds = list[Round]()
        for event in warm.generate(asked):
            assert counted(held_prefixes.kept(warm)) + warm.cache_bytes() <= room
            assert counted(kept_by(worker)) + worker.cache_bytes() <= room
            if isinstance(event, Delta):
                rounds.append(event.round)
            elif isinstance(event, Done):
                cached.append(event.stats.cached_tokens)
        assert tuple(rounds) == answer(alone, replace(asked, request=f"cold-{number}")).rounds
        talk = [*talk, *(t for r in rounds for t in r.tokens), *talk[3:60]]
    assert cached[:3] == [0, 192, 320] and 0 < cached[4] < len(talk) - 150


# --------------------------------------------------------------------------------- random traces


ROOMS = (1, 300_000, 700_000, 1_500_000, ROOM)


class Trace:
    """Requests, cancels, evictions and losses in a random order; every answer is checked."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._rooms = [self._draw.choice(ROOMS[1:]), *self._draw.choices(ROOMS, k=2)]
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
        told: list[list[Round]] = [[] for _ in prompts]
        while running:
            number = self._draw.choice(list(running))
            event = next(running[number], None)
            if event is None:
                del running[number]
            elif isinstance(event, Delta):
                told[number].append(event.round)
        for prompt, rounds in zip(prompts, told, strict=True):
            assert [(r.tokens, r.logprobs) for r in rounds] == [
                (r.tokens, r.logprobs) for r in cold(prompt)
            ]

    def _events(self, prompt: Sequence[int]) -> Iterator[object]:
        fields = {"ignore_end": True, "top_logprobs": 0, "request": next(self._names)}
        return self._warm.engine.generate(request(prompt, 0, TOKENS, **fields))

    def _cancel(self) -> None:
        running = cast("Any", self._events(self._prompt()))
        for _ in range(self._draw.randrange(1, 7)):
            _ = next(running, None)
        running.close()

    def _evict(self) -> None:
        number = self._draw.randrange(3)
        if number:
            prefixes = self._warm.workers[number - 1]._prefixes  # pyright: ignore[reportPrivateUsage]
        else:
            prefixes = self._warm.engine._earlier.prefixes  # pyright: ignore[reportPrivateUsage]
        assert prefixes is not None
        room = max(0, self._rooms[number] - self._draw.randrange(kept(self._warm)[number] + 1))
        prefixes.shrink(room)

    def _restart(self) -> None:
        self._warm.replace(self._draw.randrange(3))

    def _lose(self) -> None:
        """A stage is lost, once or twice; the entry node asks again with what it was told."""
        name, prompt, log, anew = next(self._names), self._prompt(), list[Round](), False
        for attempt in itertools.count(1):
            lost = self._draw.choice((1, 2))
            if attempt < 3 and not anew:
                self._warm.lose(lost, self._draw.randrange(6))
            fields = {"attempt": attempt, "replay": tuple(log), "rebuild_all": anew}
            asked = request(
                prompt, 0, TOKENS, ignore_end=True, top_logprobs=0, request=name, **fields
            )
            try:
                for event in self._warm.engine.generate(asked):
                    if isinstance(event, Delta):
                        log.append(event.round)
                break
            except PeerLost as fault:
                anew = isinstance(fault, StateLost)
            finally:
                self._heal(lost)
        assert tuple(log) == cold(prompt)

    def _heal(self, lost: int) -> None:
        """By another runner; or it was only late, and is there again."""
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
