"""Measures, on the loaded weights, whether a request computes the same bits in a batch as alone.

Backends choose kernels by shapes, and a batch has other shapes; see also `probe`.
"""

import copy
from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx

from .batch_prompts import prefill_together
from .caches.batch_caches import drop_rejected, left_aligned
from .caches.positions import Positions
from .caches.rollback import cache_arrays, parts_of, rollback
from .families.taped_gated_delta import rows_with_room
from .pieces import Pieces, by_layers
from .probe import PROMPT_ROWS, Identity, Subject, equal_arrays, lengthen, live_arrays, probe_ids
from .seams import as_row
from .targets import FamilyTarget
from .types import MAX_ROUND_ROWS

SIZES: Final = (3, 16)
"""Requests in a probed batch: few, and as many as run at once."""
PROMPTS: Final = (PROMPT_ROWS, 17, 9)
"""Rows of their prompts, in turn: a batch of equal lengths would hide a wrong mask."""
WARM_DEPTH: Final = 2
"""Drafts for which rounds are warmed up: deeper ones hardly pay where requests share them."""


def rows_to_probe(subject: Subject) -> int:
    """Rows of a round, of all requests together, for which there is memory: a multiple of the
    largest batch, which holds its states before them as well."""
    largest = SIZES[-1]
    room = rows_with_room(subject.row_bytes) - largest
    return min(MAX_ROUND_ROWS, max(largest, room // largest * largest))


def batch_identity(
    subject: Subject, k: int, sizes: Sequence[int] = SIZES, most_rows: int = MAX_ROUND_ROWS
) -> Pieces[Identity]:
    """Compares a batch with the same requests alone: a verify of K + 1 rows, of which each request
    keeps another number, and a plain step after it. Logits and caches must be equal. A round has
    `most_rows` rows at most.

    One of the requests has the longest context of `probe.CONTEXTS` that fits, others have few rows.
    `sizes`: requests of the batches, ascending.
    """
    read = list[list[Any]]()
    for rows in PROMPTS:
        yield
        read.append(subject.read(rows))
    for size in sizes:
        if not (yield from _same(subject, read, min(k, most_rows // size - 1), size)):
            return "near_tie"
    for rows in subject.contexts(k + 1)[1:]:
        longer = copy.deepcopy(read[0])
        yield from lengthen(longer, rows, rows + 2 * k + 2)
        depth = min(k, most_rows // sizes[0] - 1)
        if not (yield from _same(subject, [longer, *read[1:]], depth, sizes[0])):
            return "near_tie"
    return "bitwise"


def same_prompts(subject: Subject) -> Pieces[bool]:
    """Compares two chunks of prompts in a batch and alone: hidden states, logits and caches.

    False for a target that gives no hidden states.
    """
    target = subject.target
    if not isinstance(target, FamilyTarget):
        return False
    together, alone = ([subject.make_caches() for _ in PROMPTS] for _ in range(2))
    positions, same = [0] * len(PROMPTS), mx.array(True)
    for chunk in range(2):
        counts = [rows + 40 * (chunk == number) for number, rows in enumerate(PROMPTS)]
        ids = [
            as_row(probe_ids(subject.vocabulary, 9 * n, 9 * n + count))
            for n, count in enumerate(counts)
        ]
        yield
        hidden = prefill_together(target, ids, together, positions)
        yield from by_layers(together, *hidden)
        positions = [a + b for a, b in zip(positions, counts, strict=True)]
        for index, caches in enumerate(alone):
            yield
            expected = target.forward(ids[index], caches, want="last")
            yield from by_layers([caches])
            assert expected.hidden is not None
            same &= mx.array_equal(expected.hidden, hidden[index])
            same &= mx.array_equal(expected.logits, target.logits_of(hidden[index][:, -1:]))
            same &= equal_arrays(live_arrays(caches), live_arrays(together[index]))
            mx.eval(same)
    return bool(same.item())


def warm_up_batches(subject: Subject, k: int, most_rows: int) -> Pieces[None]:
    """Runs rounds of 2 to 16 requests and of up to K drafts, WARM_DEPTH at most, the usual depths
    first: each number of both has a trace of its own, and another one behind rounds of which
    requests kept different rows."""
    yield
    read = subject.read(PROMPTS[-1])
    for rows in range(1, min(k, WARM_DEPTH) + 2):
        for size in range(2, min(SIZES[-1], most_rows // rows) + 1):
            yield
            positions = Positions([PROMPTS[-1]] * size)
            together = left_aligned([read] * size, positions)
            for count in (rows, rows, 1) if rows > 1 else (1,):
                yield
                tokens = mx.array([probe_ids(subject.vocabulary, 0, count)] * size)
                logits, _ = subject.target.forward_batch(tokens, together)
                kept_rows = [1, *[count] * (size - 1)]
                positions.advance(kept_rows)
                drop_rejected(together, count, kept_rows)
                mx.eval(logits, cache_arrays(together))


def _same(subject: Subject, prompts: Sequence[list[Any]], k: int, size: int) -> Pieces[bool]:
    """Compares `size` requests in a batch and alone. `prompts`: caches, which are not changed."""
    target, vocabulary = subject.target, subject.vocabulary
    before = [prompts[i % len(prompts)] for i in range(size)]
    rows = [_rows_of(caches, PROMPTS[i % len(PROMPTS)]) for i, caches in enumerate(before)]
    positions = Positions(rows)
    together = left_aligned(before, positions)
    ids = [probe_ids(vocabulary, 40 * i, 40 * i + k + 2) for i in range(size)]
    kept_rows = [1 + i * max(1, k // 2) % (k + 1) for i in range(size)]
    # Requests of equal length use the same kernels: a few of a large batch suffice.
    compared = {0, 1, 2, size // 2, size - 1} & {*range(size)}
    same = mx.array(True)
    yield
    logits, _ = target.forward_batch(mx.array([each[: k + 1] for each in ids]), together)
    positions.advance(kept_rows)
    drop_rejected(together, k + 1, kept_rows)
    yield from by_layers([together], logits)
    next_logits, _ = target.forward_batch(mx.array([[each[-1]] for each in ids]), together)
    positions.advance([1] * size)
    yield from by_layers([together], next_logits)
    for index in sorted(compared):
        yield
        caches = copy.deepcopy(before[index])
        expected = target.forward(as_row(ids[index][: k + 1]), caches, want="all").logits
        if kept_rows[index] < k + 1:
            rollback(caches, k + 1 - kept_rows[index])
        expected_next = target.forward(as_row(ids[index][-1:]), caches, want="all").logits
        pairs = (expected, expected_next), (logits[index], next_logits[index])
        arrays_together = live_arrays([cache.of(index) for cache in together])
        same &= equal_arrays(*pairs) & equal_arrays(live_arrays(caches), arrays_together)
        mx.eval(same)
    return bool(same.item())


def _rows_of(caches: Sequence[Any], rows: int) -> int:
    """Rows in the attention caches; without any, those of the prompt."""
    parts = (part for cache in caches for part in parts_of(cache))
    return next((part.offset for part in parts if hasattr(part, "offset")), rows)
