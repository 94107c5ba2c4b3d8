"""The order of eviction from the prefix cache: by the cache itself, with caches of zeros."""

from itertools import chain
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache
from prefixes import END, turn

from exo_node.mtp.schedule import prefill_ends
from exo_node.shard.engine.prefixes.memory import PrefixCache
from exo_node.shard.engine.prefixes.prompt_path import PromptPath
from exo_node.shard.engine.states.state import State

ENDS = frozenset([END])
ROWS = 150
"""Rows of a turn, which is one forward."""


def caches_of(rows: int) -> list[Any]:
    """Keys and values of `rows` rows, and a state that is as large as those of a turn."""
    attention, recurrent = KVCache(), ArraysCache(1)
    if rows:
        attention.keys = attention.values = mx.zeros((1, 1, rows, 4))
        attention.offset = rows
        recurrent.cache = [mx.zeros((1, ROWS * 8))]
    return [attention, recurrent]


def talk(number: int) -> list[int]:
    return [*chain(*(turn(ROWS, 10 * number + each) for each in range(4))), 7]


def path_of(prompt: list[int]) -> PromptPath:
    return PromptPath(prompt, prefill_ends(prompt, ROWS, ENDS))


def read(cache: PrefixCache, prompt: list[int]) -> None:
    path = path_of(prompt)
    for end in path.inner.ends:
        _ = cache.keep(path, State(caches_of(end), end), ENDS)
        cache.evict(0)


def cached_rows(cache: PrefixCache, prompt: list[int]) -> int:
    return max(cache.cached_ends(path_of(prompt)), default=0)


def test_states_within_conversations_go_before_the_end_of_any() -> None:
    budget = 1 << 20
    cache = PrefixCache(budget, lambda: caches_of(0))
    talks = [talk(number) for number in range(3)]
    for each in talks:
        read(cache, each)
    state = ROWS * 8 * 4
    within = 2 * 2 * state  # not first turns', nor those of the conversation that was read last
    cache.evict(budget - cache.size + within)
    assert [cached_rows(cache, each) for each in talks] == [4 * ROWS] * 3
    cache.evict(budget - cache.size + 1)
    assert [cached_rows(cache, each) for each in talks] == [ROWS, 4 * ROWS, 4 * ROWS]


def test_a_conversation_in_progress_outlives_the_first_turns_of_those_before() -> None:
    """A prompt whose own first turn ends with no cached forward: too near to a chunk's end."""
    one = PrefixCache(1 << 20, lambda: caches_of(0))
    read(one, long := [*turn(4 * ROWS + 20, 90), 7])
    for room in (one.size, one.size * 3 // 2):
        cache = PrefixCache(room, lambda: caches_of(0))
        read(cache, [*turn(4 * ROWS, 91), 7])
        assert cached_rows(cache, [*turn(4 * ROWS, 91), 7]) == 4 * ROWS
        read(cache, long)
        assert cached_rows(cache, [*long, *turn(ROWS, 92), 7]) == 4 * ROWS
        assert cache.size <= room
