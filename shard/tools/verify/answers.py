"""Checks of answers with and without drafts: greedy, strict, seeded; and what sampling draws."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ....mtp.batch_caches import can_batch
from ....mtp.probe import FixedRowsCheck
from ....mtp.sampler import Sampler
from ....mtp.sampling import Noise, TargetDistribution
from ....mtp.seams import as_row
from ....mtp.types import Round, Sampling
from ...engine.drafter import Drafter, DraftModel
from ...engine.state import DraftState
from ..bare_engine import ids_of
from .numbers import Difference, ReferenceRun, batch_difference
from .report import Check, Finding
from .subject import Forwards, ModelUnderTest, answer, answer_together

Floats = npt.NDArray[np.float64]

NEAR_TIE_MARGIN = 4
"""Caches of a long answer add up more rounding than the rows that tau was measured on."""
LEAST_BATCH = 4
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=7)
SAMPLINGS = (Sampling(temperature=1.0), Sampling(temperature=0.8, top_k=8))
LEAST_EXPECTED = 8
SURPRISE = 4.5
"""Standard deviations: chance alone comes to that once in 300,000 tests."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Answers with K drafts against those without, prompt by prompt."""

    k: int
    first_difference: tuple[int | None, ...]
    gaps: tuple[float, ...]
    """Top-2 gaps, without drafts, at each first difference."""
    proposed: int
    accepted: int

    def numbers(self) -> dict[str, Any]:
        return {
            "k": self.k,
            "first_difference": list(self.first_difference),
            "top2_gap_at_difference": list(self.gaps),
            "proposed": self.proposed,
            "accepted": self.accepted,
        }


def check_greedy(
    subject: ModelUnderTest,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    tau: float,
    *,
    bitwise: bool,
) -> Check:
    """Every K must give the answers of K=0, but for near ties where blocks are not bitwise.

    `tau` is the largest near-tie gap that `check_blocks` saw.
    """
    if subject.draft_model is None:
        return Check("greedy", "skipped", subject.no_drafts, {})
    plain = [answer(subject, prompt, 0, tokens, top=2) for prompt in prompts]
    found = [_compared(subject, prompts, plain, k, tokens) for k in subject.depths]
    gaps = [gap for each in found for gap in each.gaps]
    limit = 0.0 if bitwise else NEAR_TIE_MARGIN * tau
    pattern = pattern_of(found)
    numbers = {
        "prompts": len(prompts),
        "tokens": tokens,
        "largest_near_tie": limit,
        "pattern": pattern,
        "per_k": [each.numbers() for each in found],
    }
    if not gaps:
        summary = (
            f"K=1 to {subject.max_k} give the answers of K=0, token by token "
            f"({len(prompts)} x {tokens} tokens)"
        )
        return Check("greedy", "ok", summary, numbers)
    where = f"{len(gaps)} of {len(found) * len(prompts)} answers differ from K=0 ({pattern})"
    if max(gaps) <= limit:
        return Check("greedy", "differs", f"{where}, each first at a near tie", numbers)
    summary = f"{where}, and near ties do not explain it: rollback or acceptance is wrong"
    return Check("greedy", "defect", summary, numbers)


def _compared(
    subject: ModelUnderTest,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[Round]],
    k: int,
    tokens: int,
) -> Compared:
    first: list[int | None] = []
    gaps: list[float] = []
    rounds: list[Round] = []
    for prompt, wanted in zip(prompts, plain, strict=True):
        got = answer(subject, prompt, k, tokens)
        rounds += got
        at = first_difference(ids_of(wanted), ids_of(got))
        first.append(at)
        if at is not None:
            best, second = [p for each in wanted for p in each.logprobs][at].top[:2]
            gaps.append(best[1] - second[1])
    proposed, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    return Compared(k, tuple(first), tuple(gaps), proposed, accepted)


def pattern_of(found: Sequence[Compared]) -> str:
    """Where answers first differ, over K: rounding does not care how many drafts there are."""
    rows = zip(*(each.first_difference for each in found), strict=True)
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
    """Answers that are computed together, with drafts where there is a head, against each alone.

    `blocks`: the largest difference that `check_blocks` saw; a batch adds its own.
    """
    if not can_batch(subject.make_caches()):
        return Check("batch", "skipped", "this model's caches are not computed in batches", {})
    # Of different lengths: in a batch of equal ones a wrong mask would not show.
    shorter = (chain.prompt[: -3 * n] for n in range(1, LEAST_BATCH))
    asked = [*prompts, *itertools.islice(shorter, max(0, LEAST_BATCH - len(prompts)))]
    steps = batch_difference(subject, chain, asked[1:])
    k = subject.max_k if subject.draft_model is not None else 0
    plain = [answer(subject, prompt, 0, tokens, top=2) for prompt in asked]
    got = answer_together(subject, asked, k, tokens)
    differ = list[float]()
    for wanted, told in zip(plain, got, strict=True):
        at = first_difference(ids_of(wanted), ids_of(told))
        if at is not None:
            best, second = [p for each in wanted for p in each.logprobs][at].top[:2]
            differ.append(best[1] - second[1])
    size = max(each.forward.batch for rounds in got for each in rounds)
    limit = NEAR_TIE_MARGIN * max(steps.tau, blocks.tau)
    numbers = {"k": k, "batch": size, "largest_near_tie": limit, **steps.numbers()}
    told = f"{len(asked)} answers, up to {size} in a step, K={k}"
    if not differ:
        finding = steps.finding(subject.dtype)
        same = "bit for bit" if finding == "ok" else "though logits differ by rounding"
        return Check("batch", finding, f"{told}: each as it is alone, {same}", numbers)
    where = f"{told}: {len(differ)} differ from what they are alone"
    if max(differ) <= limit:
        return Check("batch", "differs", f"{where}, each first at a near tie", numbers)
    summary = f"{where}, and near ties do not explain it: requests change each other"
    return Check("batch", "defect", summary, numbers)


def check_strict(
    subject: ModelUnderTest, prompts: Sequence[Sequence[int]], tokens: int, fixed: FixedRowsCheck
) -> Check:
    """In strict mode nothing may differ at all."""
    if subject.draft_model is None:
        return Check("strict", "skipped", subject.no_drafts, {})
    if not fixed.holds:
        reason = "strict mode turns drafts off here (see fixed_rows)"
        return Check("strict", "skipped", reason, {})
    rows = subject.max_k + 1
    first: list[int | None] = []
    for prompt in prompts:
        runs = (answer(subject, prompt, k, tokens, fixed_rows=rows) for k in (0, subject.max_k))
        plain, drafted = (ids_of(run) for run in runs)
        first.append(first_difference(plain, drafted))
    numbers = {"rows": rows, "k": subject.max_k, "tokens": tokens, "first_difference": first}
    if all(at is None for at in first):
        summary = f"with {rows} rows in every forward, K=0 and K={subject.max_k} answer the same"
        return Check("strict", "ok", summary, numbers)
    summary = "answers with and without drafts differ although every forward has the same rows"
    return Check("strict", "defect", summary, numbers)


def check_seeded(
    subject: ModelUnderTest, prompts: Sequence[Sequence[int]], tokens: int, *, bitwise: bool
) -> Check:
    """A seed gives the same sampled tokens at every K."""
    if subject.draft_model is None:
        return Check("seeded", "skipped", subject.no_drafts, {})
    depths = sorted({1, subject.max_k})
    per_k: list[dict[str, Any]] = [{"k": k, "first_difference": []} for k in depths]
    for prompt in prompts:
        plain = ids_of(answer(subject, prompt, 0, tokens, sampling=SEEDED))
        for each in per_k:
            got = ids_of(answer(subject, prompt, each["k"], tokens, sampling=SEEDED))
            each["first_difference"].append(first_difference(plain, got))
    numbers = {
        "temperature": SEEDED.temperature,
        "top_p": SEEDED.top_p,
        "tokens": tokens,
        "per_k": per_k,
    }
    different = sum(at is not None for each in per_k for at in each["first_difference"])
    if not different:
        shown = " and ".join(f"K={k}" for k in depths)
        summary = f"the same seed gives the tokens of K=0 at {shown}"
        return Check("seeded", "ok", summary, numbers)
    finding: Finding = "defect" if bitwise else "differs"
    why = "although blocks are exact" if bitwise else "as rounding moves sampled tokens, too"
    summary = f"{different} of {len(prompts) * len(depths)} seeded answers differ from K=0, {why}"
    return Check("seeded", finding, summary, numbers)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index where two answers are not the same; None where they are."""
    for at, (one, other) in enumerate(itertools.zip_longest(a, b)):
        if one != other:
            return at
    return None


def check_marginals(subject: ModelUnderTest, chain: ReferenceRun, samples: int) -> Check:
    """Tokens that drafting and acceptance give against the model's own distribution.

    The model's least certain rows stand for a round's K + 1, drafts come from the head's
    distribution and from a badly wrong one; what a round leaves open is drawn from the model.
    Each place is tested by chi-square over its likely tokens.
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
            surprise(ids, wanted)
            for ids, wanted in zip(
                _sampled(p, q, sampling, samples).T, target_rows(p, sampling), strict=True
            )
        ]
        tests.append({"k": k, "drafts": drafts, "rule": sampling.rule_of(k), "z_per_position": z})
    largest = max(z for test in tests for z in test["z_per_position"])
    numbers = {"samples": samples, "limit": SURPRISE, "tests": tests}
    where = f"{len(tests)} tests of {samples} rounds: at most {largest:.1f} standard deviations off"
    if largest <= SURPRISE:
        return Check("marginals", "ok", f"sampled tokens are the model's own; {where}", numbers)
    return Check("marginals", "defect", f"drafts change what is sampled; {where}", numbers)


def _uncertain(logits: mx.array, rows: int) -> mx.array:
    """The (rows, V) of highest entropy: a certain row would show no bias."""
    x = logits.astype(mx.float32)
    log_p = x - mx.logsumexp(x, axis=-1, keepdims=True)
    entropy = -(mx.exp(log_p) * log_p).sum(-1)
    return logits[mx.argsort(-entropy)[:rows]]


def _head_rows(subject: ModelUnderTest, prompt: Sequence[int]) -> mx.array:
    """The head's own log-probabilities behind the prompt, (max_k, V')."""
    assert subject.draft_model is not None
    block = Forwards(subject, prompt).prompt
    assert block.hidden is not None
    k, state = subject.max_k, DraftState()
    state.observe(block.hidden[:, -len(prompt) :], as_row([*prompt[1:], 0]))
    drafter = Drafter(subject.draft_model, [state])
    (drawn,) = drafter.draft(k, [k], [Sampler(SAMPLINGS[0], 3)], [len(prompt)]).drawn
    assert drawn is not None and drawn.log_probabilities is not None
    return drawn.log_probabilities


def _sampled(p: mx.array, q: mx.array, sampling: Sampling, samples: int) -> npt.NDArray[np.int64]:
    """(samples, K + 1) tokens, through the engine's own drafting and acceptance."""
    k = q.shape[0]
    own = np.random.default_rng(5)
    columns = [own.choice(len(row), samples, p=row) for row in target_rows(p, sampling)]
    open_places = np.array(columns).T
    drawn: list[mx.array] = []

    def row_of(hidden: mx.array) -> mx.array:
        return q[hidden[0, :, 0]][None]

    model = DraftModel(_next_row, _as_is, row_of)
    for number in range(samples):
        sampler = Sampler(sampling, number)
        state = DraftState()
        state.observe(mx.array([[[-1]]]), as_row([0]))
        (drawn_here,) = Drafter(model, [state]).draft(k, [k], [sampler], [1]).drawn
        verdict = sampler.judge(p, drawn_here, 1)
        drawn.append(mx.concatenate([verdict.accepted[None], verdict.tokens]))
        if number % 64 == 63:
            mx.eval(drawn)
    found = np.array(mx.stack(drawn), dtype=np.int64)
    emitted = np.arange(k + 1)[None] <= found[:, :1]
    return np.where(emitted, found[:, 1:], open_places)


def _as_is(tokens: mx.array) -> mx.array:
    return tokens


def _next_row(hidden: mx.array, embedding: mx.array, cache: Any) -> mx.array:
    """Stands for the head: its hidden is the number of a row of draft logits."""
    del embedding
    _ = cache.update_and_fetch(hidden[:, None], hidden[:, None])
    return hidden + 1


def target_rows(logits: mx.array, sampling: Sampling) -> Floats:
    """(n, V) probabilities that the engine samples from after logits (n, V)."""
    given = TargetDistribution(sampling, Noise(0), ())(logits, 1)
    p = np.exp(np.array(given.log_p.astype(mx.float32), dtype=np.float64))
    if given.ids is not None:
        dense = np.zeros(logits.shape, dtype=np.float64)
        np.put_along_axis(dense, np.array(given.ids, dtype=np.int64), p, -1)
        p = dense
    return p / p.sum(-1, keepdims=True)


def surprise(ids: npt.NDArray[np.int64], wanted: Floats) -> float:
    """Standard deviations by which the counts of `ids` miss probabilities (V,): chi-square.

    By the cube root of Wilson and Hilferty (1931). Unlikely tokens are counted together; one that
    cannot be is more than chance.
    """
    counts = np.bincount(ids, minlength=len(wanted)).astype(np.float64)
    if counts[wanted == 0].any():
        return 100.0
    expected = wanted * len(ids)
    likely = expected >= LEAST_EXPECTED
    seen, due = counts[likely], expected[likely]
    if (rest := expected[~likely].sum()) >= LEAST_EXPECTED:
        seen, due = np.append(seen, counts[~likely].sum()), np.append(due, rest)
    elif len(due):
        seen[-1], due[-1] = seen[-1] + counts[~likely].sum(), due[-1] + rest
    freedom = len(due) - 1
    if freedom < 1:
        return 0.0
    ratio = float(((seen - due) ** 2 / due).sum()) / freedom
    spread = 2 / (9 * freedom)
    return float((np.cbrt(ratio) - (1 - spread)) / np.sqrt(spread))
