"""Measures the rounds of copied drafts: verifies of many rows, and the removal of rejected ones."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .caches.batch_caches import drop_rejected, left_aligned
from .caches.positions import Positions
from .caches.rollback import cache_arrays, rollback
from .pieces import Pieces
from .probe import PROMPT_ROWS, Subject, probe_ids
from .sampling import greedy_token
from .seams import as_row


@dataclass(frozen=True, slots=True)
class CopySeconds:
    """Seconds by number of copied tokens. 0 is a plain token: nothing of it is removed."""

    verify: dict[int, float]
    rollback: dict[int, float]


def measure_copies(subject: Subject, lengths: Sequence[int], repeats: int) -> Pieces[CopySeconds]:
    """Medians of `repeats` measurements after a short prompt. The kernels must be compiled.

    A rollback removes half of the copied rows, as one that rejects does on average.
    """
    yield
    caches, clock = subject.read(), subject.clock

    def measure(length: int) -> tuple[float, float]:
        """Seconds of one verify and of its rollback."""
        ids = as_row(probe_ids(subject.vocabulary, PROMPT_ROWS, PROMPT_ROWS + length + 1))
        began_at = clock()
        block = subject.target.forward(ids, caches, want="all")
        mx.eval(greedy_token(block.logits), cache_arrays(caches))
        verified_at = clock()
        rollback(caches, (length + 1) // 2)
        mx.eval(cache_arrays(caches))
        return verified_at - began_at, clock() - verified_at

    verify, removal = dict[int, float](), dict[int, float]()
    for length in (0, *lengths):
        seconds = list[tuple[float, float]]()
        for _ in range(repeats):
            yield
            seconds.append(measure(length))
        verify[length] = statistics.median(each for each, _ in seconds)
        removal[length] = statistics.median(each for _, each in seconds)
    del removal[0]
    return CopySeconds(verify, removal)


def measure_batch(
    subject: Subject, size: int, lengths: Sequence[int], repeats: int
) -> Pieces[dict[int, float]]:
    """Seconds of rounds of `size` requests by copied tokens, relative to plain rounds. The kernels
    must be compiled. Each request keeps half of its rows."""
    clock, positions = subject.clock, Positions([PROMPT_ROWS] * size)
    yield
    together = left_aligned([subject.read()] * size, positions)

    def measure(length: int) -> float:
        ids = mx.array([probe_ids(subject.vocabulary, 0, length + 1)] * size)
        kept_rows, began_at = [length // 2 + 1] * size, clock()
        logits, _ = subject.target.forward_batch(ids, together)
        mx.eval(greedy_token(logits.reshape(-1, logits.shape[-1])))
        positions.advance(kept_rows)
        drop_rejected(together, length + 1, kept_rows)
        mx.eval(cache_arrays(together))
        return clock() - began_at

    seconds = dict[int, float]()
    for length in (0, *lengths):
        runs = list[float]()
        for _ in range(repeats):
            yield
            runs.append(measure(length))
        seconds[length] = statistics.median(runs)
    return {length: seconds[length] / seconds[0] for length in lengths if seconds[0] > 0}
