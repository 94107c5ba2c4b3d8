"""Checks of numbers: blocks and rollback against single steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ....mtp.caches.batch_caches import left_aligned
from ....mtp.caches.positions import Positions
from ....mtp.caches.rollback import holds_rows, row_count
from ....mtp.part_probe import differing_part
from ....mtp.pieces import result_of
from ....mtp.probe import live_arrays
from ....mtp.sampling import greedy_token
from ....mtp.seams import as_ids, as_row
from ...kernels.row_products import name_of
from .report import Check, Finding, finite
from .subject import Forwards, ModelUnderTest

NOISE = 8
"""The most rounding of a whole model, in units of the dtype's."""
COARSEST_UNIT = 2.0**-10
"""GPUs multiply float32 in TF32, with 10 bits of mantissa."""


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """Single steps after a prompt: the reference of every other schedule."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logits: mx.array  # (len(ids), V)


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of rows of logits that should be equal; relative: to the logits' spread.

    `gaps` are the top-2 gaps of the single steps whose greedy token differs.
    """

    rows: int
    rows_different: int
    largest: float
    median_relative: float
    gaps: tuple[float, ...]

    @property
    def tau(self) -> float:
        """The gap of logits below which two tokens may change their order."""
        return 2 * self.largest

    def finding(self, dtype: mx.Dtype) -> Finding:
        if not self.rows_different:
            return "ok"
        return "differs" if self.median_relative <= tolerance(dtype) else "defect"

    def numbers(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "rows_different": self.rows_different,
            "max_abs_difference": self.largest,
            "median_relative_difference": self.median_relative,
            "argmax_flips": len(self.gaps),
            "top2_gap_at_flips": list(self.gaps),
            "near_tie_tau": self.tau,
        }


def tolerance(dtype: mx.Dtype) -> float:
    """The largest relative difference of logits that rounding explains."""
    return NOISE * max(float(mx.finfo(dtype).eps), COARSEST_UNIT)


def compare(expected: mx.array, actual: mx.array) -> Difference:
    """Compares logits (n, V) of two schedules. Raises InvalidCheckpoint for NaN."""
    a, b = expected.astype(mx.float32), actual.astype(mx.float32)
    distance = mx.abs(a - b)
    relative = mx.sqrt((distance * distance).sum(-1) / mx.maximum(a.var(-1) * a.shape[-1], 1e-30))
    top = mx.sort(mx.topk(a, 2, axis=-1), axis=-1)
    gaps, flips = top[:, 1] - top[:, 0], greedy_token(expected) != greedy_token(actual)
    return Difference(
        rows=a.shape[0],
        rows_different=sum(each > 0 for each in floats(distance.max(-1))),
        largest=finite(max(floats(distance.max(-1))), "a difference of logits"),
        median_relative=sorted(floats(relative))[a.shape[0] // 2],
        gaps=tuple(gap for gap, flip in zip(floats(gaps), as_ids(flips), strict=True) if flip),
    )


def batch_difference(
    subject: ModelUnderTest, chain: ReferenceRun, others: Sequence[Sequence[int]]
) -> Difference:
    """Compares the single steps of `chain` with those in a batch with the prompts `others`."""
    requests = list[list[Any]]()
    for prompt in (chain.prompt, *others):
        requests.append(caches := subject.make_caches())
        mx.eval(subject.target.forward(as_row(prompt), caches, want="last").logits)
    positions = Positions([len(chain.prompt), *map(len, others)])
    caches, rows = left_aligned(requests, positions), list[mx.array]()
    for token in chain.ids:
        ids = mx.array([[token]] * len(requests), dtype=mx.int32)
        logits, _ = subject.target.forward_batch(ids, caches)
        positions.advance([1] * len(requests))
        rows.append(logits[0])
        mx.eval(logits)
    return compare(chain.logits, mx.concatenate(rows))


def floats(row: mx.array) -> list[float]:
    """The numbers of an array (n,). Evaluates it."""
    return cast("list[float]", row.tolist())


def chain_of(subject: ModelUnderTest, prompt: Sequence[int], ids: Sequence[int]) -> ReferenceRun:
    forwards = Forwards(subject, prompt)
    rows = [forwards.logits([token]) for token in ids]
    return ReferenceRun(tuple(prompt), tuple(ids), mx.concatenate(rows))


def check_blocks(
    subject: ModelUnderTest, chain: ReferenceRun
) -> tuple[Check, tuple[Difference, ...]]:
    """Compares forwards of K + 1 rows with single steps; also returns the difference for each K."""
    differences = list[Difference]()
    for k in subject.depths:
        forwards, rows = Forwards(subject, chain.prompt), list[mx.array]()
        for start in range(0, len(chain.ids), k + 1):
            rows.append(forwards.logits(chain.ids[start : start + k + 1]))
        differences.append(compare(chain.logits, mx.concatenate(rows)))
    finding = worst([each.finding(subject.dtype) for each in differences])
    numbers = {
        "tolerance": tolerance(subject.dtype),
        "per_k": [
            {"k": k, **each.numbers()} for k, each in zip(subject.depths, differences, strict=True)
        ],
    }
    largest, total = max(f.largest for f in differences), sum(f.rows for f in differences)
    different, flips = (
        sum(f.rows_different for f in differences),
        sum(len(f.gaps) for f in differences),
    )
    summary = f"blocks of 2 to {subject.max_k + 1} rows compute what single steps do, bit for bit"
    if finding != "ok":
        why = "as other kernels round" if finding == "differs" else "more than rounding explains"
        summary = (
            f"{different} of {total} rows differ from single steps, by at most {largest:.3g} "
            f"({why}); the greedy token is another in {flips}{_first_part(subject)}"
        )
    return Check("blocks", finding, summary, numbers), tuple(differences)


def _first_part(subject: ModelUnderTest) -> str:
    """The part of the model that differs first in blocks, in words; empty if none is found."""
    rows = subject.max_k + 1
    part = result_of(differing_part(subject.probed(rows), rows))
    return "" if part is None else f"; first in: {name_of(part.module, part.dtype)}"


def check_rollback(subject: ModelUnderTest, chain: ReferenceRun) -> Check:
    """Checks that a rollback leaves no trace of the dropped rows.

    Two runs reject different drafts. They must stay equal bit for bit if a row's numbers do not
    depend on its neighbours, and both must stay near the single steps.
    """
    per_k = [_compare_rollbacks(subject, chain, k) for k in subject.depths]
    same = all(each["bitwise"] and each["positions_fit"] for each in per_k)
    near = all(each["median_relative_difference"] <= tolerance(subject.dtype) for each in per_k)
    numbers = {"tolerance": tolerance(subject.dtype), "per_k": per_k}
    if same and near:
        summary = "rejected rows leave no trace, however many of a block are kept"
        return Check("rollback", "ok", summary, numbers)
    positions_fit = all(each["positions_fit"] for each in per_k)
    if near and positions_fit and _rows_see_later_ones(subject, chain):
        summary = (
            "rows of a block depend on those after them here, so rejected ones are seen, by "
            "no more than rounding explains"
        )
        return Check("rollback", "differs", summary, numbers)
    worst_k = next(e["k"] for e in per_k if not (e["bitwise"] and e["positions_fit"]) or not near)
    summary = (
        f"at K={worst_k} rejected rows change what follows, or rows are missing from the caches"
    )
    return Check("rollback", "defect", summary, numbers)


def _compare_rollbacks(subject: ModelUnderTest, chain: ReferenceRun, k: int) -> dict[str, Any]:
    """Keeps K + 1, K, … 1 rows of blocks of K + 1, then runs a row; with two wrong drafts."""
    runs: list[list[mx.array]] = []
    cache_arrays: list[list[mx.array]] = []
    positions_fit = True
    for wrong in (1, subject.vocabulary // 2):
        forwards, rows, at = Forwards(subject, chain.prompt), list[mx.array](), 0
        caches = forwards.caches
        for count in range(k + 1, 0, -1):
            real = chain.ids[at : at + count]
            drafts = [(token + wrong) % subject.vocabulary for token in chain.ids[at + count :]]
            rows.append(forwards.logits([*real, *drafts[: k + 1 - count]])[:count])
            if count <= k:
                forwards.rollback(k + 1 - count)
            at += count
        rows.append(forwards.logits(chain.ids[at : at + 1]))
        expected_offset = len(chain.prompt) + at + 1
        offsets = {row_count(cache) for cache in caches if holds_rows(cache)}
        positions_fit = positions_fit and offsets <= {expected_offset}
        runs.append(rows)
        cache_arrays.append(live_arrays(caches))
    one, other = (mx.concatenate(rows) for rows in runs)
    bitwise = bool(mx.array_equal(one, other).item()) and all(
        a.shape == b.shape and bool(mx.array_equal(a, b).item())
        for a, b in zip(*cache_arrays, strict=True)
    )
    first = 2 * k + 1  # the first row after a rollback
    near = compare(chain.logits[first : one.shape[0]], one[first:])
    return {"k": k, "bitwise": bitwise, "positions_fit": positions_fit, **near.numbers()}


def _rows_see_later_ones(subject: ModelUnderTest, chain: ReferenceRun) -> bool:
    """Whether logits of a block's rows depend on the ids after them, before any is taken back."""
    width = subject.max_k + 1
    for count in range(1, width):
        rows = list[mx.array]()
        for wrong in (1, subject.vocabulary // 2):
            later = [(token + wrong) % subject.vocabulary for token in chain.ids[count:width]]
            block = [*chain.ids[:count], *later]
            rows.append(Forwards(subject, chain.prompt).logits(block)[:count])
        if not mx.array_equal(rows[0], rows[1]).item():
            return True
    return False


def rows_for_rollback(k: int) -> int:
    """The number of ids that `check_rollback` needs, including its last block's drafts."""
    return (k + 1) * (k + 2) // 2 + k + 1


def worst(findings: Sequence[Finding]) -> Finding:
    order: tuple[Finding, ...] = ("defect", "differs", "ok", "skipped")
    return min(findings, key=order.index)
