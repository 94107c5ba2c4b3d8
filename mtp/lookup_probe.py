"""Measures the rounds of copied drafts: verifies of many rows, and the removal of rejected ones."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .batch_caches import drop_rejected, left_aligned
from .batch_prompts import BatchTarget
from .positions import Positions
from .probe import PROMPT_ROWS, ForwardFunction, probe_ids
from .rollback import cache_arrays, rollback
from .sampling import greedy_token
from .seams import as_row


@dataclass(frozen=True, slots=True)
class CopySeconds:
    """Seconds by number of copied tokens; 0: a plain token, from which nothing is removed."""

    verify: dict[int, float]
    rollback: dict[int, float]


def measure_copies(
    forward: ForwardFunction,
    make_caches: Callable[[], list[Any]],
    vocabulary: int,
    lengths: Sequence[int],
    repeats: int,
    clock: Callable[[], float],
) -> CopySeconds:
    """Medians of `repeats` measurements behind a short prompt. The kernels must be compiled.

    A rollback removes half of the copied rows, as one that rejects does on average.
    """
    caches = make_caches()
    prompt = as_row(probe_ids(vocabulary, 0, PROMPT_ROWS))
    mx.eval(forward(prompt, caches, want="last").logits, cache_arrays(caches))

    def measure(length: int) -> tuple[float, float]:
        """Seconds of one verify and of its rollback."""
        ids = as_row(probe_ids(vocabulary, PROMPT_ROWS, PROMPT_ROWS + length + 1))
        began_at = clock()
        block = forward(ids, caches, want="all")
        mx.eval(greedy_token(block.logits), cache_arrays(caches))
        verified_at = clock()
        rollback(caches, (length + 1) // 2)
        mx.eval(cache_arrays(caches))
        return verified_at - began_at, clock() - verified_at

    verify, removal = dict[int, float](), dict[int, float]()
    for length in (0, *lengths):
        seconds = [measure(length) for _ in range(repeats)]
        verify[length] = statistics.median(each for each, _ in seconds)
        removal[length] = statistics.median(each for _, each in seconds)
    del removal[0]
    return CopySeconds(verify, removal)


def measure_batch(
    forward: ForwardFunction,
    target: BatchTarget,
    make_caches: Callable[[], list[Any]],
    vocabulary: int,
    size: int,
    lengths: Sequence[int],
    repeats: int,
    clock: Callable[[], float],
) -> dict[int, float]:
    """Seconds of rounds of `size` requests by copied tokens, relative to plain rounds. The kernels
    must be compiled. Each request keeps half of its rows."""
    prompt = as_row(probe_ids(vocabulary, 0, PROMPT_ROWS))
    each = [make_caches() for _ in range(size)]
    for caches in each:
        mx.eval(forward(prompt, caches, want="last").logits, cache_arrays(caches))
    positions = Positions([PROMPT_ROWS] * size)
    together = left_aligned(each, positions)

    def measure(length: int) -> float:
        ids = mx.array([probe_ids(vocabulary, 0, length + 1)] * size)
        kept_rows, began_at = [length // 2 + 1] * size, clock()
        logits, _ = target.forward_batch(ids, together)
        mx.eval(greedy_token(logits.reshape(-1, logits.shape[-1])))
        positions.advance(kept_rows)
        drop_rejected(together, length + 1, kept_rows)
        mx.eval(cache_arrays(together))
        return clock() - began_at

    seconds = {
        length: statistics.median(measure(length) for _ in range(repeats))
        for length in (0, *lengths)
    }
    return {length: seconds[length] / seconds[0] for length in lengths if seconds[0] > 0}
