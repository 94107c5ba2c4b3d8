"""A conversation longer than half of the room finds its prefix on every stage.

While a request runs, its rows are in its own caches only, on each stage by itself; what is kept
gets them at its end. The model's numbers depend on how many rows a forward has.
"""

import functools
import random
from collections.abc import Generator
from typing import Any

import mlx.core as mx
import pytest
from budget import seeds
from engines import answer, request
from held_prefixes import counted, kept, kept_by, lent, lent_of
from prefixes import SHORT, two_stages
from readers import Reader, together
from shims import by_own_rows
from zoo import VOCABULARY

from exo_node.mtp.types import Round
from exo_node.placement.errors import StateLost
from exo_node.shard.engine.engine import TextEngine
from exo_node.shard.engine.events import Delta, Done
from exo_node.shard.engine.request import EngineRequest
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.pipeline.frames import HiddenBlock

TOKENS = 4
ROOMS = {"llama": 1100 * 1536, "qwen3_next": 560 * 512 + 330 * 512 + 7 * 42_000}
"""Bytes of each stage: the rows of a context, as a plan has it. Of the other also what goes to the
next stage, as many bytes for so small a model, and states at borders."""
ROWS = {"llama": 620, "qwen3_next": 330}


def ids(rows: int, seed: int = 11) -> list[int]:
    return [(37 * i + seed) % (VOCABULARY - 1) + 1 for i in range(rows)]


@functools.cache
def _cold(kind: str, prompt: tuple[int, ...], tokens: int) -> tuple[Round, ...]:
    return answer(_alone(kind), ask(prompt, tokens)).rounds


@functools.cache
def _alone(kind: str) -> TextEngine:
    return two_stages(kind, 1, by_own_rows)[0]


def cold(kind: str, prompt: list[int], tokens: int = TOKENS) -> tuple[Round, ...]:
    """Of stages that never read anything before."""
    return _cold(kind, tuple(prompt), tokens)


def ask(prompt: Any, tokens: int = TOKENS, **changes: Any) -> EngineRequest:
    return request(list(prompt), 0, tokens, ignore_end=True, top_logprobs=0, **changes)


class Stages:
    """Both of them, with the bytes of each within its room at every turn."""

    def __init__(self, kind: str, contexts: int = 1) -> None:
        self.room = contexts * ROOMS[kind]
        self.engine, self.worker = two_stages(kind, self.room, by_own_rows)
        self.computed = 0
        """Forwards of the second stage."""
        plain = self.worker._forward  # pyright: ignore[reportPrivateUsage]

        def forward(session: Any, block: HiddenBlock) -> list[HiddenBlock]:
            self.computed += len(block.schedule or (1,))
            return plain(session, block)

        self.worker._forward = forward  # pyright: ignore[reportPrivateUsage]

    def drive(self, asked: EngineRequest) -> Generator[Any]:
        for event in self.engine.generate(asked):
            self.check()
            yield event
        self.check()

    def check(self) -> None:
        assert counted(kept(self.engine)) + self.engine.cache_bytes() <= self.room
        assert counted(kept_by(self.worker)) + self.worker.cache_bytes() <= self.room

    def lent(self) -> tuple[int, int]:
        return len(lent(self.engine)), len(lent_of(kept_by(self.worker)))

    def told(self, asked: EngineRequest) -> tuple[tuple[Round, ...], int]:
        """Its rounds and the cached tokens; nothing stays lent."""
        rounds, cached = list[Round](), -1
        for event in self.drive(asked):
            if isinstance(event, Delta):
                rounds.append(event.round)
            elif isinstance(event, Done):
                cached = event.stats.cached_tokens
        assert self.lent() == (0, 0)
        assert self.engine.cache_bytes() == self.worker.cache_bytes() == 0
        return tuple(rounds), cached


@pytest.mark.parametrize("kind", ROOMS)
def test_the_second_turn_of_a_long_conversation_reads_what_is_new_on_each_stage(kind: str) -> None:
    stages, talk = Stages(kind), ids(ROWS[kind])
    found = list[int]()
    for number in range(3):
        stages.computed = 0
        rounds, cached = stages.told(ask(talk))
        assert rounds == cold(kind, talk)
        read = -(-len(talk) // SHORT) - cached // SHORT
        assert stages.computed == read + TOKENS - 1, "the second stage kept as much"
        found.append(cached)
        talk = [*talk, *(t for r in rounds for t in r.tokens), *ids(20, number)]
    assert found[0] == 0
    assert min(found[1:]) >= ROWS[kind] // SHORT * SHORT


def running(stages: Stages, prompt: list[int], tokens: int = 60) -> Generator[Any]:
    """An answer behind its first token, which has its rows to itself."""
    events = stages.drive(ask(prompt, tokens))
    while not isinstance(next(events), Delta):
        pass
    kept(stages.engine)._lend(0)  # pyright: ignore[reportPrivateUsage]
    kept_by(stages.worker)._lend(0)  # pyright: ignore[reportPrivateUsage]
    assert all(stages.lent())
    return events


def test_others_read_the_rows_of_a_request_that_runs() -> None:
    stages, shared = Stages("llama"), ids(200)
    first = running(stages, shared)
    other = [*shared, *ids(20, 5)]
    rounds, cached = list[Round](), 0
    for event in stages.engine.generate(ask(other)):
        if isinstance(event, Delta):
            rounds.append(event.round)
        elif isinstance(event, Done):
            cached = event.stats.cached_tokens
    assert cached == 192 and tuple(rounds) == cold("llama", other)
    for _ in first:
        pass
    assert stages.lent() == (0, 0)
    assert stages.told(ask(other)) == (cold("llama", other), 192)


def test_rows_of_requests_that_share_forwards_are_read_and_given_back() -> None:
    """Their rows lie in a group's caches on both stages."""
    stages, shared = Stages("llama", contexts=4), ids(140)
    prompts = [[*shared, *ids(3 + number, number)] for number in range(6)]
    readers = [
        Reader(ask(prompt, 16), begins=12 * (number > 3)) for number, prompt in enumerate(prompts)
    ]
    merged = 0

    def lend(_: int) -> None:
        nonlocal merged
        sessions = stages.worker._sessions.values()  # pyright: ignore[reportPrivateUsage]
        merged += any(s.state.group is not None for s in sessions)
        kept(stages.engine)._lend(0)  # pyright: ignore[reportPrivateUsage]
        kept_by(stages.worker)._lend(0)  # pyright: ignore[reportPrivateUsage]

    together(stages.engine, readers, lend)
    assert merged > 10
    for reader, prompt in zip(readers, prompts, strict=True):
        assert reader.fault is None and reader.done is not None
        assert [t for r in cold("llama", prompt, 16) for t in r.tokens] == reader.ids
        assert reader.done.stats.cached_tokens == 128 or not reader.begins
    assert stages.lent() == (0, 0)
    assert stages.told(ask(prompts[5], 16)) == (cold("llama", prompts[5], 16), 128)


def test_what_is_kept_gives_way_to_an_answer_that_grows() -> None:
    """Caches grow by 256 rows at once."""
    stages = Stages("llama")
    _ = stages.told(ask(ids(300)))
    _ = stages.told(ask(ids(500, 1), 40))
    assert stages.told(ask(ids(500, 1)))[1] == 448


def test_a_shared_forward_that_fails_loses_what_lay_with_its_requests_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages, prompts = (
        Stages("llama", contexts=4),
        [ids(140 + number, number) for number in range(4)],
    )
    readers = [Reader(ask(prompt, 40)) for prompt in prompts]
    plain, left = StageModel.hidden, iter(range(60))

    def hidden(model: StageModel, tokens: mx.array, *others: Any) -> mx.array:
        if model.first > 0 and len(tokens) > 1 and all(stages.lent()) and next(left, None) is None:
            raise RuntimeError("as a GPU that fails")
        return plain(model, tokens, *others)

    monkeypatch.setattr(StageModel, "hidden", hidden)

    def lend(_: int) -> None:
        for cache in (kept(stages.engine), kept_by(stages.worker)):
            cache._lend(0)  # pyright: ignore[reportPrivateUsage]

    together(stages.engine, readers, lend)
    assert [type(reader.fault) for reader in readers].count(StateLost) > 1
    assert len(stages.engine.expire(-1.0)) > 1  # what they had here waited for another attempt
    assert stages.lent() == (0, 0) and stages.worker.live_requests == 0
    monkeypatch.undo()
    assert stages.told(ask(prompts[0]))[0] == cold("llama", prompts[0])


def test_a_stage_that_goes_back_into_the_prompt_has_nothing_of_it_for_others() -> None:
    stages, prompt = Stages("llama"), ids(200)
    events = running(stages, prompt)
    [session] = stages.worker._sessions.values()  # pyright: ignore[reportPrivateUsage]
    state, own = session.state, stages.worker._own(session.state)  # pyright: ignore[reportPrivateUsage]
    state.last_rows = state.position
    state.go_back(own, 195)
    assert lent_of(kept_by(stages.worker)) != []
    state.last_rows = state.position
    state.go_back(own, 130)
    assert lent_of(kept_by(stages.worker)) == []
    events.close()


def test_what_nobody_goes_on_with_is_given_back() -> None:
    """An attempt is lost, and no other one follows within its lease."""
    stages, prompt = Stages("llama"), ids(200)
    asked = ask(prompt, 60)
    events = stages.engine.generate(asked)
    while not isinstance(next(events), Delta):
        pass
    for cache in (kept(stages.engine), kept_by(stages.worker)):
        cache._lend(0)  # pyright: ignore[reportPrivateUsage]
    stages.engine.park(asked.request, 1)
    events.close()
    assert all(stages.lent())
    assert stages.engine.expire(-1.0) == [asked.request]
    assert stages.lent() == (0, 0)
    assert stages.told(ask(prompt)) == (cold("llama", prompt), 192)


class Trace:
    """Conversations that go on, branch, run beside each other, are cancelled, lost and lent."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._stages = Stages("llama", contexts=self._draw.choice((1, 1, 2)))
        self._talks = [ids(self._draw.randrange(100, 300), seed)]
        self.cached = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._draw.choice((self._turn, self._beside, self._cancelled, self._resumed))()
            assert self._stages.lent() == (0, 0)
            assert self._stages.worker.live_requests == self._stages.engine.cache_bytes() == 0

    def _prompt(self) -> list[int]:
        talk = self._draw.choice(self._talks)
        rows = self._draw.randrange(64, len(talk) + 1)
        base = self._draw.choice((talk, talk, talk[:rows]))
        talk = [*base, *ids(self._draw.randrange(1, 90), self._draw.randrange(99))]
        if len(talk) < 600:
            self._talks.append(talk)
        return talk

    def _turn(self) -> None:
        prompt = self._prompt()
        rounds, cached = self._stages.told(ask(prompt))
        assert rounds == cold("llama", prompt)
        self.cached += cached

    def _begun(self, prompt: list[int]) -> tuple[EngineRequest, Generator[Any]]:
        asked = ask(prompt)
        return asked, self._stages.engine.generate(asked)

    def _lend(self) -> None:
        for cache in (kept(self._stages.engine), kept_by(self._stages.worker)):
            if self._draw.random() < 0.3:
                cache._lend(self._draw.randrange(cache.bytes + 1))  # pyright: ignore[reportPrivateUsage]

    def _beside(self) -> None:
        prompts = [self._prompt() for _ in range(self._draw.choice((2, 3, 5)))]
        readers = [
            Reader(ask(p), self._draw.randrange(9), self._draw.choice((None, None, 9)))
            for p in prompts
        ]
        together(self._stages.engine, readers, lambda _: self._lend())
        for reader, prompt in zip(readers, prompts, strict=True):
            wanted = [t for r in cold("llama", prompt) for t in r.tokens]
            assert reader.fault is None
            self.cached += reader.done.stats.cached_tokens if reader.done else 0
            assert wanted[: len(reader.ids)] == reader.ids
            assert reader.ends is not None or reader.ids == wanted

    def _cancelled(self) -> None:
        _, events = self._begun(self._prompt())
        for _ in range(self._draw.randrange(1, 14)):
            _ = next(events, None)
            self._lend()
        events.close()

    def _resumed(self) -> None:
        """The attempt is given up on its way; the next one takes its state up."""
        prompt, log = self._prompt(), list[Round]()
        asked, events = self._begun(prompt)
        for _ in range(self._draw.randrange(1, 14)):
            event = next(events, None)
            if isinstance(event, Delta):
                log.append(event.round)
            self._lend()
        if len(log) == TOKENS:
            events.close()
            return
        self._stages.engine.park(asked.request, 1)
        events.close()
        fields: dict[str, Any] = {"request": asked.request, "attempt": 2, "replay": tuple(log)}
        anew = self._draw.random() < 0.3
        for event in self._stages.engine.generate(ask(prompt, **fields, rebuild_all=anew)):
            if isinstance(event, Delta):
                log.append(event.round)
            self._lend()
        assert tuple(log) == cold("llama", prompt)


def test_random_traces_are_the_cold_answers() -> None:
    cached = 0
    for seed in seeds(2, 100):
        trace = Trace(seed)
        trace.run(8)
        cached += trace.cached
    assert cached > 1000, "hardly anything was gone on from: it shows nothing"
