"""Acceptance: what the real loop emits over tables is distributed as the target alone would."""

import itertools
import math
from collections.abc import Callable, Iterator

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
Accept = Callable[[mx.array, mx.array, mx.array, Noise, int], Verdict]

ANSWERS = 1200
SUSPICIOUS = 4.0
"""Standard deviations. The entropies are fixed, so a correct loop passes always or never."""

V = 3
TARGET = random_table(V, seed=11)
DRAFTS = {
    "right": TARGET,
    "near": TARGET + 0.5 * random_table(V, seed=12),
    "another": random_table(V, seed=13, spread=2.0),
    "opposite": -2.0 * TARGET,
}


def target_rows(table: Logits, sampling: Sampling) -> Floats:
    """The target's probabilities by numpy alone: top_p, then top_k, then temperature."""
    x = table.astype(np.float64)
    p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    order = np.argsort(-x, axis=-1)
    rank = np.argsort(order, axis=-1)
    above = np.take_along_axis(np.take_along_axis(p, order, -1).cumsum(-1), rank, -1) - p
    kept = (above < sampling.top_p) & (rank < (sampling.top_k or x.shape[-1]))
    weights = np.where(kept, np.exp(x / sampling.temperature), 0.0)
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
    target: Logits, draft: Logits, k: int, sampling: Sampling, answers: int = ANSWERS
) -> float:
    """How far the first K + 2 tokens of many answers are from the target's joint distribution."""
    counts: Counts = {}
    for entropy in range(answers):
        ids = tell(target, draft, k, sampling=sampling, entropy=entropy, max_tokens=k + 2).ids
        counts[ids] = counts.get(ids, 0) + 1
    return surprise(counts, joint(target_rows(target, sampling), k + 2))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("draft", DRAFTS)
def test_ratio_acceptance_leaves_the_targets_distribution(k: int, draft: str) -> None:
    assert sampled_surprise(TARGET, DRAFTS[draft], k, Sampling(temperature=1.0)) < SUSPICIOUS


@pytest.mark.parametrize(
    ("k", "sampling"),
    [
        (1, Sampling(temperature=0.6, top_k=2)),
        (2, Sampling(temperature=1.5, top_p=0.8)),
        (3, Sampling(temperature=0.8, top_k=2, top_p=0.95)),
    ],
)
def test_ratio_acceptance_holds_under_filters(k: int, sampling: Sampling) -> None:
    assert sampled_surprise(TARGET, DRAFTS["another"], k, sampling) < SUSPICIOUS


@pytest.mark.parametrize("k", [1, 2])
def test_ratio_acceptance_holds_where_drafts_are_impossible(k: int) -> None:
    target, draft = random_table(4, seed=14), random_table(4, seed=15)
    target[..., 2:], draft[..., :2] = -np.inf, -np.inf
    assert sampled_surprise(target, draft, k, Sampling(temperature=1.0)) < SUSPICIOUS


def _by_argmax(p: mx.array, q: mx.array, drafts: mx.array, noise: Noise, at: int) -> Verdict:
    """vllm-mlx#82: a draft stands when it is the target's likeliest token."""
    verdict = accept_by_ratio(p, q, drafts, noise, at)
    matching = accept_matching(mx.argmax(p, axis=-1), drafts).accepted
    own = noise.gumbel(at, p.shape[0], p.shape[1], RESIDUAL)
    drawn = mx.argmax(p + own, axis=-1).astype(mx.int32)
    kept = mx.arange(p.shape[0]) < matching
    return Verdict(matching, mx.where(kept, mx.concatenate([drafts, drafts[-1:]]), drawn)._replace()
                   if False else verdict.tokens)


def _without_residual(p: mx.array, q: mx.array, drafts: mx.array, noise: Noise, at: int) -> Verdict:
    """A rejected draft is replaced by a draw from p instead of norm(max(p - q, 0))."""
    accepted = accept_by_ratio(p, q, drafts, noise, at).accepted
    return _replaced(p, drafts, accepted, noise, at)


def _without_quotient(p: mx.array, q: mx.array, drafts: mx.array, noise: Noise, at: int) -> Verdict:
    """A draft stands with probability p, not p / q."""
    return accept_by_ratio(p, mx.where(True, q, q), drafts, noise, at)


@pytest.fixture
def biased(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chooser, "accept_by_ratio", request.param)
    yield
