"""The target distribution is mlx-lm's, and its noise belongs to positions."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm import sample_utils
from mlx_lm.generate import generate_step

from exo_node.mtp.chooser import Chooser
from exo_node.mtp.sampling import ACCEPT, RESIDUAL, TOKEN, XTC, Noise, TargetDistribution
from exo_node.mtp.sampling import greedy_token
from exo_node.mtp.types import Sampling

VOCABULARY = 64
FILTERS = {
    "none": Sampling(temperature=1.0),
    "temperature": Sampling(temperature=0.3),
    "top_p": Sampling(temperature=1.0, top_p=0.7),
    "min_p": Sampling(temperature=1.0, min_p=0.1),
    "top_k": Sampling(temperature=1.0, top_k=5),
    "top_k over the vocabulary": Sampling(temperature=1.0, top_k=1000),
    "top_p and top_k": Sampling(temperature=0.7, top_p=0.9, top_k=20),
    "all": Sampling(temperature=1.6, top_p=0.95, min_p=0.02, top_k=12),
    "the shipped card's": Sampling(temperature=0.6, top_p=0.95, top_k=20),
}


def random_logits(rows: int, seed: int, vocabulary: int = VOCABULARY) -> mx.array:
    return 2 * mx.random.normal((rows, vocabulary), key=mx.random.key(seed))


def mlx_lm_chain(monkeypatch: pytest.MonkeyPatch, logits: mx.array, s: Sampling) -> mx.array:
    """(rows, V) log-probabilities that mlx-lm's own sampler would draw from."""
    given: list[mx.array] = []

    def categorical(logprobs: mx.array, temperature: float) -> mx.array:
        given.append(logprobs * (1 / temperature))
        return mx.zeros((1,), dtype=mx.int32)

    monkeypatch.setattr(sample_utils, "categorical_sampling", categorical)
    sampler: Callable[[mx.array], mx.array] = sample_utils.make_sampler(
        s.temperature,
        s.top_p,
        s.min_p,
        top_k=s.top_k if s.top_k < logits.shape[-1] else 0,
        xtc_probability=s.xtc_probability,
        xtc_threshold=s.xtc_threshold,
        xtc_special_tokens=[3],
    )
    _ = sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    return given[0] - mx.logsumexp(given[0], axis=-1, keepdims=True)


class Scripted(nn.Module):
    """A model for mlx-lm's `generate_step` that gives the next of its rows at each call."""

    def __init__(self, rows: mx.array) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self._rows = [row[None, None] for row in rows]

    def __call__(self, _ids: mx.array, **_: Any) -> mx.array:
        return self._rows.pop(0)


def test_greedy_tokens_are_mlx_lms_where_bfloat16_log_probabilities_tie() -> None:
    """Source of the fact: 34 of 2000 random rows differ from an argmax of the logits."""
    logits = random_logits(600, seed=1, vocabulary=1024).astype(mx.bfloat16)
    ours = greedy_token(logits).tolist()
    # One token is computed ahead of the last that is handed out.
    steps = generate_step(
        mx.array([0]), Scripted(mx.concatenate([logits, logits[:2]])), max_tokens=600
    )
    assert ours == [int(token) for token, _ in steps]
    assert ours != mx.argmax(logits, axis=-1).tolist()


def test_greedy_choice_is_one_for_plain_draft_and_verify() -> None:
    logits = random_logits(600, seed=1, vocabulary=1024).astype(mx.bfloat16)
    chooser = Chooser(Sampling(), 0)
    wanted = greedy_token(logits).tolist()
    rows = [logits[i : i + 1] for i in range(logits.shape[0])]
    assert [chooser.token(row, 0).item() for row in rows] == wanted
    drafted = mx.concatenate([chooser.draft(row, 0).tokens for row in rows])
    assert drafted.tolist() == wanted


@pytest.mark.parametrize("name", FILTERS)
def test_filters_are_those_of_mlx_lms_sampler(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    logits = random_logits(40, seed=2)
    wanted = mlx_lm_chain(monkeypatch, logits, FILTERS[name])
    got = TargetDistribution(FILTERS[name], Noise(0)).log_probabilities(logits, 0)
    assert mx.array_equal(mx.isinf(got), mx.isinf(wanted))
    assert mx.allclose(mx.exp(got), mx.exp(wanted), rtol=1e-5, atol=1e-7)


def test_the_filters_orders_differ_on_these_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the comparison with mlx-lm's chain could not tell an order from another."""
    logits = random_logits(40, seed=2)
    s = FILTERS["all"]
    wanted = mlx_lm_chain(monkeypatch, logits, s)
    for cooled in (logits / s.temperature, sample_utils.apply_top_k(logits, s.top_k)):
        other = mlx_lm_chain(monkeypatch, cooled, s)
        assert not mx.array_equal(mx.isinf(other), mx.isinf(wanted))
