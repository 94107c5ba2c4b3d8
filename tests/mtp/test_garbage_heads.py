"""Draft heads that give garbage: whatever they say, the answer is the target's."""

import functools
from collections.abc import Mapping

import mlx.core as mx
import numpy as np
import pytest
from tables import Logits, random_table, tell
from test_distribution import SUSPICIOUS, TARGET, WARM, deviation

from exo_node.mtp.accept import accept_by_block
from exo_node.mtp.sampling import Distribution, Noise
from exo_node.mtp.seams import as_row
from exo_node.mtp.types import Sampling

KS = (1, 2, 3)
NAN, INF = float("nan"), float("inf")


def garbage(like: Logits) -> Mapping[str, Logits]:
    """A draft head's tables of the shape of `like`."""
    column = [i == 1 for i in range(like.shape[-1])]
    after = [[i % 2 == 0] for i in range(like.shape[-2])]
    return {
        "nan": np.full_like(like, NAN),
        "inf": np.full_like(like, INF),
        "-inf": np.full_like(like, -INF),
        "a column of nan": np.where(column, NAN, like).astype(np.float32),
        "a column of inf": np.where(column, INF, like).astype(np.float32),
        "a column of -inf": np.where(column, -INF, like).astype(np.float32),
        "nan after every other token": np.where(after, NAN, like).astype(np.float32),
        "inf after every other token": np.where(after, INF, like).astype(np.float32),
        "-inf after every other token": np.where(after, -INF, like).astype(np.float32),
        "huge": np.where(column, 3e38, -3e38 * np.ones_like(like)).astype(np.float32),
        "huge and healthy": np.where(after, 3e38 * np.sign(like), like).astype(np.float32),
        "constant": np.full_like(like, 7.0),
    }


NAMES = list(garbage(TARGET))
SAMPLED = {
    "plain": WARM,
    "top_k": Sampling(temperature=0.8, top_k=2),
    "top_p": Sampling(temperature=1.5, top_p=0.8),
    "min_p": Sampling(temperature=1.3, min_p=0.2),
    "xtc": Sampling(temperature=0.9, xtc_probability=0.5, xtc_threshold=0.15),
}
LONG = random_table(8, seed=1)


@functools.cache
def without_drafts(sampling: Sampling) -> tuple[int, ...]:
    return tell(LONG, sampling=sampling, max_tokens=24).ids


CHOSEN = {
    "greedy": Sampling(),
    "greedy, penalties": Sampling(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "seed": Sampling(temperature=1.0, seed=8),
    "seed, filters": Sampling(temperature=0.7, top_k=3, top_p=0.9, seed=9),
}
IN_TURN = [
    (KS[(row + column) % len(KS)], name, how)
    for column, how in enumerate(CHOSEN)
    for row, name in enumerate(NAMES)
]
"""Every garbage with every way of choosing, and with each K in one of them."""


@pytest.mark.parametrize(("k", "name", "how"), IN_TURN)
def test_greedy_and_seeded_ids_are_those_without_drafts(k: int, name: str, how: str) -> None:
    sampling = CHOSEN[how]
    got = tell(LONG, garbage(LONG)[name], k, sampling=sampling, max_tokens=24).ids
    assert got == without_drafts(sampling)


@pytest.mark.parametrize(
    ("filters", "name"),
    [
        ("top_k", "nan"),
        ("top_k", "nan after every other token"),
        ("top_p", "a column of inf"),
        ("min_p", "nan after every other token"),
        ("xtc", "a column of inf"),
    ],
)
def test_the_distribution_is_the_targets_under_garbage_and_filters(filters: str, name: str) -> None:
    draft, sampling = garbage(TARGET)[name], SAMPLED[filters]
    assert deviation(TARGET, draft, 2, sampling, tokens=500) < SUSPICIOUS


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("k", KS)
def test_no_draft_stands_that_came_from_no_distribution(bad: float, k: int) -> None:
    """Even where nothing replaced the head's rows before."""
    p = Distribution(mx.log(mx.array([[1e-9, 1 - 1e-9]] * (k + 1))))
    q = Distribution(mx.full((k, 2), bad))
    for entropy in range(40):
        accepted, ids = accept_by_block(p, q, as_row([0] * k), Noise(entropy), 5).read()
        assert (accepted, ids) == (0, [1])
