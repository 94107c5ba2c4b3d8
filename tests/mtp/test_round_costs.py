"""What rounds cost, by what was measured of them and of others."""

import pytest

from exo_node.mtp.drafting.costs import (
    ENOUGH,
    RECENT,
    CostTable,
    Form,
    context_bucket,
    interpolated,
    size_bucket,
)
from exo_node.mtp.drafting.round_policy import TRIAL_ROUNDS


def alone(k: int, position: int = 0) -> Form:
    return Form.of(1, position, k, k)


def measured(costs: CostTable, form: Form, seconds: float, times: int = ENOUGH) -> None:
    for _ in range(times):
        costs.add(form, seconds)


def test_contexts_are_told_apart_by_doubling() -> None:
    contexts = [context_bucket(n) for n in (0, 511, 512, 1023, 1024, 2048, 100_000)]
    assert contexts == [0, 0, 1, 1, 2, 3, 8]


def test_sizes_share_a_bucket_where_costs_are_alike() -> None:
    assert [size_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [1, 2, 3, 4, 5, 5, 6, 6, 7]


def test_a_figure_is_the_median_of_recent_measurements() -> None:
    costs = CostTable()
    for seconds in (1.0, 9.0, 2.0):
        costs.add(alone(1), seconds)
    assert costs.seconds(alone(1)) == 2.0
    measured(costs, alone(1), 5.0, RECENT)
    assert costs.seconds(alone(1)) == 5.0


def test_a_slower_machine_slows_the_depths_that_are_not_measured_at_present() -> None:
    costs, others = CostTable(), Form.of(4, 0, 1, 1)
    for form, seconds in ((alone(0), 1.0), (alone(1), 1.5), (others, 7.0)):
        measured(costs, form, seconds, RECENT)
    measured(costs, alone(1), 3.0, RECENT)
    assert (costs.seconds(alone(0)), costs.seconds(alone(1))) == (2.0, 3.0)
    assert costs.seconds(others) == 7.0, "which says nothing of larger batches"


def test_a_trial_replaces_what_was_measured_before() -> None:
    costs = CostTable()
    measured(costs, alone(0), 1.0, RECENT)
    measured(costs, alone(1), 4.0, RECENT)
    since = costs.seconds_since_trial(1)
    costs.begin_trial(alone(1))
    assert (since, costs.seconds_since_trial(1)) == (5.0 * RECENT, 0.0)
    for _ in range(TRIAL_ROUNDS):
        costs.add(alone(1), 2.0, is_trial=True)
    assert (costs.seconds(alone(0)), costs.seconds(alone(1))) == (1.0, 2.0)


def test_too_few_measurements_do_not_replace_the_probe() -> None:
    costs = CostTable([1.0, 1.5])
    measured(costs, alone(1), 9.0, ENOUGH - 1)
    assert costs.seconds(alone(1)) == 1.5
    assert not costs.is_measured(alone(1))
    costs.add(alone(1), 9.0)
    assert costs.seconds(alone(1)) == 9.0


def test_a_depth_that_was_only_probed_is_scaled_by_one_that_was_measured() -> None:
    costs = CostTable([1.0, 2.0])
    measured(costs, alone(0), 0.5)
    assert costs.seconds(alone(1)) == 1.0


def test_a_context_that_was_not_measured_is_scaled_from_the_nearest_that_was() -> None:
    costs = CostTable()
    measured(costs, alone(0), 1.0)
    measured(costs, alone(1), 1.5)
    measured(costs, alone(0, 4096), 2.0)
    assert costs.seconds(alone(1, 4096)) == 3.0
    assert CostTable().seconds(alone(0)) is None


@pytest.mark.parametrize("size", [1, 3])
def test_copies_are_estimated_from_the_round_without_them(size: int) -> None:
    costs, copy = CostTable(), Form.of(size, 0, 7, 0)
    costs.copy_ratios[size, 7] = 1.5
    assert costs.seconds(copy) is None
    measured(costs, Form.of(size, 0, 0, 0), 2.0)
    assert costs.seconds(copy) == 3.0
    measured(costs, copy, 9.0)
    assert (costs.seconds(copy), costs.estimate(copy)) == (9.0, 3.0)
    assert costs.seconds(Form.of(size, 0, 15, 0)) is None


def test_only_rounds_of_one_request_without_copies_are_saved() -> None:
    costs = CostTable([1.0, 1.5])
    for form in (alone(1, 600), Form.of(1, 600, 7, 0), Form.of(3, 0, 1, 1)):
        costs.add(form, 2.0)
    assert list(costs.cells()) == [(1, 1, (2.0,))]


def test_a_pace_does_not_make_up_for_the_first_measurements_for_ever() -> None:
    """The first plain rounds were slow as requests joined, and drafts were measured after them."""
    costs, plain, drafted = CostTable(), Form.of(4, 0, 0, 0), Form.of(4, 0, 1, 1)
    measured(costs, plain, 1.4)
    measured(costs, drafted, 1.5)
    measured(costs, plain, 1.0, RECENT)
    assert costs.seconds(plain) == pytest.approx(1.0, rel=0.05)
    assert costs.seconds(drafted) == pytest.approx(1.5, rel=0.05)


def test_a_draft_more_of_several_requests_costs_as_much_as_the_last_one() -> None:
    costs = CostTable()
    forms = [Form.of(8, 0, k, k) for k in range(5)]
    measured(costs, forms[1], 1.5)
    assert costs.seconds(forms[2]) is None
    measured(costs, forms[2], 2.25)
    assert [costs.seconds(form) for form in forms] == [0.75, 1.5, 2.25, 3.0, None]
    assert not costs.is_measured(forms[3])
    measured(costs, forms[3], 2.0)  # by noise: a wider round is no cheaper than a narrower one
    assert costs.seconds(forms[4]) == 2.0


def test_depths_that_were_not_probed_lie_between_those_that_were() -> None:
    assert interpolated({0: 1.0}) == [1.0]
    assert interpolated({0: 1.0, 1: 1.5, 2: 2.0, 3: 2.25}) == [1.0, 1.5, 2.0, 2.25]
    every = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert interpolated({0: 1.0, 1: 1.5, 2: 2.0, 4: 4.0, 7: 7.0}) == every
