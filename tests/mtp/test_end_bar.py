"""End tokens have probability 0 until an answer has enough tokens, for targets and drafts alike."""

import math
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import pytest

from exo_node.mtp.processors import EndBar
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import Drafts, as_ids
from exo_node.mtp.types import Sampling

V = 40
ENDS = (3, 39)
GREEDY, SEEDED, FREE = Sampling(), Sampling(0.8, seed=1), Sampling(0.8)


def logits(rows: int, *wanted: int, seed: int = 0) -> mx.array:
    x = mx.random.normal((rows, V), key=mx.random.key(seed))
    for token in wanted:
        x[:, token] = 9.0
    return x


def barred_rows(x: mx.array) -> list[bool]:
    return [all(x[row, end].item() == -math.inf for end in ENDS) for row in range(x.shape[0])]


def sampler_of(sampling: Sampling, least: int, **fields: object) -> Sampler:
    return Sampler(replace(sampling, min_tokens=least), 5, ends=ENDS, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("least", "committed", "barred"), [(5, 0, 4), (5, 3, 2), (5, 5, 0)])
def test_rows_are_barred_up_to_the_least_and_other_numbers_stay(
    least: int, committed: int, barred: int
) -> None:
    bar, x = EndBar(ENDS, least), logits(4)
    bar.commit(mx.arange(committed))
    got = bar.apply(x)
    assert barred_rows(got) == [True] * barred + [False] * (4 - barred)
    others = [token for token in range(V) if token not in ENDS]
    assert mx.array_equal(got[:, others], x[:, others])
    assert mx.array_equal(got[barred:], x[barred:])


def test_a_row_after_drafts_counts_them_and_few_ids_are_enough() -> None:
    bar, x = EndBar(ENDS, 3), logits(1)
    assert [barred_rows(bar.apply(x, before)) for before in range(4)] == [[True]] * 3 + [[False]]
    narrow = bar.apply(x[:, :20])
    assert narrow[0, ENDS[0]].item() == -math.inf
    assert narrow.shape == (1, 20)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, FREE], ids=str)
def test_neither_the_target_nor_a_draft_takes_an_end_too_early(sampling: Sampling) -> None:
    for least in range(4):
        sampler = sampler_of(sampling, least)
        x, ids = logits(1, *ENDS), list[int]()
        for position in range(6):
            token = sampler.token(x, position)
            sampler.commit(token)
            ids += as_ids(token)
        assert [token in ENDS for token in ids] == [at >= least for at in range(6)]
        drafter, before = sampler_of(sampling, least), list[Drafts]()
        for depth in range(6):
            before.append(drafter.draft(x, depth, before))
            (token,) = as_ids(before[-1].tokens)
            assert (token in ENDS) == (depth >= least)
            q = before[-1].log_probabilities
            if q is not None and depth < least:
                support = before[-1].support
                ids = list(range(V)) if support is None else as_ids(support[0])
                likely = [id for id, p in zip(ids, q[0].tolist(), strict=True) if p > -1e30]  # type: ignore[arg-type]
                assert not {*likely} & {*ENDS}, "its own distribution is barred, too"


def test_where_a_grammar_allows_ends_alone_one_stands() -> None:
    class OnlyEnd:
        failed = ""

        def take(self, tokens: Sequence[int]) -> None:
            pass

        def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
            return [(1 << ENDS[0]).to_bytes(5, "little")] * (len(drafts) + 1)

    for sampling in (GREEDY, SEEDED, FREE):
        sampler = sampler_of(sampling, 9, grammar=OnlyEnd())
        assert as_ids(sampler.token(logits(1), 0)) == [ENDS[0]]


def test_log_probabilities_are_those_of_what_may_follow() -> None:
    x = logits(1, *ENDS)
    scores = sampler_of(GREEDY, 1).target_logprobs(x, None)
    assert barred_rows(scores) == [True]
    assert abs(mx.logsumexp(scores).item()) < 1e-5  # type: ignore[arg-type]
