"""The engine's modes: depths that adapt, by the clock or without it, and log-probabilities."""

# pyright: reportPrivateUsage=false

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from chips import M3_MAX, on_chip
from engines import Answer, Stretches, answer, engine_of, load_quietly, request
from forced_copies import FixedLength, force
from long_runs import watched_heads
from readers import GREEDY, SEEDED, prompt
from small import PROMPT, small_engine, small_spec

from exo_node.mtp.drafting.acceptance import Prior
from exo_node.mtp.drafting.costs import CostTable
from exo_node.shard.engine.answers.draft_profile import (
    DraftProfile,
    DraftProfileKey,
    MeasuredIdentity,
)
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.measuring import NOT_MEASURED
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.kernels import row_groups
from exo_node.shard.model.load import Loaded

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
    assert profile.shares_prompts
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


COSTS = (1.0, 1.1, 1.2, 1.3)
TOKENS = 200
SPEC = small_spec(native_mtp=True, prompt_lookup=True, context_length=1000)


class JumpingClock:
    """A clock of a busy machine: each reading is later, by much or by little."""

    def __init__(self, seed: int) -> None:
        self._random, self._now = random.Random(seed), 0.0

    def __call__(self) -> float:
        self._now += self._random.choice((1e-4, 1e-2, 1.0, 30.0)) * self._random.random()
        return self._now


@dataclass(frozen=True, slots=True)
class OnChip:
    """A chip on which the products of one row and of several differ, without row groups."""

    loaded: Loaded
    measured: DraftProfile

    def engine(self, seed: int) -> TextEngine:
        """An engine on a profile of the same measurements."""
        profile = replace(self.measured, costs=CostTable(COSTS), prior=Prior())
        served = engine_with(self.loaded, profile, JumpingClock(seed))
        served.measurements.measure()
        return served


@pytest.fixture(scope="module")
def metal() -> Iterator[OnChip]:
    with on_chip(M3_MAX), pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_groups, "may_depend_on_rows", lambda: False)
        loaded, profile = load_quietly(SPEC), new_profile()
        engine_with(loaded, profile, lambda: 0.0).measurements.measure()
        yield OnChip(loaded, profile)


def new_profile(*probed: float) -> DraftProfile:
    return DraftProfile(KEY, None, lambda: 0.0, CostTable(probed or COSTS))


def engine_with(loaded: Loaded, profile: DraftProfile, clock: Callable[[], float]) -> TextEngine:
    return TextEngine(loaded, EngineOptions.of(SPEC), clock=clock, profile=profile)


def asked(number: int = 0, **changes: Any) -> Any:
    fields = {"adaptive_draft": True, "ignore_eos": True, "prompt_lookup": True}
    return request(prompt(number), 3, TOKENS, **(fields | changes))


def told(got: Answer) -> tuple[tuple[int, ...], list[int]]:
    return got.ids, [round_.drafted for round_ in got.rounds]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_same_request_drafts_and_says_the_same_whatever_the_clock_does(
    metal: OnChip, sampling: Any
) -> None:
    answers = list[tuple[tuple[int, ...], list[int]]]()
    for seed in range(2):
        served = metal.engine(seed)
        assert served.measurements.identity == "near_tie"
        answers.append(told(answer(served, asked(sampling=sampling))))
        _ = answer(served, asked(1))
        served.measurements.profile.prior = Prior([90.0] * 3, [1.0] * 3)  # what others were like
        answers.append(told(answer(served, asked(sampling=sampling))))
    assert answers == answers[:1] * len(answers)
    assert len(set(answers[0][1])) > 2, "only one depth was used"


def test_the_measurements_learn_from_it_nevertheless(metal: OnChip) -> None:
    served = metal.engine(0)
    profile = served.measurements.profile
    assert not list(profile.costs.cells()) and not profile.prior.is_known
    _ = answer(served, asked())
    assert list(profile.costs.cells()) and profile.prior.is_known
    assert served.drafting.speedup > 0


@pytest.mark.smoke
def test_nothing_is_drafted_before_costs_were_measured(metal: OnChip) -> None:
    served = metal.engine(0)
    served.measurements.profile.costs = CostTable()
    assert served.drafting.refusal == NOT_MEASURED
    granted = served.drafting.grant(asked())
    assert (granted.k, granted.drafting.drafting_reason) == (0, NOT_MEASURED)
    served.measurements.measure()
    assert served.drafting.refusal == "" and served.drafting.grant(asked()).k == 3
    assert served.drafting.near_tie_drafts(asked()) == 3
    assert served.drafting.near_tie_drafts(granted) == 0


def test_requests_that_draft_there_copy_nothing_since_the_clock_decides_copies(
    metal: OnChip,
) -> None:
    served = metal.engine(0)
    refused = served.lookup.reason(asked())
    assert refused.startswith("a verify of 4 rows") and "ENABLED=0" not in refused, "no remedy"
    force(served.lookup, FixedLength(3))  # as if that length were exact
    got = answer(served, asked())
    assert "follow the clock" in got.stats.lookup_reason
    assert "(2 rows after 24 first differ in: product of 64 to " in got.stats.lookup_reason
    assert got.stats.lookup_proposed_tokens == 0
    assert served.lookup.lookup(request(prompt(0), 0, TOKENS, prompt_lookup=True)) is not None


def test_exact_drafts_follow_the_clock() -> None:
    loaded, taken = load_quietly(SPEC), set[tuple[int, ...]]()
    ids = set[tuple[int, ...]]()
    for seed in range(3):
        served = engine_with(loaded, new_profile(), JumpingClock(seed))
        assert not served.drafting.is_near_tie
        got = answer(served, asked())
        ids.add(got.ids)
        taken.add(tuple(round_.drafted for round_ in got.rounds))
    assert len(ids) == 1 < len(taken)
