"""Where a verify may decide near ties otherwise than single steps, the clock changes no token."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from chips import M3_MAX, on_chip
from engines import Answer, answer, load_quietly, request
from forced_copies import FixedLength, force
from readers import GREEDY, SEEDED, prompt
from small import small_spec

from exo_node.mtp.drafting.acceptance import Prior
from exo_node.mtp.drafting.costs import CostTable
from exo_node.shard.engine.answers.draft_profile import DraftProfile, DraftProfileKey
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.measuring import NOT_MEASURED
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.kernels import row_groups
from exo_node.shard.model.load import Loaded

KEY = DraftProfileKey("a test", "", "float32", "", 0)
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


def test_requests_that_draft_there_copy_nothing_since_the_clock_decides_copies(
    metal: OnChip,
) -> None:
    served = metal.engine(0)
    refused = served.lookup.reason(asked())
    assert refused.startswith("a verify of 4 rows") and "ENABLED=0" not in refused, "no remedy"
    force(served.lookup, FixedLength(3))  # as if that length were exact
    got = answer(served, asked())
    assert "follow the clock" in got.stats.lookup_reason
    assert "(4 rows after 24 first differ in: product of 64 to " in got.stats.lookup_reason
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
