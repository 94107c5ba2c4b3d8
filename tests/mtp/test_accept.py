"""Acceptance on given rows; that the engine keeps the distribution: test_distribution.py."""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from exo_node.mtp import accept
from exo_node.mtp.accept import accept_by_block, accept_matching
from exo_node.mtp.sampling import ACCEPT, RESIDUAL, TOKEN, Distribution, Noise, draw
from exo_node.mtp.seams import as_ids, as_row
from exo_node.mtp.types import Sampling

Floats = npt.NDArray[np.float64]


def log_rows(*rows: Sequence[float]) -> Distribution:
    return Distribution(mx.log(mx.array(rows, dtype=mx.float32)))


def rows(of: Distribution, end: int) -> Distribution:
    return Distribution(of.log_p[:end], None if of.ids is None else of.ids[:end])


def test_a_draft_that_the_target_never_gives_is_never_accepted() -> None:
    p, q = log_rows([0.0, 1.0], [0.5, 0.5]), log_rows([1.0, 0.0])
    for entropy in range(40):
        assert accept_by_block(p, q, as_row([0]), Noise(entropy), 5).read() == (0, [1])


def test_what_follows_an_impossible_draft_cannot_bring_it_back() -> None:
    p = log_rows([0.0, 1.0], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5])
    q = log_rows([1.0, 0.0], [1e-30, 1.0], [0.5, 0.5])
    for entropy in range(40):
        verdict = accept_by_block(p, q, as_row([0, 0, 1]), Noise(entropy), 5)
        assert verdict.read() == (0, [1])


def test_quotients_past_the_range_of_float32_are_accepted() -> None:
    """p / q would be infinite, and 0 times it not a number."""
    tiny = mx.array([[-200.0, -1e-30]] * 2)
    p, q = log_rows([1.0, 0.0], [1.0, 0.0], [0.25, 0.75]), Distribution(tiny)
    accepted, ids = accept_by_block(p, q, as_row([0, 0]), Noise(1), 5).read()
    assert (accepted, ids[:2]) == (2, [0, 0])


def test_without_a_residual_the_replacement_is_the_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounding may reject where p equals q; a uniform draw of 1 stands in for it."""

    def one(_self: Noise, _position: int, rows: int, _stream: int) -> mx.array:
        return mx.ones((rows,))

    monkeypatch.setattr(Noise, "uniform", one)
    p = log_rows([0.0, 0.25, 0.75], [0.5, 0.25, 0.25])
    verdicts = [accept_by_block(p, rows(p, 1), as_row([2]), Noise(e), 5).read() for e in range(40)]
    assert {accepted for accepted, _ in verdicts} == {0}
    assert {ids[0] for _, ids in verdicts} == {1, 2}


def test_replacements_have_noise_that_neither_draft_nor_acceptance_saw() -> None:
    draws = {stream: Noise(3).gumbel(5, 1, 4, stream).tolist() for stream in (TOKEN, ACCEPT)}
    assert Noise(3).gumbel(5, 1, 4, RESIDUAL).tolist() not in draws.values()


@pytest.mark.parametrize("stream", [RESIDUAL, TOKEN])
def test_a_replacement_by_the_drafts_own_noise_would_be_far_off(
    monkeypatch: pytest.MonkeyPatch, stream: int
) -> None:
    """The fault is that the noise which chose a draft that fell disfavours the other ids."""
    monkeypatch.setattr(accept, "RESIDUAL", stream)
    p, q = log_rows([0.02, 0.49, 0.49], [1, 0, 0]), log_rows([0.6, 0.35, 0.05])
    firsts: list[int] = []
    for entropy in range(1000):
        drafted = draw(q, Noise(entropy), 5)
        firsts.append(accept_by_block(p, q, drafted, Noise(entropy), 5).read()[1][0])
    off = abs(firsts.count(1) - 0.49 * 1000) / math.sqrt(1000 * 0.49 * 0.51)
    assert off < 3.5 if stream == RESIDUAL else off > 5


def by_hand(p: Floats, q: Floats, drafts: Sequence[int], uniform: Sequence[float]) -> int:
    """The longest block that stands, as the paper writes it, without logarithms."""
    weights = [1.0]
    for i, x in enumerate(drafts):
        weights.append(min(weights[-1] * p[i, x] / q[i, x], 1.0))
    longest = 0
    for i in range(1, len(drafts) + 1):
        chance = weights[i]
        if i < len(drafts):
            mass = np.maximum(weights[i] * p[i] - q[i], 0).sum()
            chance = mass / (mass + 1 - weights[i]) if mass + 1 - weights[i] > 0 else 1.0
        longest = i if uniform[i - 1] < chance else longest
    return longest


def test_a_blocks_length_is_that_of_the_algorithm_in_float64() -> None:
    generator, lengths = np.random.default_rng(0), set[int]()
    for entropy in range(300):
        k = 1 + entropy % 4
        p = generator.dirichlet(np.full(6, 0.4), k + 1)
        q = generator.dirichlet(np.full(6, 0.4), k)
        q[:, : entropy % 3] = 0
        p[:, 6 - entropy // 4 % 3 :] = 0
        p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
        noise, q_logs = Noise(entropy), log_rows(*q.tolist())
        drafts = draw(q_logs, noise, 3)
        accepted, _ = accept_by_block(log_rows(*p.tolist()), q_logs, drafts, noise, 3).read()
        uniform: list[float] = noise.uniform(3, k, ACCEPT).tolist()  # pyright: ignore[reportAssignmentType]
        assert accepted == by_hand(p, q, as_ids(drafts), uniform)
        lengths.add(accepted)
    assert lengths == {0, 1, 2, 3, 4}


def test_after_a_block_that_lost_weight_the_residual_is_that_of_its_weight() -> None:
    """After one draft w is 0.5, so w p - q leaves ids 2 and 3, where p - q would leave 1 too."""
    row = [0.4, 0.3, 0.2, 0.1]
    p, q = log_rows(row, row, row), log_rows(*[[0.8, 0.18, 0.01, 0.01]] * 2)
    verdicts = [accept_by_block(p, q, as_row([0, 0]), Noise(e), 5).read() for e in range(300)]
    after_one = {ids[1] for accepted, ids in verdicts if accepted == 1}
    assert after_one == {2, 3}


def test_rows_that_list_few_ids_give_the_verdict_of_whole_rows() -> None:
    generator = np.random.default_rng(4)

    def both(count: int) -> tuple[Distribution, Distribution]:
        ids = np.stack([generator.permutation(7)[:5] * 14 for _ in range(count)])
        p = generator.dirichlet(np.full(5, 0.8), count)
        whole = np.zeros((count, 90))
        np.put_along_axis(whole, ids, p, -1)
        few = log_rows(*p.tolist()).log_p
        return log_rows(*whole.tolist()), Distribution(few, mx.array(ids.astype(np.int32)))

    verdicts: set[int] = set()
    for entropy in range(80):
        p, few_p = both(3)
        q, few_q = both(2)
        noise = Noise(entropy)
        drafts = draw(q, noise, 3)
        assert drafts.tolist() == draw(few_q, noise, 3).tolist()
        expected = accept_by_block(p, q, drafts, noise, 3).read()
        assert accept_by_block(few_p, few_q, drafts, noise, 3).read() == expected
        assert accept_by_block(few_p, q, drafts, noise, 3).read() == expected
        verdicts.add(expected[0])
    assert len(verdicts) > 1


@pytest.mark.parametrize(
    ("targets", "drafts", "verdict"),
    [
        ([4, 5, 6], [4, 5], (2, [4, 5, 6])),
        ([4, 5, 6], [4, 7], (1, [4, 5])),
        ([4, 5, 6], [7, 5], (0, [4])),
        ([4, 5, 6, 7], [4, 0, 6], (1, [4, 5])),
    ],
)
def test_matching_drafts_stand_up_to_the_first_other_one(
    targets: list[int], drafts: list[int], verdict: tuple[int, list[int]]
) -> None:
    assert accept_matching(as_row(targets), as_row(drafts)).read() == verdict


def test_drafts_of_a_block_are_accepted_by_block_and_one_alone_by_ratio() -> None:
    s = Sampling(temperature=1.0)
    assert [s.rule_of(k) for k in (0, 1, 2, 3)] == ["ratio", "ratio", "block", "block"]
    assert {Sampling(temperature=1.0, seed=0).rule_of(k) for k in range(4)} == {"coupled"}
    assert {Sampling(seed=0).rule_of(k) for k in range(4)} == {"greedy"}
