"""Checks of answers with and without drafts (greedy, seeded) and of sampled tokens."""

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ....mtp.caches.batch_caches import can_batch
from ....mtp.sampler import Sampler
from ....mtp.sampling import Noise, TargetDistribution
from ....mtp.seams import as_row
from ....mtp.types import Round, Sampling
from ...engine.drafter import Drafter, DraftModel
from ...engine.states.state import DraftState
from ..bare_engine import ids_of
from .numbers import Difference, ReferenceRun, batch_difference
from .report import Check, Finding
from .subject import Forwards, ModelUnderTest, answer, answers_together

Floats = npt.NDArray[np.float64]

NEAR_TIE_MARGIN = 4
"""Multiple of tau: caches of a long answer add up more rounding than the rows of tau."""
MIN_BATCH = 4
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=7)
SAMPLINGS = (Sampling(temperature=1.0), Sampling(temperature=0.8, top_k=8))
MIN_EXPECTED_COUNT = 8
MAX_SURPRISE = 4.5
"""The limit in standard deviations, which chance exceeds once in 300,000 tests."""


Figures = dict[str, Any]
"""JSON values of a check."""


def check_greedy(
    subject: ModelUnderTest,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    tau: float,
    *,
    bitwise: bool,
) -> Check:
    """Checks that every K gives the answers of K=0; near ties may differ unless blocks are bitwise.

    `tau` is the largest near-tie gap that `check_blocks` measured.
    """
    if subject.draft_model is None:
        return Check("greedy", "skipped", subject.no_drafts, {})
    plain = [answer(subject, prompt, 0, tokens, top=2) for prompt in prompts]
    comparisons = [_compare_depth(subject, prompts, plain, k, tokens) for k in subject.depths]
    gaps = [gap for each in comparisons for gap in each["top2_gap_at_difference"]]
    limit = 0.0 if bitwise else NEAR_TIE_MARGIN * tau
    pattern = pattern_of([each["first_difference"] for each in comparisons])
    numbers = {
        "prompts": len(prompts),
        "tokens": tokens,
        "largest_near_tie": limit,
        "pattern": pattern,
        "per_k": comparisons,
    }
    if not gaps:
        summary = (
            f"K=1 to {subject.max_k} give the answers of K=0, token by token "
            f"({len(prompts)} x {tokens} tokens)"
        )
        return Check("greedy", "ok", summary, numbers)
    where = f"{len(gaps)} of {len(comparisons) * len(prompts)} answers differ from K=0 ({pattern})"
    return _different("greedy", where, max(gaps), "rollback or acceptance is wrong", numbers)


def _different(name: str, where: str, gap: float, wrong: str, numbers: Figures) -> Check:
    """The check of answers that differ, by the largest `gap` at which one first does."""
    if gap <= numbers["largest_near_tie"]:
        return Check(name, "differs", f"{where}, each first at a near tie", numbers)
    return Check(name, "defect", f"{where}, and near ties do not explain it: {wrong}", numbers)


def _compare_depth(
    subject: ModelUnderTest,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[Round]],
    k: int,
    tokens: int,
) -> Figures:
    """Compares answers with K drafts with those without, prompt by prompt."""
    differences: list[int | None] = []
    gaps: list[float] = []
    rounds: list[Round] = []
    for prompt, expected in zip(prompts, plain, strict=True):
        actual = answer(subject, prompt, k, tokens)
        rounds += actual
        index = first_difference(ids_of(expected), ids_of(actual))
        differences.append(index)
        if index is not None:
            gaps.append(_top2_gap(expected, index))
    return {
        "k": k,
        "first_difference": differences,
        "top2_gap_at_difference": gaps,
        "proposed": sum(r.drafted for r in rounds),
        "accepted": sum(r.accepted for r in rounds),
    }


def _top2_gap(rounds: Sequence[Round], at: int) -> float:
    """The gap of the two most likely tokens, at an index of an answer with log-probabilities."""
    best, second = [entry for each in rounds for entry in each.logprobs][at].top[:2]
    return best[1] - second[1]


def pattern_of(first_differences: Sequence[Sequence[int | None]]) -> str:
    """How the first difference, by K and prompt, moves with K. Rounding does not depend on the
    number of drafts."""
    rows = zip(*first_differences, strict=True)
    kinds = {_course([at for at in row if at is not None]) for row in rows} - {""}
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "none"


def _course(at: Sequence[int]) -> str:
    if len(at) < 2:
        return ""
    if len(set(at)) == 1:
        return "at the same token for every K"
    falling = all(a > b for a, b in itertools.pairwise(at))
    return "earlier with every further draft" if falling else "mixed"


def check_batch(
    subject: ModelUnderTest,
    chain: ReferenceRun,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    blocks: Difference,
) -> Check:
    """Compares batched answers, with drafts if there is a head, with each answer alone.

    `blocks`: the largest difference of `check_blocks`; a batch adds its own.
    """
    if not can_batch(subject.make_caches()):
        return Check("batch", "skipped", "this model's caches are not computed in batches", {})
    # Of different lengths: equal ones would hide a wrong mask.
    shorter = (chain.prompt[: -3 * n] for n in range(1, MIN_BATCH))
    batch_prompts = [*prompts, *itertools.islice(shorter, max(0, MIN_BATCH - len(prompts)))]
    steps = batch_difference(subject, chain, batch_prompts[1:])
    k = subject.max_k if subject.draft_model is not None else 0
    plain = [answer(subject, prompt, 0, tokens, top=2) for prompt in batch_prompts]
    batched = answers_together(subject, batch_prompts, k, tokens)
    tie_gaps = list[float]()
    for alone, together in zip(plain, batched, strict=True):
        at = first_difference(ids_of(alone), ids_of(together))
        if at is not None:
            tie_gaps.append(_top2_gap(alone, at))
    size = max(each.forward.batch for rounds in batched for each in rounds)
    limit = NEAR_TIE_MARGIN * max(steps.tau, blocks.tau)
    numbers = {"k": k, "batch": size, "largest_near_tie": limit, **steps.numbers()}
    description = f"{len(batch_prompts)} answers, up to {size} in a step, K={k}"
    if not tie_gaps:
        finding = steps.finding(subject.dtype)
        same = "bit for bit" if finding == "ok" else "though logits differ by rounding"
        return Check("batch", finding, f"{description}: each as it is alone, {same}", numbers)
    where = f"{description}: {len(tie_gaps)} differ from what they are alone"
    return _different("batch", where, max(tie_gaps), "requests change each other", numbers)


def check_seeded(
    subject: ModelUnderTest, prompts: Sequence[Sequence[int]], tokens: int, *, bitwise: bool
) -> Check:
    """Checks that a seed gives the same sampled tokens at every K."""
    if subject.draft_model is None:
        return Check("seeded", "skipped", subject.no_drafts, {})
    depths = sorted({1, subject.max_k})
    per_k: list[dict[str, Any]] = [{"k": k, "first_difference": []} for k in depths]
    for prompt in prompts:
        plain = ids_of(answer(subject, prompt, 0, tokens, sampling=SEEDED))
        for each in per_k:
            ids = ids_of(answer(subject, prompt, each["k"], tokens, sampling=SEEDED))
            each["first_difference"].append(first_difference(plain, ids))
    numbers = {
        "temperature": SEEDED.temperature,
        "top_p": SEEDED.top_p,
        "tokens": tokens,
        "per_k": per_k,
    }
    different = sum(at is not None for each in per_k for at in each["first_difference"])
    if not different:
        depth_names = " and ".join(f"K={k}" for k in depths)
        summary = f"the same seed gives the tokens of K=0 at {depth_names}"
        return Check("seeded", "ok", summary, numbers)
    finding: Finding = "defect" if bitwise else "differs"
    why = "although blocks are exact" if bitwise else "as rounding moves sampled tokens, too"
    summary = f"{different} of {len(prompts) * len(depths)} seeded answers differ from K=0, {why}"
    return Check("seeded", finding, summary, numbers)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two answers differ; None if they are equal."""
    for at, (one, other) in enumerate(itertools.zip_longest(a, b)):
        if one != other:
            return at
    return None


def check_marginals(subject: ModelUnderTest, chain: ReferenceRun, samples: int) -> Check:
    """Compares tokens that drafting and acceptance give with the model's own distribution.

    The rows of a round are the model's least certain ones. Drafts come from the head's distribution
    and from a badly wrong one. Positions after the last emitted token are drawn from the model.
    Each position is tested by chi-square over its likely tokens.
    """
    if subject.draft_model is None:
        return Check("marginals", "skipped", subject.no_drafts, {})
    rows = _uncertain(chain.logits, subject.max_k + 1)
    head = _head_rows(subject, chain.prompt)
    tests: list[dict[str, Any]] = []
    for k, (drafts, sampling) in itertools.product(
        sorted({1, subject.max_k}),
        zip(("head", "wrong"), SAMPLINGS, strict=True),
    ):
        q = head[:k] if drafts == "head" else mx.roll(rows[:k], 1, -1)
        p = rows[: k + 1]
        z = [
            surprise(ids, probabilities)
            for ids, probabilities in zip(
                _sample(p, q, sampling, samples).T, target_rows(p, sampling), strict=True
            )
        ]
        tests.append({"k": k, "drafts": drafts, "rule": sampling.rule_of(k), "z_per_position": z})
    largest = max(z for test in tests for z in test["z_per_position"])
    numbers = {"samples": samples, "limit": MAX_SURPRISE, "tests": tests}
    where = f"{len(tests)} tests of {samples} rounds: at most {largest:.1f} standard deviations off"
    if largest <= MAX_SURPRISE:
        return Check("marginals", "ok", f"sampled tokens are the model's own; {where}", numbers)
    return Check("marginals", "defect", f"drafts change what is sampled; {where}", numbers)


def _uncertain(logits: mx.array, rows: int) -> mx.array:
    """The rows (rows, V) of highest entropy: a certain row would show no bias."""
    x = logits.astype(mx.float32)
    log_p = x - mx.logsumexp(x, axis=-1, keepdims=True)
    entropy = -(mx.exp(log_p) * log_p).sum(-1)
    return logits[mx.argsort(-entropy)[:rows]]


def _head_rows(subject: ModelUnderTest, prompt: Sequence[int]) -> mx.array:
    """The head's own log-probabilities after the prompt, (max_k, V')."""
    assert subject.draft_model is not None
    block = Forwards(subject, prompt).prompt
    assert block.hidden is not None
    k, state = subject.max_k, DraftState()
    state.observe(block.hidden[:, -len(prompt) :], as_row([*prompt[1:], 0]))
    drafter = Drafter(subject.draft_model, [state])
    (drawn,) = drafter.draft(k, [k], [Sampler(SAMPLINGS[0], 3)], [len(prompt)]).drawn
    assert drawn is not None and drawn.log_probabilities is not None
    return drawn.log_probabilities


def _sample(p: mx.array, q: mx.array, sampling: Sampling, samples: int) -> npt.NDArray[np.int64]:
    """Draws tokens (samples, K + 1) with the engine's own drafting and acceptance."""
    k = q.shape[0]
    generator = np.random.default_rng(5)
    columns = [generator.choice(len(row), samples, p=row) for row in target_rows(p, sampling)]
    open_places = np.array(columns).T
    drawn: list[mx.array] = []

    def row_of(hidden: mx.array) -> mx.array:
        return q[hidden[0, :, 0]][None]

    model = DraftModel(_next_row, _identity, row_of)
    for number in range(samples):
        sampler = Sampler(sampling, number)
        state = DraftState()
        state.observe(mx.array([[[-1]]]), as_row([0]))
        (drawn_here,) = Drafter(model, [state]).draft(k, [k], [sampler], [1]).drawn
        verdict = sampler.judge(p, drawn_here, 1)
        drawn.append(mx.concatenate([verdict.accepted[None], verdict.tokens]))
        if number % 64 == 63:
            mx.eval(drawn)
    verdicts = np.array(mx.stack(drawn), dtype=np.int64)
    emitted = np.arange(k + 1)[None] <= verdicts[:, :1]
    return np.where(emitted, verdicts[:, 1:], open_places)


def _identity(tokens: mx.array) -> mx.array:
    return tokens


def _next_row(hidden: mx.array, embedding: mx.array, cache: Any) -> mx.array:
    """Stands in for the head: its hidden state is the index of a row of draft logits."""
    del embedding
    _ = cache.update_and_fetch(hidden[:, None], hidden[:, None])
    return hidden + 1


def target_rows(logits: mx.array, sampling: Sampling) -> Floats:
    """The probabilities (n, V) from which the engine samples, for logits (n, V)."""
    target = TargetDistribution(sampling, Noise(0), ())(logits, 1)
    p = np.exp(np.array(target.log_p.astype(mx.float32), dtype=np.float64))
    if target.ids is not None:
        dense = np.zeros(logits.shape, dtype=np.float64)
        np.put_along_axis(dense, np.array(target.ids, dtype=np.int64), p, -1)
        p = dense
    return p / p.sum(-1, keepdims=True)


def surprise(ids: npt.NDArray[np.int64], probabilities: Floats) -> float:
    """The deviation of the counts of `ids` from probabilities (V,), in standard deviations.

    Chi-square by the cube root of Wilson and Hilferty (1931). Unlikely tokens are counted together;
    an impossible one gives 100.
    """
    counts = np.bincount(ids, minlength=len(probabilities)).astype(np.float64)
    if counts[probabilities == 0].any():
        return 100.0
    expected = probabilities * len(ids)
    likely = expected >= MIN_EXPECTED_COUNT
    observed, expected_counts = counts[likely], expected[likely]
    if (rest := expected[~likely].sum()) >= MIN_EXPECTED_COUNT:
        observed, expected_counts = (
            np.append(observed, counts[~likely].sum()),
            np.append(expected_counts, rest),
        )
    elif len(expected_counts):
        observed[-1], expected_counts[-1] = (
            observed[-1] + counts[~likely].sum(),
            expected_counts[-1] + rest,
        )
    freedom = len(expected_counts) - 1
    if freedom < 1:
        return 0.0
    ratio = float(((observed - expected_counts) ** 2 / expected_counts).sum()) / freedom
    spread = 2 / (9 * freedom)
    return float((np.cbrt(ratio) - (1 - spread)) / np.sqrt(spread))
