"""Rounds in, the final numbers out, by a clock that the test turns."""

from collections.abc import Sequence

import pytest
from clocks import Clock

from exo_node.mtp.stats import StatsCollector
from exo_node.mtp.types import TRACE_LENGTH, Forward, GenerationStats, Round

Counted = tuple[int, int, int]
"""(tokens, drafted, accepted) of one round."""


def collected(
    rounds: Sequence[Counted],
    k: int = 3,
    *,
    to_first: float = 0.5,
    each: float = 0.25,
    cached: int = 0,
) -> GenerationStats:
    """Stats of a 10-token prompt: the first round after `to_first` seconds, then one per `each`."""
    clock = Clock()
    collector = StatsCollector(clock)
    clock.now += to_first
    for tokens, drafted, accepted in rounds:
        collector.add(Round((7,) * tokens, drafted, accepted, Forward(0, drafted + 1)))
        clock.now += each
    clock.now += 1000  # what the reader does with the last round is not decoding
    return collector.finish(
        GenerationStats("native_mtp", k, prompt_tokens=10, cached_tokens=cached)
    )


FIRST = (1, 0, 0)
Row = tuple[list[Counted], int, tuple[int, int, int], tuple[int, ...], tuple[int, ...]]
"""(rounds, k, (rounds, drafted, accepted), accepted per position, rounds by k)."""
TABLE: dict[str, Row] = {
    "nothing but the first token": ([FIRST], 3, (0, 0, 0), (0, 0, 0), (0, 0, 0, 0)),
    "all accepted": ([FIRST, (4, 3, 3), (4, 3, 3)], 3, (2, 6, 6), (2, 2, 2), (0, 0, 0, 2)),
    "none accepted": ([FIRST, (1, 3, 0), (1, 3, 0)], 3, (2, 6, 0), (0, 0, 0), (0, 0, 0, 2)),
    "prefixes of each length": (
        [FIRST, (1, 3, 0), (2, 3, 1), (3, 3, 2), (4, 3, 3)],
        *(3, (4, 12, 6), (3, 2, 1), (0, 0, 0, 4)),
    ),
    "capped by the budget": (
        [FIRST, (4, 3, 3), (2, 2, 1), (1, 1, 0), (1, 0, 0)],
        *(3, (3, 6, 4), (2, 1, 1), (1, 1, 1, 1)),
    ),
    "ended inside a block": ([FIRST, (2, 3, 2)], 3, (1, 3, 2), (1, 1, 0), (0, 0, 0, 1)),
    "one draft a round": ([FIRST, (2, 1, 1), (1, 1, 0)], 1, (2, 2, 1), (1,), (0, 2)),
    "plain": ([FIRST] * 4, 0, (0, 0, 0), (), (3,)),
    "resumed in the middle": ([(2, 3, 1), (4, 3, 3)], 3, (2, 6, 4), (2, 1, 1), (0, 0, 0, 2)),
}


@pytest.mark.parametrize("name", TABLE)
def test_rounds_are_counted_by_what_they_drafted_and_what_was_emitted_of_it(name: str) -> None:
    rounds, k, counts, per_position, histogram = TABLE[name]
    got = collected(rounds, k)
    assert (
        got.spec_decode_rounds,
        got.proposed_draft_tokens,
        got.accepted_draft_tokens,
    ) == counts
    assert got.accepted_per_position == per_position
    assert got.draft_k_histogram == histogram
    assert got.completion_tokens == sum(tokens for tokens, _, _ in rounds)
    assert sum(got.accepted_per_position) == got.accepted_draft_tokens


def test_rates_are_over_the_prompt_and_over_the_tokens_after_the_first() -> None:
    got = collected([FIRST, (4, 3, 3), (3, 3, 2), (1, 3, 0)])
    assert got.time_to_first_token_s == 0.5
    assert got.prompt_tps == 10 / 0.5
    assert got.generation_tps == 8 / 0.75


def test_the_prompts_rate_is_of_the_tokens_that_were_read() -> None:
    """Tokens from the prefix cache are not part of the rate."""
    got = collected([FIRST], cached=8)
    assert (got.cached_tokens, got.prompt_tps) == (8, 2 / 0.5)


def test_without_time_there_is_no_rate() -> None:
    assert collected([FIRST]).generation_tps == 0
    instant = collected([FIRST, FIRST], to_first=0, each=0)
    assert (instant.prompt_tps, instant.generation_tps) == (0, 0)


def test_acceptance_is_a_share_of_the_proposed_and_of_the_emitted() -> None:
    stats = collected([FIRST, (1, 3, 0), (4, 3, 3), (2, 3, 1)])
    assert stats.acceptance_rate == pytest.approx(4 / 9)
    assert stats.accepted_share_of_output == pytest.approx(4 / 8)


def test_without_drafts_there_is_no_acceptance() -> None:
    stats = collected([FIRST, (1, 0, 0)], k=0)
    assert (stats.acceptance_rate, stats.accepted_share_of_output) == (None, None)


def test_the_trace_lists_depths_in_order_with_how_often_each_came_in_a_row() -> None:
    rounds = [FIRST, (1, 2, 0), (2, 2, 1), (1, 0, 0), (1, 0, 0), (1, 0, 0), (2, 1, 1)]
    assert collected(rounds).draft_k_trace == ((2, 2), (0, 3), (1, 1))


def test_a_long_trace_keeps_its_end() -> None:
    rounds = [FIRST] + [(1, k, 0) for _ in range(TRACE_LENGTH) for k in (1, 2)] + [(1, 3, 0)]
    trace = collected(rounds).draft_k_trace
    assert len(trace) == TRACE_LENGTH
    assert trace[-2:] == ((2, 1), (3, 1))


def test_rounds_of_an_earlier_attempt_are_counted_and_not_timed() -> None:
    """They made the prompt take microseconds, at a rate of 1.8 billion tokens a second."""
    clock = Clock()
    collector = StatsCollector(clock)
    for tokens in (1, 4):
        collector.add(Round((7,) * tokens, tokens - 1, tokens - 1, Forward(0, 4)), replayed=True)
    clock.now += 5.0
    collector.add(Round((7, 7), 3, 1, Forward(0, 4)))
    clock.now += 0.5
    collector.add(Round((7, 7, 7), 3, 2, Forward(0, 4)))
    stats = collector.finish(GenerationStats("native_mtp", 3, prompt_tokens=10, resumes=1))
    assert (stats.completion_tokens, stats.spec_decode_rounds) == (10, 3)
    assert stats.prompt_tps == pytest.approx(2.0)
    assert stats.time_to_first_token_s == pytest.approx(5.0)
    assert stats.generation_tps == pytest.approx(6.0)
