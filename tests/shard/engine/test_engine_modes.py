"""The engine's modes on the small model: adaptive depth, log-probabilities."""

# pyright: reportPrivateUsage=false

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engines import Answer, Stretches, answer, engine_of, load_quietly, request
from long_runs import watched_heads
from small import PROMPT, small_engine, small_spec

from exo_node.mtp.drafting.acceptance import Prior
from exo_node.mtp.drafting.costs import CostTable
from exo_node.shard.engine.answers.draft_profile import (
    DraftProfile,
    DraftProfileKey,
    MeasuredIdentity,
)
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.options import EngineOptions

KEY = DraftProfileKey("a test", "", "float32", "", 0)


@pytest.fixture(scope="module")
def engine() -> TextEngine:
    return small_engine()


@functools.cache
def plain_ids(engine: TextEngine) -> tuple[int, ...]:
    return answer(engine, request(PROMPT, 0, 60)).ids


def with_costs(*probed: float, counts: float = 0.0, accepted: float = 0.0) -> TextEngine:
    """An engine that believes rounds cost so many seconds; its clock stands still, which says
    nothing else."""
    stage_spec = small_spec(native_mtp=True)
    loaded = load_quietly(stage_spec)
    profile = DraftProfile(KEY, None, lambda: 0.0, CostTable(probed))
    if counts:
        profile.prior = Prior([counts] * 3, [accepted] * 3)
    options = EngineOptions.of(stage_spec)
    return TextEngine(loaded, options, clock=lambda: 0.0, profile=profile)


# ---------------------------------------------------------------- adaptive


@pytest.mark.parametrize(("probed", "parked"), [((1, 9, 9, 9), True), ((1, 1.1, 1.2, 1.3), False)])
def test_an_adapted_answer_is_the_plain_one_whatever_depths_it_took(
    engine: TextEngine, probed: tuple[float, ...], parked: bool
) -> None:
    adapted = with_costs(*probed, counts=90, accepted=81)
    got = answer(adapted, request(PROMPT, 3, 60, adaptive_draft=True))
    assert got.ids == plain_ids(engine)
    plain, *drafted = got.stats.draft_k_histogram
    assert (plain > sum(drafted)) is parked
    assert got.stats.draft_policy == "adaptive"
    assert got.stats.num_draft_tokens == 3


@pytest.mark.smoke
def test_depth_begins_where_the_request_says_and_climbs_to_its_maximum() -> None:
    engine = with_costs(1, 1.02, 1.04, 1.06)
    found_head = request(
        PROMPT,
        3,
        60,
        adaptive_draft=True,
        ignore_eos=True,
        initial_draft_tokens=1,
        initial_draft_source="the model's default_k",
    )
    got = answer(engine, found_head)
    first, *_ = got.rounds[1:]
    assert first.drafted == 1
    assert max(round_.drafted for round_ in got.rounds) == 3
    assert got.stats.depth_reason.startswith("K = ")
    assert "expected speeds 1.00, " in got.stats.depth_reason
    assert engine.depth_reason == got.stats.depth_reason


def test_a_fixed_depth_is_kept_whatever_it_costs() -> None:
    got = answer(with_costs(1, 9, 9, 9, counts=90, accepted=1), request(PROMPT, 2, 40))
    assert got.stats.depth_reason == "K = 2 in every round: as requested"
    assert got.stats.draft_policy == "fixed"
    *rounds, _ = got.rounds[1:]  # the last may have less budget
    assert len(rounds) > 8
    assert {r.drafted for r in rounds} == {2}


def test_the_head_loses_nothing_while_drafting_is_parked() -> None:
    """Rows that plain decoding commits reach the head's cache before it drafts again."""
    engine = with_costs(1, 9, 9, 9)
    executor: Any = engine._engine.executor
    executor.policy = Stretches(1, 2, 16)
    engine_request = request(PROMPT, 1, 150, adaptive_draft=True, ignore_eos=True)
    with watched_heads() as heads:
        got = answer(engine, engine_request)
    looks = [r for r in got.rounds if r.drafted]
    assert 2 < len(looks) == len(heads) < len(got.rounds) / 2
    assert [cached for cached, _ in heads] == [committed for _, committed in heads]


def test_loading_measures_what_rounds_cost_and_keeps_all_of_it(
    engine: TextEngine, tmp_path: Path
) -> None:
    """A runner may be killed right after its load, and the next one then measures nothing."""

    def saved_profile() -> DraftProfile:
        return DraftProfile.open(str(tmp_path), KEY, lambda: 100.0)

    stage_spec = small_spec(native_mtp=True)
    probed = engine_of(load_quietly(stage_spec), stage_spec, profile=saved_profile())
    probed.measurements.measure()
    profile = saved_profile()
    assert len(profile.costs.probed) == 4
    assert profile.identity == MeasuredIdentity(value="bitwise", k=3, context_length=4096)
    assert profile.batch_identity == profile.identity
    got = answer(probed, request(PROMPT, 2, 40, adaptive_draft=True))
    assert got.ids == plain_ids(engine)[:40]
    assert sum(got.stats.draft_k_histogram) == len(got.rounds) - 1


# ---------------------------------------------------------------- log-probabilities


@functools.cache
def with_log_probabilities(engine: TextEngine) -> Answer:
    """Answers by plain decoding."""
    return answer(engine, request(PROMPT, 0, 24, top_logprobs=3))


@pytest.mark.parametrize("k", [0, 1, pytest.param(3, marks=pytest.mark.smoke)])
def test_log_probabilities_are_the_targets_at_every_k(engine: TextEngine, k: int) -> None:
    plain = with_log_probabilities(engine)
    got = answer(engine, request(PROMPT, k, 24, top_logprobs=3))
    assert got.ids == plain.ids
    assert k == 0 or got.stats.accepted_draft_tokens > 0
    entries = [entry for r in got.rounds for entry in r.logprobs]
    assert entries == [entry for r in plain.rounds for entry in r.logprobs]
    assert [entry.token for entry in entries] == list(got.ids)
    for entry in entries:
        assert entry.logprob < 0
        assert entry.top[0] == (entry.token, entry.logprob)  # greedy: the best one was emitted
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3


@pytest.mark.parametrize("k", [0, 2])
def test_unasked_for_there_are_none_and_zero_gives_the_tokens_own(
    engine: TextEngine, k: int
) -> None:
    def all_rounds(top: int | None) -> Iterator[int]:
        got = answer(engine, request(PROMPT, k, 12, top_logprobs=top))
        for r in got.rounds:
            assert all(entry.top == () for entry in r.logprobs)
            yield len(r.logprobs)

    assert sum(all_rounds(None)) == 0
    assert sum(all_rounds(0)) == 12


@pytest.mark.smoke
def test_they_are_those_of_the_whole_vocabulary(engine: TextEngine) -> None:
    got = answer(engine, request(PROMPT, 0, 1, top_logprobs=4096))
    entry = got.rounds[0].logprobs[0]
    total = mx.logsumexp(mx.array([value for _, value in entry.top])).item()
    assert total == pytest.approx(0.0, abs=1e-4)
