"""Answers on a kept prefix are the cold ones, whatever was asked before; bytes keep their bound.

A small model whose numbers depend on how many rows a forward has: a prefix that was read by other
forwards than the cold prompt would show.
"""

import random
from itertools import chain
from typing import Any

import mlx.core as mx
import pytest
from budget import seeds
from engines import answer, load_quietly, request
from held_prefixes import prefix_of
from prefixes import (
    ALIEN,
    FIRST,
    KINDS,
    OTHER,
    ROOM,
    SECOND,
    SHORT,
    SYSTEM,
    TOKENS,
    cold,
    comparable,
    engine,
    of_class,
    turn,
    two_stages,
)
from small import small_spec
from zoo import VOCABULARY

from exo_node.placement.errors import NumericError
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.prefixes.prompt_path import key_of


@pytest.mark.parametrize("k", [0, pytest.param(3, marks=pytest.mark.smoke)])
def test_a_b_a_and_a_branch_are_the_cold_answers(k: int) -> None:
    warm = engine()
    cached: list[int] = []
    for prompt in (FIRST, SECOND, FIRST, OTHER, SECOND, ALIEN):
        got = answer(warm, request(prompt, k, TOKENS))
        assert comparable(got) == cold(prompt, k)
        cached.append(got.stats.cached_tokens)
    # Forwards end at the chunk (160), the system's turn (300), a chunk (460); the last is not kept.
    assert cached == [0, 300, 300, 300, 460, 0]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_prompt_is_found_by_who_asked_it_alone_and_answers_do_not_differ(stages: int) -> None:
    """Else `cached_tokens` tells the holder of one token what that of another one asked."""
    warm = engine() if stages == 1 else two_stages("llama", ROOM).engine
    k, prompt = (3, FIRST) if stages == 1 else (0, [id_ % VOCABULARY for id_ in FIRST])
    alice, bob, nobody = b"alice-xx", b"bob-xxxx", b""
    cached: list[tuple[bytes, bool]] = []
    answers: set[str] = set()
    for salt in (alice, bob, nobody, alice, bob, nobody):
        got = answer(warm, request(prompt, k, TOKENS, cache_salt=salt))
        answers.add(str(comparable(got)))
        cached.append((salt, got.stats.cached_tokens > 0))
    assert [is_hit for _, is_hit in cached] == [False] * 3 + [True] * 3
    assert len(answers) == 1
    # One whose ids begin with the bytes of another's salt does not meet it.
    odd = int.from_bytes(alice, "little")
    assert key_of([1, 2], 0, 2, alice) != key_of([odd, 1, 2], 0, 3)


def test_an_engine_that_keeps_nothing_reads_prompts_by_the_same_forwards() -> None:
    """Else an answer that continues there would have other numbers."""
    asked = request(FIRST, 3, TOKENS, top_logprobs=0)
    assert answer(engine(room=0), asked).rounds == answer(engine(), asked).rounds


@pytest.mark.smoke
def test_what_is_kept_after_a_prefix_is_what_a_cold_prompt_leaves() -> None:
    """Caches, the head's, and the hidden states that it is yet to read: bit for bit."""
    warm, alone = engine(), engine()
    for prompt in (FIRST, SECOND):
        _ = answer(warm, request(prompt, 3, 1))
    _ = answer(alone, request(SECOND, 3, 1))
    some, others = (prefix_of(each, request(SECOND, 3, 1)) for each in (warm, alone))
    assert some is not None and others is not None and some.rows == others.rows == 460
    assert some.draft is not None and others.draft is not None
    mine, theirs = some.arrays(), others.arrays()
    assert len(mine) == len(theirs) > 10
    assert some.draft.rows == others.draft.rows == 460 - some.draft.unread_rows < 460
    assert all(mx.array_equal(a, b).item() for a, b in zip(mine, theirs, strict=True))


def test_what_a_plain_answer_kept_gives_a_drafting_one_the_same_drafts() -> None:
    """It has no drafter's state: that request reads the prompt, and the next one need not."""
    warm = engine()
    _ = answer(warm, request(SECOND, 0, TOKENS))
    expected = cold(SECOND, 3)
    first, second = (answer(warm, request(SECOND, 3, TOKENS)) for _ in range(2))
    assert comparable(first) == comparable(second) == expected
    assert first.stats.cached_tokens == 0 < second.stats.cached_tokens
    plain = answer(warm, request(SECOND, 0, TOKENS))
    assert plain.stats.cached_tokens == second.stats.cached_tokens


def traces(seed: int, count: int) -> list[list[int]]:
    """Conversations that grow, branch and begin anew."""
    draw = random.Random(seed)
    talks = [turn(draw.choice([10, 130, 190]), draw.randrange(4)) for _ in range(2)]
    prompts: list[list[int]] = []
    for _ in range(count):
        talk = draw.choice(talks)
        if draw.random() < 0.2 and len(talk) > 100:
            talk = talk[: draw.randrange(1, len(talk))]
        talk = [*talk, *turn(draw.choice([3, 64, 140, 200]), draw.randrange(3))]
        talks = [*talks[-3:], talk]
        prompts.append([*talk, 7, 8] if draw.random() < 0.8 else talk)
    return prompts


def follow(warm: TextEngine, seed: int, count: int = 6) -> int:
    """The tokens that were found, in all."""
    draw, hits = random.Random(seed), 0
    for prompt in traces(seed, count):
        k, tokens = draw.randrange(4), draw.randrange(1, 4)
        if draw.random() < 0.2:  # a client that goes at once, or after a chunk
            steps = warm.generate(request(prompt, k, tokens))
            for _ in range(draw.randrange(1, 4)):
                _ = next(steps)
            steps.close()
        got = answer(warm, request(prompt, k, tokens))
        assert comparable(got) == cold(prompt, k, tokens)
        assert warm.prefix_cache_bytes <= ROOM
        hits += got.stats.cached_tokens
    assert warm.live_requests == warm.cache_bytes() == 0
    return hits


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_random_traces_are_answered_as_by_a_cold_engine(seed: int) -> None:
    assert follow(engine(), seed) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_cache_give_the_cold_answers(kind: str) -> None:
    warm, expected = of_class(kind, ROOM), dict[int, tuple[object, ...]]()
    ids = [(37 * i + 11) % (VOCABULARY - 1) + 1 for i in range(224)]
    for rows in (160, 208, 160, 224):
        prompt = [*ids[:rows], rows % VOCABULARY]
        if rows not in expected:
            alone = of_class(kind, ROOM)
            expected[rows] = comparable(answer(alone, request(prompt, 0, TOKENS)))
        got = answer(warm, request(prompt, 0, TOKENS))
        assert comparable(got) == expected[rows]
    assert got.stats.cached_tokens == 3 * SHORT


def test_the_system_turn_goes_last() -> None:
    """A long conversation continues after its last turn and reads nothing before it."""
    talk = [SYSTEM, *(turn(150, 20 + number) for number in range(4))]
    prompts = [[*chain(*talk[: number + 1]), 7] for number in range(1, len(talk))]
    roomy, live = engine(), 0
    for prompt in prompts:
        for _ in roomy.generate(request(prompt, 3, 1)):
            live = max(live, roomy.cache_bytes())
    tight = engine(room=live + roomy.prefix_cache_bytes * 19 // 20)
    for prompt in prompts:
        _ = answer(tight, request(prompt, 3, 1))
    assert 0 < tight.prefix_cache_bytes < roomy.prefix_cache_bytes
    assert answer(tight, request(OTHER, 3, 1)).stats.cached_tokens == 300


def test_a_request_in_progress_has_the_room() -> None:
    warm = engine()
    _ = answer(warm, request(SECOND, 3, 1))
    room = warm.prefix_cache_bytes * 5 // 2
    tight = engine(room=room)
    _ = answer(tight, request(SECOND, 3, 1))
    bytes_before = tight.prefix_cache_bytes
    assert bytes_before == warm.prefix_cache_bytes
    for _ in tight.generate(request(turn(1100, 77), 0, 3)):
        assert tight.cache_bytes() + tight.prefix_cache_bytes <= room
    assert answer(tight, request(SECOND, 3, 1)).stats.cached_tokens < 460


def test_numbers_that_are_none_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_quietly(small_spec(native_mtp=True))
    model: Any = loaded.model.model
    norm = model.language_model.model.norm
    warm = engine(loaded)
    whole = norm.weight
    norm.weight = whole * mx.nan
    with pytest.raises(NumericError):
        _ = answer(warm, request(SECOND, 0, 2))
    assert warm.prefix_cache_bytes == 0
    norm.weight = whole
    assert answer(warm, request(SECOND, 0, 2)).stats.cached_tokens == 0
