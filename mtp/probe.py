"""Measures, on the loaded weights, whether a verify of several rows computes what single steps do.

Backends choose kernels by the number of rows. Where the numbers are the same bit for bit, drafts
cannot change a greedy answer; elsewhere they can where two tokens are about equally likely.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import mlx.core as mx

from .rollback import rollback
from .sampling import greedy_token
from .seams import Block, Drafter, Want, as_row

Identity = Literal["bitwise", "near_tie"]
PROMPT_ROWS = 24


class Forward(Protocol):
    """`Target.forward` of the engine."""

    def __call__(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block: ...


def greedy_identity(
    forward: Forward, make_caches: Callable[[], list[Any]], vocabulary: int, k: int
) -> Identity:
    """Compares blocks of 2 to K + 1 rows, and the row after each one's rollback, with single steps.

    Every width counts: a request may ask for fewer drafts, and the budget's last rounds have fewer.
    The ids are arbitrary: kernels do not depend on them, and no text is wanted.
    """
    ids = [(7 * i + 3) % vocabulary for i in range(PROMPT_ROWS + 2 * k)]
    prompt = mx.array(ids[:PROMPT_ROWS], dtype=mx.int32)
    rest = [mx.array([token], dtype=mx.int32) for token in ids[PROMPT_ROWS:]]
    single, block = make_caches(), make_caches()
    for caches in (single, block):
        mx.eval(forward(prompt, caches, want="last").logits)
    wanted = [forward(token, single, want="all").logits for token in rest]
    same = mx.array(True)
    for start, rows in enumerate(range(2, k + 2)):
        end = start + rows
        got = forward(mx.concatenate(rest[start:end]), block, want="all").logits
        rollback(block, rows - 1)
        again = forward(rest[start + 1], block, want="all").logits
        rollback(block, 1)
        same &= mx.array_equal(mx.concatenate(wanted[start:end]), got)
        same &= mx.array_equal(wanted[start + 1], again)
        mx.eval(same)
    return "bitwise" if same.item() else "near_tie"


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: `verify[k]` of a forward of k + 1 rows (0: a plain step), `draft[k - 1]` of k.

    Each is waited for: a round that hides one behind the other costs less than their sum.
    """

    verify: tuple[float, ...]
    draft: tuple[float, ...]


def measure_costs(
    forward: Forward,
    make_caches: Callable[[], list[Any]],
    make_drafter: Callable[[int], Drafter],
    prompt: Sequence[int],
    k: int,
    repeats: int,
    clock: Callable[[], float],
) -> Costs:
    """Medians of `repeats` behind `prompt`, after one warm-up each."""
    caches = make_caches()
    hidden = forward(as_row(prompt), caches, want="last").hidden
    assert hidden is not None
    last, token = hidden[:, -1:], as_row(prompt[:1])

    def verify(rows: int) -> None:
        block = forward(mx.concatenate([token] * rows), caches, want="all")
        mx.eval(greedy_token(block.logits))
        rollback(caches, rows)

    def draft(drafter: Drafter, depth: int) -> None:
        drafter.observe(last, token)
        mx.eval(drafter.draft(depth, len(prompt)).tokens)

    def median(work: Callable[[], None]) -> float:
        work()
        return statistics.median(_seconds(work, clock) for _ in range(repeats))

    drafters = [make_drafter(depth) for depth in range(1, k + 1)]
    return Costs(
        tuple(median(partial(verify, rows)) for rows in range(1, k + 2)),
        tuple(median(partial(draft, d, depth)) for depth, d in enumerate(drafters, 1)),
    )


def _seconds(work: Callable[[], None], clock: Callable[[], float]) -> float:
    begun = clock()
    work()
    return clock() - begun
