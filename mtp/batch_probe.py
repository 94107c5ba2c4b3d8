"""Measures, on the loaded weights, whether a request computes in a batch what it computes alone.

As `probe`: backends choose kernels by shapes, and a batch has other ones.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

import mlx.core as mx

from .batch_caches import Positions, batched, take_back
from .batch_prompts import BatchTarget, PromptTarget, read_together
from .probe import CONTEXTS, PROMPT_ROWS, Forward, Identity, lengthen, live_arrays, probe_ids
from .rollback import rollback
from .seams import as_row

SIZES: Final = (3, 16)
"""Requests in a batch that is probed: few, and as many as run at once."""
PROMPTS: Final = (PROMPT_ROWS, 17, 9)
"""Rows of their prompts, in turn: a batch of equal ones would hide a wrong mask."""


def batch_identity(
    forward: Forward,
    target: BatchTarget,
    make_caches: Callable[[], list[Any]],
    vocabulary: int,
    k: int,
    context_length: int = CONTEXTS[-1] + 64,
    prompts: PromptTarget | None = None,
) -> Identity:
    """Compares a verify of K + 1 rows of which each request keeps another number, and the plain
    step behind it, with the same requests alone: logits, and what is left in the caches.

    One of the requests has the longest context of `probe.CONTEXTS` that fits, where others have
    few rows. `prompts`: prompts are read together, too, where there is such a target.
    """
    read = [_read(forward, make_caches, vocabulary, rows) for rows in PROMPTS]
    same = prompts is None or _same_prompts(prompts, make_caches, vocabulary)
    fit = [rows for rows in CONTEXTS if rows + 2 * k + 2 <= context_length]
    same = same and all(_same(forward, target, read, vocabulary, k, size) for size in SIZES)
    for rows in fit[1:]:
        longer = copy.deepcopy(read[0])
        lengthen(longer, rows, rows + 2 * k + 2)
        same = same and _same(forward, target, [longer, *read[1:]], vocabulary, k, SIZES[0])
    return "bitwise" if same else "near_tie"


def _read(
    forward: Forward, make_caches: Callable[[], list[Any]], vocabulary: int, rows: int
) -> list[Any]:
    caches = make_caches()
    mx.eval(forward(as_row(probe_ids(vocabulary, 0, rows)), caches, want="last").logits)
    mx.eval(live_arrays(caches))
    return caches


def _same_prompts(
    target: PromptTarget, make_caches: Callable[[], list[Any]], vocabulary: int
) -> bool:
    """Two chunks of prompts, read together and alone: hidden states, and what is left."""
    together, alone = ([make_caches() for _ in PROMPTS] for _ in range(2))
    positions, same = [0] * len(PROMPTS), mx.array(True)
    for chunk in range(2):
        counts = [rows + 40 * (chunk == number) for number, rows in enumerate(PROMPTS)]
        ids = [
            as_row(probe_ids(vocabulary, 9 * n, 9 * n + count)) for n, count in enumerate(counts)
        ]
        hidden = read_together(target, ids, together, positions)
        positions = [a + b for a, b in zip(positions, counts, strict=True)]
        for index, caches in enumerate(alone):
            wanted = target.forward(ids[index], caches, want="last")
            assert wanted.hidden is not None
            same &= mx.array_equal(wanted.hidden, hidden[index])
            same &= mx.array_equal(wanted.logits, target.logits_of(hidden[index][:, -1:]))
            left = live_arrays(together[index])
            for mine, theirs in zip(live_arrays(caches), left, strict=True):
                same &= mx.array_equal(mine, theirs)
    return bool(same.item())


def _same(
    forward: Forward,
    target: BatchTarget,
    prompts: Sequence[list[Any]],
    vocabulary: int,
    k: int,
    size: int,
) -> bool:
    """`prompts`: caches; they stay as they are."""
    alone = [copy.deepcopy(prompts[i % len(prompts)]) for i in range(size)]
    rows = [_rows_of(caches, PROMPTS[i % len(PROMPTS)]) for i, caches in enumerate(alone)]
    positions = Positions(rows)
    together = batched(copy.deepcopy(alone), positions)
    ids = [probe_ids(vocabulary, 40 * i, 40 * i + k + 2) for i in range(size)]
    kept = [1 + i % (k + 1) for i in range(size)]
    # Requests of equal length are computed alike: a few of a large batch show it.
    compared = {0, 1, 2, size // 2, size - 1}
    same = mx.array(True)
    got, _ = target.forward_batch(mx.array([each[: k + 1] for each in ids]), together)
    positions.moved(kept)
    take_back(together, k + 1, kept)
    again, _ = target.forward_batch(mx.array([[each[-1]] for each in ids]), together)
    positions.moved([1] * size)
    for index, caches in enumerate(alone):
        if index not in compared:
            continue
        wanted = forward(as_row(ids[index][: k + 1]), caches, want="all").logits
        if kept[index] < k + 1:
            rollback(caches, k + 1 - kept[index])
        behind = forward(as_row(ids[index][-1:]), caches, want="all").logits
        same &= mx.array_equal(wanted, got[index]) & mx.array_equal(behind, again[index])
        left = live_arrays([cache.of(index) for cache in together])
        for mine, theirs in zip(live_arrays(caches), left, strict=True):
            same &= mx.array_equal(mine, theirs)
    return bool(same.item())


def _rows_of(caches: Sequence[Any], rows: int) -> int:
    """Rows that attention has; without any, those of the prompt."""
    return next((c.offset for c in caches if hasattr(c, "offset")), rows)
