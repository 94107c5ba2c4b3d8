"""Requests with one prompt read it once but for its last forward; each answers as it does alone."""

# pyright: reportPrivateUsage=false

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from driven import driven
from engines import answer, request
from held_prefixes import cache_of, held_bytes
from prefixes import (
    FIRST,
    IDS,
    KINDS,
    ROOM,
    TOKENS,
    cold,
    comparable,
    of_class,
    plain,
    probabilities,
    two_stages,
)
from prefixes import engine as perturbed_engine
from readers import GREEDY, SEEDED, Reader, alone, assert_as_alone, both_ways, engine, prompt

from exo_node.mtp.types import Sampling
from exo_node.shard.engine.prefill_forward import PrefillForward
from exo_node.shard.engine.request import Parameters


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each prompt's part in each forward that is computed."""
    counts = list[int]()
    build = PrefillForward._build

    def counted(self: PrefillForward, *targets: Any) -> Any:
        counts.extend(len(self.ids(index)) for index in range(len(self.requests)))
        return build(self, *targets)

    monkeypatch.setattr(PrefillForward, "_build", counted)
    return counts


SYSTEM_ROWS = 300
"""The last inner end of the forwards over FIRST."""


def read_once(count: int) -> int:
    """Rows of `count` choices of which one reads the prompt, the others its last forward."""
    return len(FIRST) + (count - 1) * (len(FIRST) - SYSTEM_ROWS)


def choices(
    ids: Sequence[int], k: int, count: int = 5, tokens: int = 12, **changes: Any
) -> list[Parameters]:
    """Choices that differ in their seeds."""
    return [
        request(
            ids,
            k,
            tokens,
            sampling=Sampling(temperature=0.9, seed=seed),
            **changes,
        )
        for seed in range(count)
    ]


@both_ways
@pytest.mark.parametrize("k", [0, pytest.param(3, marks=pytest.mark.smoke)])
def test_choices_read_the_prompt_once_whenever_they_come(
    k: int, ahead: bool, rows: list[int]
) -> None:
    served = engine(ahead, prefix_cache_bytes=ROOM)
    turns = (0, 0, 1, 9, 400)  # the last comes when the others have ended
    readers = [Reader(each, turn) for each, turn in zip(choices(FIRST, k), turns, strict=True)]
    driven(served, readers)
    first, *others = [r.end.stats.cached_tokens for r in readers if r.end is not None]
    assert first == 0 and set(others) == {SYSTEM_ROWS}
    assert sum(rows) == read_once(5)
    assert len({tuple(reader.ids) for reader in readers}) > 3
    rows.clear()
    assert_as_alone(readers)
    assert sum(rows) == 5 * len(FIRST)  # the count sees what it should
    assert served.live_requests == 0 and served.cache_bytes() == 0
    assert held_bytes(served) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_choices_of_every_kind_of_cache_are_those_that_they_are_alone(kind: str) -> None:
    """With log-probabilities, which show states that differ."""
    served, ids = of_class(kind, ROOM), IDS[0]
    expected = answer(served, plain(ids, cache=False))
    got = [answer(served, plain(ids)) for _ in range(3)]
    assert [probabilities(each) for each in got] == 3 * [probabilities(expected)]
    first, second, third = [each.stats.cached_tokens for each in got]
    assert first == 0 < second == third < len(ids)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_choice_drafts_what_it_drafts_alone(sampling: Sampling) -> None:
    """The head's state is part of the copy: its drafts, and which of them stand, are the same."""
    served = perturbed_engine()
    for number in range(3):
        got = answer(served, request(FIRST, 3, TOKENS, sampling=sampling))
        assert comparable(got) == cold(FIRST, 3, sampling=sampling)
        assert got.stats.cached_tokens == (SYSTEM_ROWS if number else 0)


def test_over_stages_the_other_choices_read_the_last_forward_only() -> None:
    (expected,) = _all_of(two_stages("llama", ROOM, _exactly).engine, [plain(IDS[0])])
    served = two_stages("llama", ROOM, _exactly).engine
    readers = _all_of(served, [plain(IDS[0]) for _ in range(3)])
    assert {tuple(reader.ids) for reader in readers} == {tuple(expected.ids)}
    cached = [reader.end.stats.cached_tokens for reader in readers if reader.end is not None]
    assert cached[0] == 0 and len(IDS[0]) - 64 < cached[1] == cached[2] < len(IDS[0])


def test_a_choice_that_is_cancelled_within_the_prompt_leaves_it_to_the_next(
    rows: list[int],
) -> None:
    served = engine(prefix_cache_bytes=ROOM)
    first, *others = (Reader(each) for each in choices(FIRST, 2, 3))
    first.ends = 2
    driven(served, [first, *others])
    assert not first.ids and sum(rows) < 2 * len(FIRST)
    assert_as_alone(others)


@pytest.mark.parametrize(
    ("room", "k", "changes"),
    [(ROOM, 0, {"cache": False}), (0, 0, {}), (1000, 1, {})],
    ids=["asked not to", "no cache", "a cache without room for the prompt"],
)
def test_choices_that_cache_nothing_read_beside_each_other(
    room: int, k: int, changes: dict[str, Any], rows: list[int]
) -> None:
    """They do not wait for what nothing keeps."""
    served = engine(prefix_cache_bytes=room)
    readers = [Reader(each) for each in choices(FIRST, k, 3, **changes)]
    driven(served, readers)
    assert sum(rows) == 3 * len(FIRST)
    assert_as_alone(readers)
    assert not cache_of(served).size


def test_choices_that_do_not_fit_the_context_together_take_turns(rows: list[int]) -> None:
    served = engine(prefix_cache_bytes=ROOM, context_length=len(FIRST) + 40)
    readers = [Reader(each) for each in choices(FIRST, 1, 4)]
    driven(served, readers)
    assert sum(rows) == read_once(4)
    assert_as_alone(readers)


@pytest.mark.parametrize("k", [0, 2])
def test_choices_resume_behind_a_prompt_that_is_read_once_more(k: int, rows: list[int]) -> None:
    ids = prompt(0, 200)
    before = [alone(each) for each in choices(ids, k, 3, 30)]
    logs = [each.rounds[: 1 + index] for index, each in enumerate(before)]
    rows.clear()
    resumed = [
        Reader(request(ids, k, 30, sampling=each.sampling, attempt=2, replay=log))
        for each, log in zip(choices(ids, k, 3), logs, strict=True)
    ]
    driven(engine(prefix_cache_bytes=ROOM), resumed)
    assert len(ids) < sum(rows) < 2 * len(ids)
    for reader, whole, log in zip(resumed, before, logs, strict=True):
        replayed = sum(len(round_.tokens) for round_ in log)
        assert reader.fault is None and tuple(reader.ids) == whole.ids[replayed:]


def test_requests_of_another_salt_do_not_begin_behind_a_choice(rows: list[int]) -> None:
    served = engine(prefix_cache_bytes=ROOM)
    driven(served, [Reader(each) for each in choices(FIRST, 1, 2)])
    driven(served, [Reader(each) for each in choices(FIRST, 1, 2, cache_salt=b"another")])
    assert sum(rows) == 2 * read_once(2)


def _all_of(served: Any, engine_requests: Sequence[Parameters]) -> list[Reader]:
    """Their answers, beside each other; futures of a loopback are done already."""
    readers = [Reader(each) for each in engine_requests]
    driven(served, readers)
    assert all(reader.fault is None for reader in readers)
    return readers


def _exactly(x: mx.array, rows: int) -> float:
    return 0.0
