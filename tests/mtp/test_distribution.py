"""The real engine over Markov tables: what it emits has the target's joint distribution.

One long answer for each case. Cut into windows of K + 2 tokens, the windows after a token are
independent draws of that token's row in the exact joint distribution (numpy, float64), so Pearson's
chi-square over them, summed over the tokens that they follow, has its usual distribution.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from forced_copies import FixedLength
from tables import PROMPT, Logits, tell

from exo_node.mtp import sampler as chooser
from exo_node.mtp.accept import VerifyResult, accept_by_block
from exo_node.mtp.drafting.lookup_drafts import PromptLookup
from exo_node.mtp.grammar import GrammarMatcher
from exo_node.mtp.processors import Processors
from exo_node.mtp.sampling import ACCEPT, RESIDUAL, Distribution, Noise
from exo_node.mtp.types import Sampling

Floats = npt.NDArray[np.float64]
Rule = Callable[[Distribution, Distribution, mx.array, Noise, int], VerifyResult]

V = 4
TOKENS = 1000
"""Tokens per test: with 700 two of the six seeded faults below are not caught."""
SUSPICIOUS = 4.0
"""Standard deviations: by chance 1 case in 30,000. Entropies are fixed, so a case passes or not."""
CAUGHT = 6.0
"""The deviation that a seeded fault must reach, so that it does not take luck to see it."""


def markov(seed: int, spread: float = 1.0, vocabulary: int = V) -> Logits:
    """(1, V, V) logits after each token, the same at all positions."""
    draws = np.random.default_rng(seed).normal(size=(1, vocabulary, vocabulary))
    return (spread * draws).astype(np.float32)


def never(table: Logits, *tokens: int) -> Logits:
    banned = table.copy()
    banned[..., list(tokens)] = -np.inf
    return banned


TARGET = markov(11)
DRAFTS = {
    "right": TARGET,
    "near": TARGET + markov(12, spread=0.5),
    "another": markov(13, spread=2.0),
    "opposite": -2.0 * TARGET,
    "blind": never(TARGET, 1),
    "sure": 30.0 * TARGET,
}
WARM = Sampling(temperature=1.0)
FILTERS = {
    "cold": Sampling(temperature=0.6),
    "top_p": Sampling(temperature=1.5, top_p=0.8),
    "top_k": Sampling(temperature=0.8, top_k=2),
    "min_p": Sampling(temperature=1.3, min_p=0.2),
    "top_k, top_p and min_p": Sampling(temperature=0.9, top_k=3, top_p=0.95, min_p=0.05),
    "xtc": Sampling(temperature=0.9, xtc_probability=0.5, xtc_threshold=0.15),
    "xtc and top_k": Sampling(temperature=1.1, xtc_probability=0.4, xtc_threshold=0.1, top_k=3),
}


def exact(table: Logits, s: Sampling) -> Floats:
    """(V, V) probabilities after each token: top_p, min_p, xtc, top_k, then temperature."""
    x = table[0].astype(np.float64)
    p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    order = np.argsort(-p, axis=-1)
    above = np.empty_like(p)
    np.put_along_axis(above, order, np.take_along_axis(p, order, -1).cumsum(-1), -1)
    mask = above - p < s.top_p
    mask &= p >= s.min_p * p.max(-1, keepdims=True)
    if not s.xtc_probability:
        return _cooled(x, _top(x, mask, s.top_k), s.temperature)
    share = np.where(mask, p, 0) / np.where(mask, p, 0).sum(-1, keepdims=True)
    least = np.where(share > s.xtc_threshold, share, np.inf).min(-1, keepdims=True)
    rows = [mask & (share <= least), mask]
    without, whole = (_cooled(x, _top(x, row, s.top_k), s.temperature) for row in rows)
    return s.xtc_probability * without + (1 - s.xtc_probability) * whole


def _top(x: Floats, mask: npt.NDArray[np.bool_], k: int) -> npt.NDArray[np.bool_]:
    masked = np.where(mask, x, -np.inf)
    return mask & (masked >= np.sort(masked, axis=-1)[:, -(k or x.shape[-1]), None])


def _cooled(x: Floats, mask: npt.NDArray[np.bool_], temperature: float) -> Floats:
    weights = np.where(mask, np.exp(x / temperature), 0.0)
    return weights / weights.sum(-1, keepdims=True)


def surprise(ids: tuple[int, ...], rows: Floats, length: int) -> float:
    """Chi-square of the windows of `ids` as standard deviations (Wilson-Hilferty)."""
    starts = range(0, len(ids) - length, length)
    counts = Counter(ids[start : start + length + 1] for start in starts)
    chi, free = 0.0, 0
    for before in range(rows.shape[0]):
        paths = [(before, *after) for after in itertools.product(range(V), repeat=length)]
        chances = {
            path: math.prod(float(rows[a, b]) for a, b in itertools.pairwise(path))
            for path in paths
        }
        if any(counts[path] and not chances[path] for path in paths):
            return math.inf
        cells = pooled(counts, chances)
        chi += sum((count - expected) ** 2 / expected for count, expected in cells)
        free += max(len(cells) - 1, 0)
    assert free >= 2, "too few tokens to tell anything"
    spread = 2 / (9 * free)
    return ((chi / free) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def pooled(
    counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]
) -> list[tuple[int, float]]:
    """(seen, expected) with rare windows together, so that each is expected five times at least."""
    total = sum(counts[path] for path in chances)
    cells: list[tuple[int, float]] = []
    count, expected = 0, 0.0
    for path in sorted(chances, key=lambda path: chances[path]):
        count, expected = count + counts[path], expected + total * chances[path]
        if expected >= 5:
            cells.append((count, expected))
            count, expected = 0, 0.0
    return cells


def deviation(
    target: Logits,
    draft: Logits,
    k: int,
    s: Sampling,
    tokens: int = TOKENS,
    *,
    runs_ahead: bool = False,
    copies: int = 0,
    grammar: GrammarMatcher | None = None,
    expected: Logits | None = None,
    in_blocks: bool = False,
    follows: bool = False,
) -> float:
    """How far a long answer is from the target's joint distribution over 1 to K + 2 tokens.

    The longest windows show what a round does to the next one; the short ones are more and show a
    small bias sooner. `copies`: tokens that a round copies from the answer, in place of drafts.
    `expected`: the target's logits after penalties, bias and grammar.
    """
    wide = [np.broadcast_to(t, (tokens + 8, *t.shape[1:])) for t in (target, draft)]
    drafts = wide[0], wide[1], k
    lookup = PromptLookup(PROMPT, FixedLength(copies)) if copies else None
    answer = tell(
        *drafts,
        sampling=s,
        entropy=k,
        max_tokens=tokens,
        runs_ahead=runs_ahead,
        lookup=lookup,
        grammar=grammar,
        in_blocks=in_blocks,
        follows=follows,
    )
    mixed = (r for r in answer.rounds if r.is_copied and 0 < r.accepted < r.drafted)
    assert any(mixed) or not copies
    rows = exact(target if expected is None else expected, s)
    return max(surprise(answer.ids, rows, length) for length in range(1, max(k, copies) + 3))


@pytest.mark.parametrize(
    ("k", "draft"),
    [
        *[(2, "right"), (3, "near"), (2, "another"), (3, "opposite"), (2, "blind"), (3, "sure")],
        *[(1, "right"), (1, "opposite"), (1, "sure")],
    ],
)
def test_block_verification_leaves_the_targets_distribution(k: int, draft: str) -> None:
    assert deviation(TARGET, DRAFTS[draft], k, WARM) < SUSPICIOUS


@pytest.mark.parametrize(("k", "name"), [*zip(itertools.cycle([2, 3, 1]), FILTERS, strict=False)])
def test_the_distribution_holds_under_filters(k: int, name: str) -> None:
    draft = DRAFTS["near" if k == 3 else "another"]
    assert deviation(TARGET, draft, k, FILTERS[name]) < SUSPICIOUS


@pytest.mark.parametrize(("k", "s"), [(1, WARM), (2, FILTERS["top_k"])])
def test_it_holds_where_only_the_first_ids_can_be_drafted(k: int, s: Sampling) -> None:
    """A drafter that knows three of four ids, and one that knows as few as top_k keeps."""
    assert deviation(TARGET, DRAFTS["near"][..., : 4 - k], k, s) < SUSPICIOUS


@pytest.mark.parametrize(("k", "draft", "name"), [(1, "near", "xtc"), (3, "another", "top_k")])
def test_it_holds_where_a_block_is_drafted_at_once(k: int, draft: str, name: str) -> None:
    """Each draft has a distribution of its own, whatever is drawn in front of it."""
    assert deviation(TARGET, DRAFTS[draft], k, WARM, in_blocks=True) < SUSPICIOUS
    assert deviation(TARGET, DRAFTS[draft], k, FILTERS[name], in_blocks=True) < SUSPICIOUS


@pytest.mark.parametrize(("k", "draft", "name"), [(2, "near", "cold"), (3, "another", "top_k")])
def test_it_holds_where_drafts_of_a_block_follow_each_other(k: int, draft: str, name: str) -> None:
    how: dict[str, Any] = {"in_blocks": True, "follows": True}
    assert deviation(TARGET, DRAFTS[draft], k, WARM, **how) < SUSPICIOUS
    assert deviation(TARGET, DRAFTS[draft], k, FILTERS[name], runs_ahead=True, **how) < SUSPICIOUS


@pytest.mark.parametrize(("k", "draft", "name"), [(2, "near", "cold"), (3, "sure", "top_p")])
def test_it_holds_where_rounds_are_issued_ahead(k: int, draft: str, name: str) -> None:
    assert deviation(TARGET, DRAFTS[draft], k, FILTERS[name], runs_ahead=True) < SUSPICIOUS


@pytest.mark.parametrize(
    ("k", "copies", "name"), [(0, 2, "cold"), (0, 3, "top_p"), (2, 3, "top_k"), (3, 2, "xtc")]
)
def test_it_holds_where_tokens_are_copied(k: int, copies: int, name: str) -> None:
    assert deviation(TARGET, DRAFTS["near"], k, WARM, copies=copies) < SUSPICIOUS
    assert deviation(TARGET, DRAFTS["near"], k, FILTERS[name], copies=copies) < SUSPICIOUS


class NeverTwice:
    """A grammar that allows all but the last token. It masks no draft: there are too few ids."""

    failed = ""

    def __init__(self) -> None:
        self._last = PROMPT[-1]

    def take(self, tokens: Sequence[int]) -> None:
        self._last = tokens[-1]

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        return [(0b1111 ^ 1 << last).to_bytes(4, "little") for last in (self._last, *drafts)]


BIASED = replace(WARM, logit_bias=tuple(enumerate((0.7, -1.0, 0.4, 0.0))))
PENALISED = replace(WARM, presence_penalty=1.5, repetition_context_size=1)
"""A penalty of the last token alone keeps an answer a Markov chain."""
PENALTY: Logits = (1.5 * np.eye(V)).astype(np.float32)


@pytest.mark.parametrize(("k", "copies"), [(3, 0), (0, 3)])
def test_it_holds_under_a_bias_a_penalty_and_a_grammar(k: int, copies: int) -> None:
    near, masked = DRAFTS["near"], TARGET.copy()
    masked[0][np.diag_indices(V)] = -np.inf
    biased = TARGET + np.array([0.7, -1.0, 0.4, 0.0], dtype=np.float32)
    assert deviation(TARGET, near, k, BIASED, copies=copies, expected=biased) < SUSPICIOUS
    assert (
        deviation(TARGET, near, k, PENALISED, copies=copies, expected=TARGET - PENALTY) < SUSPICIOUS
    )
    got = deviation(TARGET, near, k, WARM, copies=copies, grammar=NeverTwice(), expected=masked)
    assert got < SUSPICIOUS


def test_the_same_check_catches_a_penalty_that_forgets_the_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply = Processors.apply

    def forgetful(self: Processors, logits: mx.array, drafts: mx.array | None = None) -> mx.array:
        return apply(self, logits, None if drafts is None else mx.zeros_like(drafts))

    monkeypatch.setattr(Processors, "apply", forgetful)
    assert deviation(TARGET, DRAFTS["near"], 3, PENALISED, expected=TARGET - PENALTY) > CAUGHT


def test_a_seeds_tokens_have_the_targets_distribution() -> None:
    seeded = Sampling(temperature=1.0, seed=8)
    assert deviation(TARGET, DRAFTS["near"], 2, seeded) < SUSPICIOUS


def _ruled(
    p: Distribution, weights: mx.array, accepted: mx.array, drafts: mx.array, noise: Noise, at: int
) -> VerifyResult:
    """`accepted` drafts, then a draw from `weights` (K, V) or, after all, from p."""
    logs = mx.concatenate([mx.log(weights), p.log_p[-1:]])[accepted]
    drawn = mx.argmax(logs + noise.gumbel(at, 1, V, RESIDUAL)[0]).astype(mx.int32)
    is_accepted = mx.arange(drafts.shape[0] + 1) < accepted
    return VerifyResult(
        accepted, mx.where(is_accepted, mx.concatenate([drafts, drafts[-1:]]), drawn)
    )


def by_argmax(
    p: Distribution, q: Distribution, drafts: mx.array, noise: Noise, at: int
) -> VerifyResult:
    """A draft stands when it is the target's likeliest token (vllm-mlx#82)."""
    stands = mx.argmax(p.log_p[:-1], axis=-1) == drafts
    accepted = mx.cumprod(stands.astype(mx.int32)).sum()
    return _ruled(p, mx.exp(p.log_p[:-1]), accepted, drafts, noise, at)


def residual_of_p(
    p: Distribution, q: Distribution, drafts: mx.array, noise: Noise, at: int
) -> VerifyResult:
    """A replacement of a rejected draft is drawn from p, not from norm(max(p - q, 0))."""
    accepted = accept_by_block(p, q, drafts, noise, at).accepted
    return _ruled(p, mx.exp(p.log_p[:-1]), accepted, drafts, noise, at)


def without_replacement(
    p: Distribution, q: Distribution, drafts: mx.array, noise: Noise, at: int
) -> VerifyResult:
    """A rejected draft is emitted all the same."""
    verdict = accept_by_block(p, q, drafts, noise, at)
    last = mx.concatenate([drafts, verdict.tokens[-1:]])
    return VerifyResult(verdict.accepted, last)


def without_quotient(
    p: Distribution, q: Distribution, drafts: mx.array, noise: Noise, at: int
) -> VerifyResult:
    """A draft stands with probability p, not min(1, p / q)."""
    log_p = mx.take_along_axis(p.log_p[:-1], drafts[:, None], axis=-1)[:, 0]
    stands = mx.log(noise.uniform(at, drafts.shape[0], ACCEPT)) < log_p
    residual = mx.maximum(mx.exp(p.log_p[:-1]) - mx.exp(q.log_p), 0)
    return _ruled(p, residual, mx.cumprod(stands.astype(mx.int32)).sum(), drafts, noise, at)


def block_by_weight(
    p: Distribution, q: Distribution, drafts: mx.array, noise: Noise, at: int
) -> VerifyResult:
    """A block stands with probability w, without regard to what follows it."""
    k = drafts.shape[0]
    chosen = drafts[:, None]
    ratio = mx.take_along_axis(p.log_p[:k] - q.log_p, chosen, axis=-1)[:, 0]
    total = mx.cumsum(ratio)
    weight = mx.exp(total - mx.maximum(mx.cummax(total), 0))
    stands = noise.uniform(at, k, ACCEPT) < weight
    residual = mx.maximum(mx.exp(p.log_p[:k]) - mx.exp(q.log_p), 0)
    return _ruled(p, residual, (stands * mx.arange(1, k + 1)).max(), drafts, noise, at)


def test_the_same_check_catches_a_biased_rule_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "accept_by_block", by_argmax)
    assert deviation(TARGET, DRAFTS["near"], 0, WARM, copies=3) > CAUGHT


@pytest.mark.parametrize(
    ("rule", "k", "draft"),
    [
        (by_argmax, 2, "near"),
        (residual_of_p, 3, "opposite"),
        (without_replacement, 2, "near"),
        (without_quotient, 2, "near"),
        (block_by_weight, 3, "blind"),
    ],
)
def test_the_same_check_catches_a_biased_rule(
    monkeypatch: pytest.MonkeyPatch, rule: Rule, k: int, draft: str
) -> None:
    monkeypatch.setattr(chooser, "accept_by_block", rule)
    assert deviation(TARGET, DRAFTS[draft], k, WARM) > CAUGHT


def test_block_verification_needs_noise_that_earlier_rounds_did_not_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round that keeps few drafts has looked at the noise of the positions after them."""

    def of_position(self: Noise, _position: int) -> Noise:
        return self

    monkeypatch.setattr(Noise, "of_round", of_position)
    assert deviation(TARGET, DRAFTS["sure"], 3, WARM, 2 * TOKENS) > CAUGHT


LONG = Sampling(temperature=1.1, top_k=3, seed=5)
SEEDED = {
    "whole rows": Sampling(temperature=1.2, seed=5),
    "top_k": LONG,
    "xtc": Sampling(temperature=1.0, seed=6, xtc_probability=0.5, xtc_threshold=0.1),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_gives_the_same_tokens_at_every_k_with_any_drafter(name: str) -> None:
    target = np.broadcast_to(TARGET, (64, V, V))
    drafts = [*DRAFTS.values(), DRAFTS["near"][..., :3], DRAFTS["near"][..., :2]]
    answers = {
        tell(
            target,
            np.broadcast_to(draft, (64, *draft.shape[1:])) if k else None,
            k,
            sampling=SEEDED[name],
            entropy=k,
            max_tokens=40,
        ).ids
        for k in (0, 1, 2, 3)
        for draft in (drafts if k else drafts[:1])
    }
    [answer] = answers
    assert len(set(answer)) > 1


@pytest.mark.parametrize("k", [0, 1, 3])
def test_xtc_leaves_each_position_its_own_share(k: int) -> None:
    """The rows after the first token of many answers, whose draws are of the same positions."""
    s = FILTERS["xtc"]
    rows, target = exact(TARGET, s), np.broadcast_to(TARGET, (16, V, V))
    first = rows[PROMPT[-1]]
    second = first @ rows
    counts = np.zeros((2, V))
    for entropy in range(300):
        draft = np.broadcast_to(DRAFTS["near"], (16, V, V)) if k else None
        ids = tell(target, draft, k, sampling=s, entropy=entropy, max_tokens=k + 2).ids
        counts[0, ids[0]] += 1
        counts[1, ids[1]] += 1
    for count, expected in zip(counts, 300 * np.stack([first, second]), strict=True):
        chi = float(((count - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
        assert chi < 21.1, "1 in 10,000 at 3 degrees of freedom"
