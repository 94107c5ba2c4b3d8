"""Answers are read again as prompts while nothing runs, so that the next turn begins after them.

In models whose numbers depend on how many rows a forward has: rows that were not read as a cold
prompt reads them would show.
"""

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import Answer, answer, request
from prefixes import (
    END,
    KINDS,
    ROOM,
    SYSTEM,
    cold,
    comparable,
    engine,
    of_class,
    probabilities,
    two_stages,
    words,
)
from zoo import VOCABULARY

from exo_node.mtp.schedule import Schedule
from exo_node.mtp.types import Sampling
from exo_node.shard.engine.answers.answer_reads import MAX_UNUSED, RECENT, AnswerReads
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.text.codec import TextCodec

QUESTION = [*SYSTEM, *words(40, 2), 7, 8]
ENDS = Sampling(logit_bias=((END, 100.0),))
"""The answer is the end token alone."""


def idle(served: TextEngine) -> None:
    """What a runner does while nobody asks it."""
    served.read_answer()
    loop: Any = served
    while loop._engine.step():
        pass


def ended(served: TextEngine, prompt: Sequence[int], k: int = 0, **changes: Any) -> Answer:
    got = answer(served, request(prompt, k, 4, sampling=ENDS, **changes))
    assert got.ids == (END,) and got.end.reason == "stop"
    return got


@pytest.mark.smoke
@pytest.mark.parametrize("k", [0, 3])
def test_the_next_turn_begins_after_the_answer_and_is_the_cold_one(k: int) -> None:
    warm = engine()
    _ = ended(warm, QUESTION, k)
    idle(warm)
    assert warm.live_requests == warm.cache_bytes() == 0
    following = [*QUESTION, END, *words(20, 3), 7, 8]
    got = answer(warm, request(following, k, 6))
    assert comparable(got) == cold(following, k)
    assert got.stats.cached_tokens == len(QUESTION) + 1
    assert sum(warm.prefix_hits.values()) == len(QUESTION) + 1, "its own hits are nobody's"


SPLIT = [("gemma3_text", 2), ("nemotron_h", 2), ("qwen3_next", 2)]
"""Kinds whose stages keep other things: windows, states, both states and rows."""


@pytest.fixture
def small_end(monkeypatch: pytest.MonkeyPatch) -> int:
    """An end token within the small vocabulary."""
    load, end = TextCodec.load, 5

    def with_end(folder: Path) -> TextCodec:
        codec = load(folder)
        codec.end_tokens = frozenset({end})
        return codec

    monkeypatch.setattr(TextCodec, "load", with_end)
    return end


@pytest.mark.parametrize(("kind", "stages"), [*((kind, 1) for kind in KINDS), *SPLIT])
def test_all_kinds_of_caches_whole_and_split(kind: str, stages: int, small_end: int) -> None:
    def new_engine() -> TextEngine:
        return of_class(kind, ROOM) if stages == 1 else two_stages(kind, ROOM).engine

    warm, draw = new_engine(), random.Random(3)
    question, more = ([draw.randrange(6, VOCABULARY) for _ in range(n)] for n in (104, 9))
    bias = Sampling(logit_bias=((small_end, 100.0),))
    assert answer(warm, request(question, 0, 1, sampling=bias)).ids == (small_end,)
    idle(warm)
    following = [*question, small_end, *more]
    expected, got = (
        answer(each, request(following, 0, 6, top_logprobs=0)) for each in (new_engine(), warm)
    )
    assert probabilities(got) == probabilities(expected)
    assert (expected.stats.cached_tokens, got.stats.cached_tokens) == (0, 105)


@pytest.mark.smoke
def test_a_request_that_comes_meanwhile_waits_for_no_more_than_the_step_in_progress() -> None:
    warm = engine()
    _ = ended(warm, QUESTION)
    loop: Any = warm
    loop._prefixes.clear()  # so that there is much to read
    warm.read_answer()
    assert loop._engine.step() and loop._engine.keys
    following = [*QUESTION, END, *words(20, 3), 7, 8]
    engine_request = request(following, 3, 6)
    steps = warm.generate(engine_request)
    _ = next(steps)
    assert loop._engine.keys == {(engine_request.name, 1)}
    steps.close()
    assert comparable(answer(warm, request(following, 3, 6))) == cold(following, 3)
    assert not loop._engine.keys and warm.cache_bytes() == 0


@pytest.mark.smoke
def test_nothing_is_read_while_a_request_is_in_progress() -> None:
    warm = engine()
    _ = ended(warm, QUESTION)
    steps = warm.generate(request(words(200, 9), 0, 8))
    _ = next(steps)
    loop: Any = warm
    before = loop._engine.keys
    warm.read_answer()
    assert loop._engine.keys == before
    steps.close()
    idle(warm)
    got = answer(warm, request([*QUESTION, END, 9, 9], 0, 1))
    assert got.stats.cached_tokens == len(QUESTION) + 1, "it is read afterwards"


def test_other_clients_do_not_meet_it() -> None:
    warm = engine()
    _ = ended(warm, QUESTION, cache_salt=b"alice-xx")
    idle(warm)
    following = [*QUESTION, END, *words(20, 3), 7, 8]
    for salt, cached in ((b"bob-xxxx", 0), (b"", 0), (b"alice-xx", len(QUESTION) + 1)):
        got = answer(warm, request(following, 0, 6, cache_salt=salt))
        assert got.stats.cached_tokens == cached and comparable(got) == cold(following, 0)


@pytest.mark.parametrize(
    "changes", [{"cache": False}, {"prompt_logprobs": True, "top_logprobs": 0}]
)
def test_an_answer_that_leaves_nothing_in_the_cache_is_not_read(changes: dict[str, Any]) -> None:
    warm = engine()
    _ = ended(warm, QUESTION, **changes)
    before = warm.prefix_cache_bytes
    idle(warm)
    assert warm.prefix_cache_bytes == before


def test_a_fault_of_such_a_forward_is_logged_and_harms_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = engine()
    _ = ended(warm, QUESTION)
    loop: Any = warm

    def fail(_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(loop._executor, "prefill", fail)
        idle(warm)
    assert "could not be read" in caplog.text
    assert not loop._engine.keys and warm.cache_bytes() == 0
    following = [*QUESTION, END, *words(20, 3), 7, 8]
    assert comparable(answer(warm, request(following, 0, 6))) == cold(following, 0)


SCHEDULE = Schedule(512, frozenset({END}))


def talk(reads: AnswerReads, prompt: list[int]) -> list[int]:
    """Asks and answers; returns the conversation."""
    parameters = request(prompt)
    reads.begin(parameters)
    reads.add(parameters, [*words(30, len(prompt)), END])
    return [*prompt, *words(30, len(prompt)), END]


def test_answers_that_no_prompt_continues_are_read_no_more_until_one_does() -> None:
    reads, takes = AnswerReads(SCHEDULE, 4096), list[bool]()
    for number in range(RECENT + MAX_UNUSED + 2):
        _ = talk(reads, words(50, 100 + number))
        takes.append(reads.take() is not None)
    assert takes == [True] * (RECENT + MAX_UNUSED - 1) + [False] * 3
    history = talk(reads, words(50, 900))
    assert reads.take() is None
    _ = talk(reads, [*history, *words(20, 901)])
    assert reads.take() is not None


@pytest.mark.smoke
def test_what_waits_is_bounded_and_the_newest_is_read_first() -> None:
    reads = AnswerReads(SCHEDULE, 4096)
    for number in range(3 * RECENT):
        _ = talk(reads, words(50 + number, number))
    lengths = list[int]()
    reads._unused = 0  # pyright: ignore[reportPrivateUsage]
    while (reading := reads.take()) is not None:
        lengths.append(reading[1])
    assert lengths == sorted(lengths, reverse=True) and len(lengths) == RECENT


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("answer_ids", "context", "is_read"),
    [
        ([*words(30, 1), END], 4096, True),
        ([], 4096, False),
        (words(30, 1), 4096, False),
        ([END], 4096, False),
        ([*words(30, 1), END], 73, False),
    ],
    ids=["whole", "empty", "cut", "short", "full"],
)
def test_answers_that_are_of_no_use_are_not_read(
    answer_ids: list[int], context: int, *, is_read: bool
) -> None:
    reads = AnswerReads(SCHEDULE, context)
    reads.add(request([*words(39, 1), END, 7, 8]), answer_ids)
    assert (reads.take() is not None) == is_read
