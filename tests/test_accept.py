"""Acceptance: what the real loop emits over tables is distributed as the target alone would."""

import itertools
import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from tables import PROMPT, Logits, random_table, tell

from exo_node.mtp import accept, chooser
from exo_node.mtp.accept import Verdict, accept_by_ratio, accept_matching
from exo_node.mtp.chooser import Chooser
from exo_node.mtp.sampling import ACCEPT, RESIDUAL, TOKEN, Noise
from exo_node.mtp.seams import Drafts, as_row
from exo_node.mtp.types import Sampling

Floats = npt.NDArray[np.float64]
Counts = dict[tuple[int, ...], int]
Rule = Callable[[mx.array, mx.array, mx.array, Noise, int], Verdict]

ANSWERS = 700
SUSPICIOUS = 4.0
"""Standard deviations. The entropies are fixed, so a correct loop passes always or never."""

WARM = Sampling(temperature=1.0)
TARGET = random_table(3, seed=11)
DRAFTS = {
    "right": TARGET,
    "near": TARGET + 0.5 * random_table(3, seed=12),
    "another": random_table(3, seed=13, spread=2.0),
    "opposite": -2.0 * TARGET,
}


def target_rows(table: Logits, s: Sampling) -> Floats:
    """The target's probabilities by numpy alone: top_p, then xtc, top_k and temperature."""
    x = table.astype(np.float64)
    p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    order = np.argsort(-x, axis=-1)
    rank = np.argsort(order, axis=-1)
    above = np.take_along_axis(np.take_along_axis(p, order, -1).cumsum(-1), rank, -1) - p
    kept = (above < s.top_p) & (rank < (s.top_k or x.shape[-1]))
    if not s.xtc_probability:
        return cooled(x, kept, s.temperature)
    least = np.where(p > s.xtc_threshold, p, np.inf).min(-1, keepdims=True)
    excluded = cooled(x, kept & (p <= least), s.temperature)
    share = s.xtc_probability
    return share * excluded + (1 - share) * cooled(x, kept, s.temperature)


def cooled(x: Floats, kept: npt.NDArray[np.bool_], temperature: float) -> Floats:
    weights = np.where(kept, np.exp(x / temperature), 0.0)
    return weights / weights.sum(-1, keepdims=True)


def joint(rows: Floats, length: int) -> dict[tuple[int, ...], float]:
    """The exact probability of each way in which an answer can begin."""
    chances: dict[tuple[int, ...], float] = {}
    for ids in itertools.product(range(rows.shape[-1]), repeat=length):
        path = itertools.pairwise([PROMPT[-1], *ids])
        chances[ids] = math.prod(
            float(rows[len(PROMPT) - 1 + i, a, b]) for i, (a, b) in enumerate(path)
        )
    return chances


def surprise(counts: Counts, chances: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square as standard deviations (Wilson-Hilferty); rare cells are pooled."""
    if any(chances[ids] == 0 for ids in counts):
        return math.inf
    total = sum(counts.values())
    cells: list[tuple[float, float]] = []
    seen, wanted = 0, 0.0
    for ids in sorted(chances, key=lambda ids: chances[ids]):
        seen, wanted = seen + counts.get(ids, 0), wanted + total * chances[ids]
        if wanted >= 5:
            cells.append((seen, wanted))
            seen, wanted = 0, 0.0
    free = len(cells) - 1
    chi = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    spread = 2 / (9 * free)
    return ((chi / free) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def sampled_surprise(
    target: Logits,
    draft: Logits,
    k: int,
    sampling: Sampling,
    *,
    answers: int = ANSWERS,
    length: int = 0,
) -> float:
    """How far the first `length` (K + 2) tokens of many answers are from the exact joint."""
    length = length or k + 2
    counts: Counts = {}
    for entropy in range(answers):
        got = tell(target, draft, k, sampling=sampling, entropy=entropy, max_tokens=k + 2)
        counts[got.ids[:length]] = counts.get(got.ids[:length], 0) + 1
    return surprise(counts, joint(target_rows(target, sampling), length))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("draft", DRAFTS)
def test_ratio_acceptance_leaves_the_targets_distribution(k: int, draft: str) -> None:
    assert sampled_surprise(TARGET, DRAFTS[draft], k, WARM) < SUSPICIOUS


@pytest.mark.parametrize(
    ("k", "sampling"),
    [
        (1, Sampling(temperature=0.6, top_k=2)),
        (2, Sampling(temperature=1.5, top_p=0.8)),
        (3, Sampling(temperature=0.8, top_k=2, top_p=0.95)),
        (2, Sampling(temperature=0.9, xtc_probability=0.5, xtc_threshold=0.15)),
    ],
)
def test_ratio_acceptance_holds_under_filters(k: int, sampling: Sampling) -> None:
    assert sampled_surprise(TARGET, DRAFTS["another"], k, sampling) < SUSPICIOUS


@pytest.mark.parametrize("k", [1, 2])
def test_ratio_acceptance_holds_where_every_draft_is_impossible(k: int) -> None:
    target, draft = random_table(4, seed=14), random_table(4, seed=15)
    target[..., 2:], draft[..., :2] = -np.inf, -np.inf
    assert sampled_surprise(target, draft, k, WARM) < SUSPICIOUS


def ruled(
    weights: mx.array, stands: mx.array, drafts: mx.array, noise: Noise, position: int
) -> Verdict:
    """The drafts before the first that does not stand, then a draw from `weights` (K + 1, V)."""
    accepted = mx.cumprod(stands.astype(mx.int32)).sum()
    gumbel = noise.gumbel(position, weights.shape[0], weights.shape[1], RESIDUAL)
    drawn = mx.argmax(weights + gumbel, axis=-1).astype(mx.int32)
    kept = mx.arange(drawn.shape[0]) < accepted
    return Verdict(accepted, mx.where(kept, mx.concatenate([drafts, drafts[-1:]]), drawn))


def by_argmax(p: mx.array, q: mx.array, drafts: mx.array, noise: Noise, position: int) -> Verdict:
    """A draft stands when it is the target's likeliest token (vllm-mlx#82)."""
    return ruled(p, mx.argmax(p[:-1], axis=-1) == drafts, drafts, noise, position)


def without_residual(
    p: mx.array, q: mx.array, drafts: mx.array, noise: Noise, position: int
) -> Verdict:
    """What replaces a rejected draft is drawn from p, not from norm(max(p - q, 0))."""
    stands = mx.arange(drafts.shape[0]) < accept_by_ratio(p, q, drafts, noise, position).accepted
    return ruled(p, stands, drafts, noise, position)


def without_quotient(
    p: mx.array, q: mx.array, drafts: mx.array, noise: Noise, position: int
) -> Verdict:
    """A draft stands with probability p, not min(1, p / q)."""
    log_p = mx.take_along_axis(p[:-1], drafts[:, None], axis=-1)[:, 0]
    stands = mx.log(noise.uniform(position, drafts.shape[0], ACCEPT)) < log_p
    residual = mx.log(mx.maximum(mx.exp(p[:-1]) - mx.exp(q), 0))
    return ruled(mx.concatenate([residual, p[-1:]]), stands, drafts, noise, position)


@pytest.mark.parametrize(
    ("rule", "draft"),
    [(by_argmax, "near"), (without_residual, "opposite"), (without_quotient, "right")],
)
def test_the_statistic_flags_a_biased_rule(
    monkeypatch: pytest.MonkeyPatch, rule: Rule, draft: str
) -> None:
    monkeypatch.setattr(chooser, "accept_by_ratio", rule)
    assert sampled_surprise(TARGET, DRAFTS[draft], 2, WARM) > 1.5 * SUSPICIOUS


@pytest.mark.parametrize("stream", [RESIDUAL, TOKEN])
def test_replacements_need_noise_that_the_draft_did_not_see(
    monkeypatch: pytest.MonkeyPatch, stream: int
) -> None:
    """Chosen so that a replacement drawn with the draft's own noise is far off: 4 % in total."""
    target, draft = (
        np.broadcast_to(np.log(np.array(row, dtype=np.float32)), (64, 3, 3))
        for row in ([0.02, 0.49, 0.49], [0.6, 0.35, 0.05])
    )
    monkeypatch.setattr(accept, "RESIDUAL", stream)
    found = sampled_surprise(target, draft, 1, WARM, answers=1500, length=2)
    assert (found < SUSPICIOUS) == (stream == RESIDUAL)


def log_rows(*rows: Sequence[float]) -> mx.array:
    return mx.log(mx.array(rows, dtype=mx.float32))


def test_equal_distributions_accept_every_draft() -> None:
    p = log_rows([0.2, 0.8], [0.5, 0.5], [0.9, 0.1])
    for entropy in range(40):
        accepted, ids = accept_by_ratio(p, p[:2], as_row([0, 1]), Noise(entropy), 5).read()
        assert (accepted, ids[:2]) == (2, [0, 1])


def test_a_draft_that_the_target_never_gives_is_never_accepted() -> None:
    p, q = log_rows([0.0, 1.0], [0.5, 0.5]), log_rows([1.0, 0.0])
    for entropy in range(40):
        assert accept_by_ratio(p, q, as_row([0]), Noise(entropy), 5).read() == (0, [1])


def test_without_a_residual_the_replacement_is_the_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounding may reject where p equals q; a uniform draw of 1 stands in for it."""

    def one(_self: Noise, _position: int, rows: int, _stream: int) -> mx.array:
        return mx.ones((rows,))

    monkeypatch.setattr(Noise, "uniform", one)
    p = log_rows([0.0, 0.25, 0.75], [0.5, 0.25, 0.25])
    verdicts = [accept_by_ratio(p, p[:1], as_row([2]), Noise(e), 5).read() for e in range(40)]
    assert {accepted for accepted, _ in verdicts} == {0}
    assert {ids[0] for _, ids in verdicts} == {1, 2}


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


def test_a_seed_gives_the_same_tokens_at_every_k_with_any_drafter() -> None:
    told = {
        tell(TARGET, draft, k, sampling=Sampling(temperature=1.2, seed=5), entropy=k).ids
        for k in (0, 1, 2, 3)
        for draft in ([*DRAFTS.values()] if k else [None])
    }
    assert len(told) == 1


def test_seeds_differ_from_one_another() -> None:
    told = {tell(TARGET, sampling=Sampling(temperature=1.0, seed=seed)).ids for seed in range(20)}
    assert len(told) == 20


def test_over_many_seeds_the_tokens_have_the_targets_distribution() -> None:
    counts: Counts = {}
    for seed in range(ANSWERS):
        sampling = Sampling(temperature=1.0, seed=seed)
        ids = tell(TARGET, DRAFTS["near"], 2, sampling=sampling, max_tokens=4).ids
        counts[ids] = counts.get(ids, 0) + 1
    assert surprise(counts, joint(target_rows(TARGET, WARM), 4)) < SUSPICIOUS


def test_coupled_drafts_of_the_right_distribution_are_all_accepted() -> None:
    told = tell(TARGET, TARGET, 3, sampling=Sampling(temperature=1.0, seed=1), max_tokens=13)
    assert [(r.drafted, r.accepted) for r in told.rounds[1:]] == [(3, 3)] * 3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)])
def test_only_ratio_acceptance_keeps_the_drafts_distributions(sampling: Sampling) -> None:
    logits = mx.array(TARGET[0, :1])
    assert Chooser(Sampling(temperature=1.0), 3).draft(logits, 4).log_probabilities is not None
    drafted = Chooser(sampling, 3).draft(logits, 4)
    target = mx.concatenate([logits, logits])
    verdict = Chooser(sampling, 3).judge(target, Drafts(drafted.tokens, None), 4)
    assert verdict.read()[0] == 1
