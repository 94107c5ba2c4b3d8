"""The target distribution is mlx-lm's, and its noise belongs to positions."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm import sample_utils
from mlx_lm.generate import generate_step

from exo_node.mtp.sampler import Sampler
from exo_node.mtp.sampling import (
    ACCEPT,
    RESIDUAL,
    TOKEN,
    XTC,
    Distribution,
    Noise,
    TargetDistribution,
    _likeliest,  # pyright: ignore[reportPrivateUsage]
    draw,
    greedy_token,
)
from exo_node.mtp.seams import Drafts, as_ids, joined_drafts
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
    logits_list: list[mx.array] = []

    def categorical(logprobs: mx.array, temperature: float) -> mx.array:
        logits_list.append(logprobs * (1 / temperature))
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
    return logits_list[0] - mx.logsumexp(logits_list[0], axis=-1, keepdims=True)


class Scripted(nn.Module):
    """A model for mlx-lm's `generate_step` that gives the next of its rows at each call."""

    def __init__(self, rows: mx.array) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self._rows = [row[None, None] for row in rows]

    def __call__(self, _ids: mx.array, **_: Any) -> mx.array:
        return self._rows.pop(0)


@pytest.fixture(scope="module")
def ties() -> mx.array:
    """Rows some of which have equal log-probabilities in bfloat16 where the logits differ."""
    logits = mx.random.normal((400, 1024), key=mx.random.key(1)).astype(mx.bfloat16)
    log_probabilities = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert not mx.array_equal(mx.argmax(log_probabilities, axis=-1), mx.argmax(logits, axis=-1))
    return logits


def test_greedy_tokens_are_mlx_lms_where_bfloat16_log_probabilities_tie(ties: mx.array) -> None:
    # mlx-lm computes one token ahead of the last that it hands out.
    model: Any = Scripted(mx.concatenate([ties, ties[:1]]))
    steps = generate_step(mx.array([0]), model, max_tokens=ties.shape[0])
    assert [int(token) for token, _ in steps] == greedy_token(ties).tolist()


def test_the_greedy_choice_is_one_for_plain_decoding_draft_and_verify(ties: mx.array) -> None:
    chooser = Sampler(Sampling(), 0)
    rows = [ties[i : i + 1] for i in range(ties.shape[0])]
    plain = mx.concatenate([chooser.token(row, 0) for row in rows])
    drafted = mx.concatenate([chooser.draft(row, 0).tokens for row in rows])
    verdict = chooser.judge(ties, Drafts(plain[:-1], None), 0)
    assert plain.tolist() == drafted.tolist() == greedy_token(ties).tolist()
    assert verdict.accepted.item() == ties.shape[0] - 1


@pytest.mark.parametrize("name", [*FILTERS, "xtc"])
def test_filters_are_those_of_mlx_lms_sampler(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    logits, sampling = random_logits(40, seed=2), FILTERS.get(name, XTC_ALWAYS)
    expected = mlx_lm_chain(monkeypatch, logits, sampling)
    got = TargetDistribution(sampling, Noise(0), (3,)).log_probabilities(logits, 0)
    assert name != "xtc" or mx.isinf(expected).any()
    assert mx.array_equal(mx.isinf(got), mx.isinf(expected))
    assert mx.allclose(mx.exp(got), mx.exp(expected), rtol=1e-5, atol=1e-7)


XTC_ALWAYS = Sampling(temperature=0.9, xtc_probability=1.0, xtc_threshold=0.05)
XTC_NEVER = Sampling(temperature=0.9)
XTC_HALF = Sampling(temperature=0.9, xtc_probability=0.5, xtc_threshold=0.05)


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-37, 9e-6])
@pytest.mark.parametrize("top_k", [0, 5])
def test_a_temperature_next_to_none_is_greedy(temperature: float, top_k: int) -> None:
    logits = random_logits(40, seed=2)
    chooser = Sampler(Sampling(temperature=temperature, top_k=top_k), 3)
    assert as_ids(chooser.token(logits, 0)) == as_ids(greedy_token(logits))


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1.0])
@pytest.mark.parametrize("size", [1.0, 1e4, 1e30, 3e38])
@pytest.mark.parametrize("top_k", [0, 5])
def test_large_logits_and_low_temperatures_leave_a_distribution(
    temperature: float, size: float, top_k: int
) -> None:
    logits = size * mx.tanh(random_logits(40, seed=2))
    s = Sampling(temperature=temperature, top_k=top_k)
    log_p = TargetDistribution(s, Noise(0))(logits, 0).log_p
    assert mx.allclose(mx.exp(log_p).sum(axis=-1), mx.ones(40), rtol=1e-5)


@pytest.mark.parametrize("top_p", [1e-320, 1e-46, 1e-40, 1e-7])
@pytest.mark.parametrize("top_k", [0, 5])
def test_a_top_p_next_to_none_keeps_the_likeliest_alone(top_p: float, top_k: int) -> None:
    logits = random_logits(40, seed=2)
    s = Sampling(temperature=1.0, top_p=top_p, top_k=top_k)
    distribution = TargetDistribution(s, Noise(0))(logits, 0)
    assert (distribution.log_p == 0).sum(axis=-1).tolist() == [1] * 40
    assert as_ids(draw(distribution, Noise(0), 0)) == as_ids(mx.argmax(logits, axis=-1))


def test_xtc_never_removes_special_tokens() -> None:
    logits = random_logits(40, seed=3)
    likeliest = as_ids(mx.argmax(logits, axis=-1))
    spared = TargetDistribution(XTC_ALWAYS, Noise(0), tuple(likeliest))
    for row, token in enumerate(likeliest):
        assert math.isfinite(float(spared.log_probabilities(logits, 0)[row, token]))


def test_xtc_applies_to_the_positions_whose_draw_is_not_above_its_probability() -> None:
    logits, noise = random_logits(60, seed=4), Noise(9)
    rows = TargetDistribution(XTC_HALF, noise).log_probabilities(logits, 100)
    always = TargetDistribution(XTC_ALWAYS, noise).log_probabilities(logits, 100)
    never = TargetDistribution(XTC_NEVER, noise).log_probabilities(logits, 100)
    applied = (noise.uniform(100, 60, XTC) <= 0.5)[:, None]
    assert 15 < int(applied.sum()) < 45
    assert mx.array_equal(rows, mx.where(applied, always, never))


@pytest.mark.parametrize("name", FILTERS)
def test_draft_and_verify_see_the_same_distribution_and_draw(name: str) -> None:
    """XTC too: a draft made at one position is accepted there when the logits are the same."""
    for sampling in (FILTERS[name], replace(FILTERS[name], xtc_probability=0.5)):
        chooser = Sampler(replace(sampling, seed=4), 0)
        logits = random_logits(9, seed=5)
        drafts = [chooser.draft(logits[i : i + 1], 70 + i) for i in range(8)]
        joined = Drafts(mx.concatenate([draft.tokens for draft in drafts]), None)
        assert chooser.judge(logits, joined, 70).accepted.item() == 8
        target = TargetDistribution(sampling, Noise(4))
        together = target(logits, 70)
        for row in range(8):
            alone = target(logits[row : row + 1], 70 + row)
            assert mx.array_equal(alone.log_p[0], together.log_p[row])


WHOLE_ROWS = {
    name: s for name, s in FILTERS.items() if not 0 < s.top_k < VOCABULARY or s.xtc_probability
}
FEW_IDS = {name: s for name, s in FILTERS.items() if name not in WHOLE_ROWS} | {
    "top_k and min_p": Sampling(temperature=1.0, top_k=9, min_p=0.2),
    "top_k of one": Sampling(temperature=0.5, top_k=1),
    "top_p below every share": Sampling(temperature=1.0, top_k=6, top_p=1e-6),
}


def whole(distribution: Distribution, vocabulary: int) -> mx.array:
    """(rows, vocabulary) log-probabilities, -inf where none is listed."""
    rows = distribution.log_p.shape[0]
    return distribution.of(
        mx.broadcast_to(mx.arange(vocabulary, dtype=mx.int32), (rows, vocabulary))
    )


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_without_a_small_top_k_whole_rows_are_worked_on(name: str) -> None:
    assert TargetDistribution(WHOLE_ROWS[name], Noise(0))(random_logits(2, 1), 0).ids is None


@pytest.mark.parametrize("vocabulary", [64, 1000, 5000])
@pytest.mark.parametrize("name", FEW_IDS)
def test_a_small_top_k_lists_its_ids_alone_with_the_same_probabilities(
    name: str, vocabulary: int
) -> None:
    target = TargetDistribution(FEW_IDS[name], Noise(0))
    logits = random_logits(30, seed=6, vocabulary=vocabulary)
    few, expected = target(logits, 0), target.log_probabilities(logits, 0)
    assert few.log_p.shape == (30, FEW_IDS[name].top_k)
    got = whole(few, vocabulary)
    assert mx.array_equal(mx.isinf(got), mx.isinf(expected))
    assert mx.allclose(mx.exp(got), mx.exp(expected), rtol=1e-5, atol=1e-7)


def test_xtc_looks_at_whole_rows_even_under_a_small_top_k() -> None:
    """It removes likely tokens before top_k counts, so less likely ones move up."""
    both = replace(XTC_ALWAYS, top_k=4)
    distribution = TargetDistribution(both, Noise(0))(random_logits(20, seed=3), 0)
    assert distribution.ids is None
    assert mx.array_equal(mx.isfinite(distribution.log_p).sum(axis=-1), mx.full((20,), 4))


@pytest.mark.parametrize("k", [1, 20, 38, 39, 40, 200])
def test_the_likeliest_are_found_in_blocks_and_in_what_is_left_over(k: int) -> None:
    vocabulary = 39 * 128 + 17
    x = random_logits(8, seed=7, vocabulary=vocabulary)
    x[0, -1], x[1, 128 * 5 : 128 * 5 + 60] = 50.0, 40.0 + mx.arange(60)
    values, ids = _likeliest(x, k)
    assert mx.array_equal(mx.sort(values, axis=-1), mx.sort(x, axis=-1)[:, vocabulary - k :])
    assert mx.array_equal(mx.take_along_axis(x, ids, axis=-1), values)
    assert all(len(set(row)) == k for row in [as_ids(row) for row in ids])


def test_noise_is_gumbels_and_no_two_ids_share_it() -> None:
    row = Noise(5).gumbel(9, 2, 20_000, TOKEN)
    assert len(set(as_ids(mx.flatten(row)))) > 39_900
    assert abs(float(row.mean()) - 0.5772) < 0.03
    assert abs(float(row.var()) - math.pi**2 / 6) < 0.06


def test_a_rounds_noise_is_its_own() -> None:
    noise = Noise(3)
    draws = [noise, noise.of_round(7), noise.of_round(8), Noise(4).of_round(7)]
    numbers = [float(round_noise.uniform(8, 1, ACCEPT)) for round_noise in draws]
    assert len(set(numbers)) == 4
    assert noise.of_round(7) == Noise(3).of_round(7)


@pytest.mark.parametrize("name", FILTERS)
def test_a_row_over_the_first_ids_draws_the_seeds_token_where_it_has_it(name: str) -> None:
    """A drafter of few ids and the target choose alike when the target's choice is among them."""
    chooser = Sampler(replace(FILTERS[name], seed=4, xtc_probability=0.5), 0, (3, 60))
    logits = random_logits(60, seed=8)
    logits[:, 40:] -= 30
    chosen = [chooser.token(logits[i : i + 1], 70 + i) for i in range(60)]
    drafted = [chooser.draft(logits[i : i + 1, :40], 70 + i).tokens for i in range(60)]
    assert [as_ids(ids) for ids in chosen] == [as_ids(ids) for ids in drafted]


@pytest.mark.parametrize("name", FILTERS)
def test_drafts_over_the_first_ids_meet_a_target_over_all(name: str) -> None:
    """Every rule: a target that never gives those ids accepts none, one that is sure accepts."""
    for seed in (None, 3):
        for s in (replace(FILTERS[name], seed=seed), Sampling()):
            chooser = Sampler(s, 1)
            drafts = joined_drafts(
                [chooser.draft(random_logits(1, i)[:, :40], 5 + i) for i in range(2)]
            )
            never, sure = random_logits(3, 8), random_logits(3, 8)
            never[:, :40] = -math.inf
            for row, token in enumerate(as_ids(drafts.tokens)):
                sure[row, token] = 60.0
            accepted, [first, *_] = chooser.judge(never, drafts, 5).read()
            assert (accepted, first >= 40) == (0, True)
            assert chooser.judge(sure, drafts, 5).read()[0] == 2


@pytest.mark.parametrize("drafted", [False, True])
def test_target_logprobs_are_processed_and_neither_cooled_nor_filtered(drafted: bool) -> None:
    penalised = Sampling(0.2, top_k=2, presence_penalty=0.5, logit_bias=((4, 3.0),))
    chooser = Sampler(penalised, 0, prompt=[1, 2])
    logits = random_logits(3 if drafted else 1, seed=9).astype(mx.bfloat16)
    drafts = Drafts(mx.array([7, 8]), None) if drafted else None
    got = chooser.target_logprobs(logits, drafts)
    assert got.dtype == mx.float32
    for row in range(logits.shape[0]):
        expected = mx.array(logits[row])
        expected[mx.array([1, 2, 7, 8][: 2 + row])] -= 0.5
        expected[4] += 3.0
        expected = expected.astype(mx.float32)
        assert mx.allclose(got[row], expected - mx.logsumexp(expected), atol=1e-5)


@pytest.mark.parametrize("stream", [TOKEN, XTC, ACCEPT, RESIDUAL])
def test_a_positions_noise_does_not_depend_on_how_rows_are_grouped(stream: int) -> None:
    noise = Noise(2)
    for parts in ([7], [1] * 7, [3, 4], [5, 1, 1]):
        starts = [20 + sum(parts[:i]) for i in range(len(parts))]
        split = list(zip(starts, parts, strict=True))
        gumbel = mx.concatenate([noise.gumbel(start, rows, 11, stream) for start, rows in split])
        uniform = mx.concatenate([noise.uniform(start, rows, stream) for start, rows in split])
        assert mx.array_equal(gumbel, noise.gumbel(20, 7, 11, stream))
        assert mx.array_equal(uniform, noise.uniform(20, 7, stream))


def test_positions_streams_and_seeds_have_noise_of_their_own() -> None:
    keys = itertools.product([0, 1, -1, 2**63], [0, 1, 2, 500], [TOKEN, XTC, ACCEPT, RESIDUAL])
    draws = [float(Noise(seed).uniform(at, 1, stream)) for seed, at, stream in keys]
    assert len(set(draws)) == len(draws)
    assert all(0 <= draw < 1 for draw in draws)


def test_draws_follow_the_distribution() -> None:
    p = mx.array([[0.5, 0.3, 0.15, 0.05, 0.0]])
    ids = draw(Distribution(mx.repeat(mx.log(p), 4000, axis=0)), Noise(6), 0)
    shares = mx.array([int((ids == token).sum()) for token in range(5)]) / 4000
    assert mx.allclose(shares, p[0], rtol=0, atol=0.02)
    assert float(shares[4]) == 0
