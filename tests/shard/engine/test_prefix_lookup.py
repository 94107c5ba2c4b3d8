"""Look-ups of cached prefixes beside a compute thread that changes what is cached."""

import random
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engines import answer, request
from mlx_lm.models.cache import ArraysCache, KVCache
from prefixes import ALIEN, FIRST, OTHER, SECOND, SYSTEM, TOKENS, turn
from prefixes import engine as engine_in_memory
from stored_prefixes import engine, files, opened, settle

from exo_node.mtp.schedule import Schedule, prefill_ends
from exo_node.shard.engine.prefixes.lookup import CachedRows, PrefixLookup
from exo_node.shard.engine.prefixes.memory import PrefixCache
from exo_node.shard.engine.prefixes.prompt_path import PromptPath
from exo_node.shard.engine.prefixes.store import PrefixStore
from exo_node.shard.engine.states.state import DraftState, State

ROWS = 128


@pytest.mark.smoke
@pytest.mark.parametrize("k", [0, 2])
def test_a_look_up_says_what_the_request_then_gets(k: int, tmp_path: Path) -> None:
    disk = opened(tmp_path)
    warm = engine(disk)
    for prompt in (FIRST, FIRST, SECOND, SECOND, OTHER, ALIEN, SYSTEM):
        forecast = warm.prefix_lookup.find(prompt, drafts=k > 0)
        got = answer(warm, request(prompt, k, TOKENS))
        assert forecast.rows == got.stats.cached_tokens
        assert (forecast.tier, forecast.bytes > 0) == (
            ("memory", True) if forecast.rows else ("", False)
        )
    settle(warm)
    restarted = engine(opened(tmp_path))
    stored = restarted.prefix_lookup.find(SECOND, drafts=k > 0)
    assert (stored.rows, stored.tier) == (460, "disk")
    assert sum(path.stat().st_size for path in files(tmp_path)) >= stored.bytes > 0
    assert answer(restarted, request(SECOND, k, TOKENS)).stats.cached_tokens == 460
    assert restarted.prefix_lookup.find(SECOND, drafts=k > 0).tier == "memory"


def test_a_look_up_needs_the_salt_and_the_draft_state_that_its_request_needs() -> None:
    warm = engine_in_memory()
    _ = answer(warm, request(FIRST, 0, TOKENS, cache_salt=b"alice"))
    look = warm.prefix_lookup.find
    assert look(FIRST, b"alice", drafts=False).rows == 300
    assert look(FIRST, b"alice", drafts=True) == CachedRows()
    assert look(FIRST, b"bob", drafts=False) == look(FIRST, drafts=False) == CachedRows()
    assert look([], drafts=False) == CachedRows()


def test_a_look_up_is_no_use_of_a_prefix() -> None:
    """Of two equal conversations the older one goes first, however often it is looked up."""
    prompts = [[*turn(ROWS, seed), 8] for seed in (1, 2)]
    store = new_store()
    cache = store.memory
    for prompt in prompts:
        _keep(cache, prompt)
    lookup = PrefixLookup(store, Schedule(ROWS))
    for _ in range(3):
        assert lookup.find(prompts[0], drafts=False).rows
    cache.evict((1 << 30) - cache.size + 1)
    assert [lookup.find(prompt, drafts=False).rows > 0 for prompt in prompts] == [False, True]


@pytest.mark.smoke
def test_look_ups_beside_any_change_of_the_tree_are_right_and_raise_nothing() -> None:
    """Another thread adds, evicts, replaces and drops states, as fast as it can."""
    draw = random.Random(1)
    prompts = [
        [*turn(ROWS, 1 + first), *turn(ROWS, 10 + second), *turn(ROWS, 20 + second), 8]
        for first in range(2)
        for second in range(3)
    ]
    ends = {end for prompt in prompts for end in _ends(prompt)}
    store = new_store()
    cache = store.memory
    lookup, changes, faults = PrefixLookup(store, Schedule(ROWS)), [0], list[BaseException]()

    def change() -> None:
        try:
            for _ in range(400):
                prompt = draw.choice(prompts)
                _keep(cache, prompt, drafts=draw.random() < 0.5)
                if draw.random() < 0.5:
                    cache.evict((1 << 30) - draw.randrange(cache.size + 1))
                if draw.random() < 0.1:
                    cache.evict()
                changes[0] += 1
        except BaseException as fault:
            faults.append(fault)

    hits = 0
    with _eager_switches():
        thread = threading.Thread(target=change)
        thread.start()
        while thread.is_alive():
            for prompt in prompts:
                hit = lookup.find(prompt, drafts=hits % 2 == 0)
                assert hit == CachedRows() or (hit.rows in ends and hit.tier == "memory")
                hits += hit.rows > 0
        thread.join()
    assert (faults, changes[0]) == ([], 400)
    assert hits > 10


@contextmanager
def _eager_switches() -> Generator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _ends(prompt: list[int]) -> list[int]:
    return prefill_ends(prompt, ROWS)


def new_store() -> PrefixStore:
    return PrefixStore(1 << 30, lambda: [KVCache(), ArraysCache(1)])


def _keep(cache: PrefixCache, prompt: list[int], *, drafts: bool = False) -> None:
    """Caches states after each forward but the last of a prompt."""
    rows: Any = KVCache()
    state: Any = ArraysCache(1)
    path = PromptPath(prompt, _ends(prompt)).inner
    for begin, end in pairwise((0, *path.ends)):
        added = mx.ones((1, 1, end - begin, 4))
        _ = rows.update_and_fetch(added, added)
        state[0] = mx.ones((1, 4))
        hidden = mx.ones((1, end, 4))
        draft = DraftState.with_unread(KVCache(), 0, hidden, prompt) if drafts else None
        _ = cache.insert(path.up_to(end), State([rows, state], end, draft), 0)
