"""Answers on layers whose kernel leaves its states on the device, as CUDA kernels do.

Such a layer holds a `RowChoice` after a verify of which requests keep different numbers of
rows. The kernel's CPU twin (`plain_gated_delta.py`) produces it here.
"""

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import pytest
from budget import seeds
from driven import driven
from engines import Answer, answer, engine_of, load_quietly, request
from forced_copies import FixedLength, force
from plain_gated_delta import give_kernels
from readers import GREEDY, SEEDED, Reader, prompt
from small import LAYERS, small_spec

from exo_node.mtp.caches.batch_caches import BatchCache, BatchTapedCache, change_all
from exo_node.mtp.caches.batch_slots import Change
from exo_node.mtp.families.taped_gated_delta import row_state_bytes
from exo_node.mtp.probe import Subject
from exo_node.mtp.types import MAX_ROUND_ROWS, Sampling
from exo_node.shard.engine.answers import model_measurements
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.request import Parameters
from exo_node.shard.engine.states import cache_set
from exo_node.shard.model.load import Loaded

PENALISED = Sampling(repetition_penalty=1.3, logit_bias=((7, 2.0),))


@functools.cache
def loaded() -> Loaded:
    """The small model with the kernel's twin under its recurrent layers; no other test has it."""
    loaded_model = load_quietly(small_spec(native_mtp=True))
    assert give_kernels(loaded_model.model.model) == LAYERS - 1
    return loaded_model


def engine(*, runs_ahead: bool = False, batching: bool = True, **changes: Any) -> TextEngine:
    fields = {"native_mtp": True, "prefill_chunk": 160, "max_draft_tokens": 7}
    spec = small_spec(**fields, batching=batching, **changes)
    # Its clock counts looks at it: who shares a forward depends on turns alone.
    clock = itertools.count(1e-6, 1e-6).__next__
    text_engine = engine_of(loaded(), spec, runs_ahead=runs_ahead, clock=clock)
    text_engine.measurements.batch_identity = "bitwise"
    text_engine.measurements.shares_prompts = True
    return text_engine


def alone(engine_request: Parameters) -> Answer:
    return answer(engine(batching=False), engine_request)


@pytest.fixture
def device_changes(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Changes of batches whose states are on the device: leaves, joins, or both."""
    names = set[str]()

    def noted(caches: Sequence[BatchCache], change: Change, joins: Sequence[Any]) -> None:
        chosen = [c.chosen for c in caches if isinstance(c, BatchTapedCache) and c.chosen]
        if chosen:
            leaves = len(change.order) < chosen[0].at.shape[1]
            names.update(["leave"] * leaves + ["join"] * bool(joins))
        change_all(caches, change, joins)

    monkeypatch.setattr(cache_set, "change_all", noted)
    return names


@pytest.mark.smoke
@pytest.mark.parametrize(("seed", "ahead"), [(seed, seed % 2 == 0) for seed in seeds(1, 24)])
def test_joins_and_leaves_after_uneven_acceptance_leave_every_answer_its_own(
    seed: int, *, ahead: bool, device_changes: set[str]
) -> None:
    draw = random.Random(seed)
    readers = list[Reader]()
    for number in range(10):
        begins = draw.randrange(50)
        sampling = draw.choice([GREEDY, GREEDY, SEEDED, PENALISED])
        engine_request = request(
            prompt(number, draw.choice([0, 5, 60, 130])),
            draw.choice([1, 2, 3, 7]),
            draw.randrange(6, 40),
            sampling=sampling,
            adaptive_draft=draw.random() < 0.2,
            ignore_eos=True,
        )
        cancelled = draw.choice([None, None, None, begins + draw.randrange(40)])
        readers.append(Reader(engine_request, begins, cancelled))
    served = engine(runs_ahead=ahead)
    driven(served, readers)
    for reader in readers:
        expected = alone(reader.request).ids
        assert reader.fault is None
        assert tuple(reader.ids) == (
            expected if reader.ends is None else expected[: len(reader.ids)]
        )
    assert served.live_requests == 0 and served.cache_bytes() == 0
    assert device_changes == {"leave", "join"}


@pytest.mark.parametrize("room", [0, 1 << 40])
def test_requests_draft_together_only_where_the_states_have_memory(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers stay as they are, and say why they draft nothing."""
    monkeypatch.setattr(mx, "get_memory_limit", lambda: room)
    readers = [Reader(request(prompt(n), 3, 24, ignore_eos=True)) for n in range(4)]
    served = engine()
    driven(served, readers)
    shared = [
        round_
        for reader in readers
        for round_ in reader.rounds
        if round_.forward.batch > 1 and round_.forward.rows > 1
    ]
    assert bool(shared) == bool(room)
    for reader in readers:
        assert tuple(reader.ids) == alone(reader.request).ids
        assert reader.end is not None
        reason = reader.end.stats.depth_reason
        assert ("K = 0" in reason and "memory for the states of" in reason) != bool(room)


def test_prefixes_and_rows_of_the_last_round_give_way_to_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a depth for which there is memory is not given up in every second round."""
    rows = list[int]()
    row_bytes = row_state_bytes(loaded().model.own_modules(outer=False))

    def limit() -> int:
        """Of memory for two rows of each request beside all that is no state of a round."""
        batch = max(cast(Any, served)._executor._groups.groups, key=lambda each: len(each.requests))
        rows.append(batch.state_rows)
        gives_way = row_bytes * batch.state_rows + served.prefix_cache_bytes
        others = mx.get_active_memory() - gives_way
        return (others + row_bytes * (2 * len(batch.requests)) + 1024) * 16 // 15

    served = engine(prefix_cache_bytes=64 << 20)
    monkeypatch.setattr(mx, "get_memory_limit", limit)
    readers = [Reader(request(prompt(n, 200), 3, 24, ignore_eos=True)) for n in range(4)]
    driven(served, readers)
    widths = [r.forward.rows for r in readers[0].rounds if r.forward.batch == 4]
    assert len(widths) > 4 and set(widths) == {2} and served.prefix_cache_bytes
    assert {*rows} >= {4, 8}, "behind a change of members, and behind a round of two rows each"


@pytest.mark.parametrize("k", [0, 3])
def test_copies_of_more_rows_than_have_states_leave_every_answer_its_own(k: int) -> None:
    """Some of them stand as a whole, others are taken back to the row of a changed token."""

    def ask(served: TextEngine, rows: Sequence[int], *, lookup: bool) -> Answer:
        fields = {"ignore_eos": True, "top_logprobs": 0, "prompt_lookup": lookup}
        return answer(served, request(rows, k if lookup else 0, 90, **fields))

    copied = [*ask(engine(), prompt(1), lookup=False).ids]
    copied[len(copied) // 2] += 1
    rows, served = [*prompt(1), *copied, *prompt(1)], engine(prompt_lookup=True)
    force(served.lookup, FixedLength(31))
    got, expected = ask(served, rows, lookup=True), ask(engine(), rows, lookup=False)
    assert 32 in {round_.forward.rows for round_ in got.rounds}
    assert 0 < got.stats.lookup_accepted_tokens < got.stats.lookup_proposed_tokens
    assert got.ids == expected.ids
    entries, others = ([e for r in each.rounds for e in r.logprobs] for each in (got, expected))
    assert entries == others and len(entries) == 90


def test_a_gpu_traces_the_rows_of_each_exact_copy_before_answers_need_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths = list[list[int]]()

    def noted(_subject: Subject, rows: Sequence[int]) -> list[None]:
        widths.append([*rows])
        return []

    def nothing(_subject: Subject, _k: int, _most_rows: int) -> list[None]:
        return []

    monkeypatch.setattr(model_measurements, "warm_up", noted)
    monkeypatch.setattr(model_measurements, "warm_up_batches", nothing)
    for is_gpu in (False, True):
        monkeypatch.setattr(model_measurements, "available", lambda is_gpu=is_gpu: is_gpu)
        served = engine(prompt_lookup=True, context_length=512)
        served.measurements.measure()
        assert served.lookup.policy.lengths == [3, 31]
    assert widths == [[*range(1, 9)], [*range(1, 9), 32]]


def test_a_gpu_runs_the_rounds_of_several_requests_before_answers_need_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As deep as they were probed, and none where requests share no rounds."""
    depths = list[tuple[int, int]]()

    def noted(_subject: Subject, k: int, most_rows: int) -> list[None]:
        depths.append((k, most_rows))
        return []

    monkeypatch.setattr(model_measurements, "warm_up_batches", noted)
    for is_gpu, batching in ((False, True), (True, False), (True, True)):
        monkeypatch.setattr(model_measurements, "available", lambda is_gpu=is_gpu: is_gpu)
        served = engine(batching=batching)
        served.measurements.measure()
        assert depths == [(7, MAX_ROUND_ROWS)] * (is_gpu and batching)
