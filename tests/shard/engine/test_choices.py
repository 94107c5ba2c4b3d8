"""Requests with one prompt read it once but for its last forward; each answers as it does alone."""

# pyright: reportPrivateUsage=false

from collections.abc import Sequence
from typing import Any

import pytest
from driven import driven
from engines import request
from held_prefixes import cache_of, held_bytes
from prefixes import (
    FIRST,
    ROOM,
)
from readers import Reader, assert_as_alone, both_ways, engine

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
