"""Means of what layers take at work, and how they correct a probe: pure arithmetic."""

import math
from collections.abc import Iterable
from dataclasses import astuple
from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_node.placement.cluster import LayerProfile
from exo_node.placement.correction import (
    FADE_S,
    FIRST,
    HALF_LIFE,
    OUTLIER,
    UNCHANGED,
    WINDOW,
    LayerMean,
    ObservedTime,
    corrected,
)

BEGINNING = WINDOW * (1 + FIRST)
"""Forwards until there is a mean: the first window is dropped."""
TIMES = st.floats(1e-6, 10.0)
PROBED = LayerProfile(decode_s=1e-3, verify_s=2e-3, prefill_s=0.1, tail_s=4e-3)


def mean_of(seconds: Iterable[float], window: int = WINDOW) -> LayerMean:
    mean = LayerMean(window)
    for each in seconds:
        mean.add(each)
    return mean


# ------------------------------------------------------------------------------ the mean


def test_nothing_is_told_before_there_is_enough_of_it() -> None:
    assert mean_of(repeat(1.0, BEGINNING - 1)).count == 0
    begun = mean_of(repeat(1.0, BEGINNING))
    assert (begun.seconds, begun.count) == (1.0, FIRST * WINDOW)
    begun.add(1.0)
    assert begun.count == FIRST * WINDOW, "a part of a window is no observation"


def test_the_first_forwards_after_a_load_do_not_count() -> None:
    mean = mean_of(chain(repeat(50.0, WINDOW), repeat(1.0, FIRST * WINDOW)))
    assert mean.seconds == 1.0


def test_what_disturbs_one_forward_of_a_window_does_not_count() -> None:
    """A process that is stopped or a machine that sleeps in every window, once in each."""
    window = (*repeat(1.0, WINDOW - 1), 3600.0)
    mean = mean_of(chain.from_iterable(repeat(window, 100)))
    assert mean.seconds == 1.0


def test_a_minority_of_bad_windows_at_the_beginning_poisons_nothing() -> None:
    bad = FIRST // 2
    good = WINDOW * (FIRST - bad)
    mean = mean_of(chain(repeat(1.0, WINDOW), repeat(900.0, bad * WINDOW), repeat(1.0, good)))
    assert mean.seconds == 1.0


@pytest.mark.parametrize("stopped_s", [OUTLIER, 60.0, 1e6])
def test_one_bad_window_moves_the_mean_by_a_few_percent_at_most(stopped_s: float) -> None:
    mean = mean_of(chain(repeat(1.0, BEGINNING), repeat(stopped_s, WINDOW)))
    assert mean.seconds == pytest.approx(1 + (OUTLIER - 1) * (1 - 0.5 ** (1 / HALF_LIFE)))
    assert mean.seconds < 1.065


def test_a_half_life_of_observations_goes_half_the_way() -> None:
    mean = mean_of(chain(repeat(1.0, BEGINNING), repeat(2.0, HALF_LIFE * WINDOW)))
    assert mean.seconds == pytest.approx(1.5)
    assert mean.count == (FIRST + HALF_LIFE) * WINDOW


def test_a_slowness_beyond_an_outlier_is_reached_step_by_step() -> None:
    mean = mean_of(chain(repeat(1.0, BEGINNING), repeat(50.0, 6 * HALF_LIFE * WINDOW)))
    assert mean.seconds == pytest.approx(50.0, rel=0.05)


def test_speed_that_comes_back_is_believed_at_the_same_pace() -> None:
    mean = mean_of(chain(repeat(100.0, BEGINNING), repeat(1.0, HALF_LIFE * WINDOW)))
    assert mean.seconds == pytest.approx(50.5)


def test_a_window_of_one_makes_every_forward_an_observation() -> None:
    mean = mean_of(chain(repeat(1.0, 1 + FIRST), repeat(2.0, HALF_LIFE)), window=1)
    assert (mean.seconds, mean.count) == (pytest.approx(1.5), FIRST + HALF_LIFE)


@pytest.mark.parametrize("nothing", [0.0, -1.0, math.nan])
def test_what_is_no_time_does_not_count(nothing: float) -> None:
    mean = mean_of(chain.from_iterable(repeat((1.0, nothing), BEGINNING)))
    assert (mean.seconds, mean.count) == (1.0, FIRST * WINDOW)


@given(st.lists(TIMES, min_size=BEGINNING, max_size=BEGINNING + 200))
def test_the_mean_lies_between_the_least_and_the_most(seconds: list[float]) -> None:
    mean = mean_of(seconds)
    assert min(seconds) * (1 - 1e-9) <= mean.seconds <= max(seconds) * (1 + 1e-9)


@given(st.lists(TIMES, min_size=BEGINNING, max_size=BEGINNING + 100), st.floats(1.0, 1e3))
def test_a_machine_that_is_slower_throughout_has_a_mean_that_is_slower_as_much(
    seconds: list[float], factor: float
) -> None:
    slower = mean_of(factor * each for each in seconds)
    assert slower.seconds == pytest.approx(factor * mean_of(seconds).seconds, rel=1e-6)


# ------------------------------------------------------------------------ the correction


def by(decode: ObservedTime | None, verify: ObservedTime | None = None) -> LayerProfile:
    told = {1: decode, 4: verify}
    means = {rows: mean for rows, mean in told.items() if mean is not None}
    return corrected(PROBED, means, 4, 512)


def test_without_work_the_probe_holds() -> None:
    assert by(None) == PROBED


@pytest.mark.parametrize("seconds", [2.5e-3, 1e-4], ids=["slower", "quicker"])
def test_what_layers_take_now_counts_and_the_rest_keeps_its_proportion(seconds: float) -> None:
    factor = seconds / PROBED.decode_s
    now = by(ObservedTime(seconds))
    assert now.decode_s == pytest.approx(seconds)
    assert now.verify_s == pytest.approx(factor * PROBED.verify_s)
    assert now.tail_s == pytest.approx(factor * PROBED.tail_s)
    assert now.prefill_s == PROBED.prefill_s, "a chunk is bound by arithmetic and not by memory"


def test_a_verify_and_a_chunk_that_were_measured_count_as_such() -> None:
    now = corrected(
        PROBED, {1: ObservedTime(2e-3), 4: ObservedTime(9e-3), 512: ObservedTime(0.3)}, 4, 512
    )
    assert astuple(now)[:4] == pytest.approx((2e-3, 9e-3, 0.3, 8e-3))
    # Of other rows than the probe's, they say nothing about it.
    other = corrected(
        PROBED, {1: ObservedTime(2e-3), 3: ObservedTime(9e-3), 256: ObservedTime(0.3)}, 4, 512
    )
    assert astuple(other)[:4] == pytest.approx((2e-3, 4e-3, 0.1, 8e-3))


def test_an_old_verify_is_drawn_to_what_a_row_takes_now() -> None:
    now = by(ObservedTime(4e-3), ObservedTime(2e-3, age_s=100 * FADE_S))
    assert now.verify_s == pytest.approx(8e-3)


@pytest.mark.parametrize("factor", [0.99 * UNCHANGED, 1.01 / UNCHANGED])
def test_a_small_change_is_none(factor: float) -> None:
    assert by(ObservedTime(factor * PROBED.decode_s)) == PROBED


def test_a_correction_that_nothing_renews_is_forgotten() -> None:
    """Else a node that is avoided because it was slow once would never be tried again."""
    fourfold = 4 * PROBED.decode_s
    assert by(ObservedTime(fourfold, FADE_S)).decode_s == pytest.approx(2 * PROBED.decode_s)
    assert by(ObservedTime(fourfold, 4 * FADE_S)) == PROBED
    assert by(ObservedTime(fourfold, 1e19)) == PROBED


@given(TIMES, TIMES, st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_correction_lies_between_probe_and_work_and_only_fades(
    probed: float, seconds: float, age_s: float, more_s: float
) -> None:
    profile = LayerProfile(probed)
    early = corrected(profile, {1: ObservedTime(seconds, age_s)}, 4, 512).decode_s
    late = corrected(profile, {1: ObservedTime(seconds, age_s + more_s)}, 4, 512).decode_s
    low, high = min(probed, seconds) * (1 - 1e-9), max(probed, seconds) * (1 + 1e-9)
    assert low <= early <= high
    assert abs(late - probed) <= abs(early - probed) * (1 + 1e-6)


@given(st.floats(5e-324, 3600), st.floats(5e-324, 3600), st.floats(5e-324, 3600))
def test_a_peers_absurd_figures_stay_times(probed: float, row: float, verify: float) -> None:
    profile = LayerProfile(probed, probed, probed, probed)
    now = corrected(profile, {1: ObservedTime(row), 4: ObservedTime(verify)}, 4, 512)
    assert all(math.isfinite(figure) and figure >= 0 for figure in astuple(now))
