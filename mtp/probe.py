"""Measures, on the loaded weights, whether a verify computes the same bits as single steps.

Backends choose kernels by the number of rows. Where the numbers are the same bit for bit, drafts
cannot change a greedy answer; otherwise they can if two tokens are about equally likely.
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from .caches.rollback import (
    RowCache,
    cache_arrays,
    holds_rows,
    parts_of,
    rollback,
    row_count,
    state_arrays,
)
from .caches.window import WindowCache, oldest_kept_row
from .pieces import Pieces
from .sampling import greedy_token
from .seams import as_row
from .targets import Target

Identity = Literal["bitwise", "near_tie"]
PROMPT_ROWS = 24
CONTEXTS = (PROMPT_ROWS, 1100, 4200)
"""Probed lengths of the context: backends change their attention kernels in between."""
LONGEST_PROBED = CONTEXTS[-1] + 64
"""Longest context length that the probe's result depends on."""


Draft = Callable[[mx.array, mx.array, int], mx.array]
"""(hidden (1, 1, H) of one more row, the token (1,) after it, k) -> k drafts."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is measured."""

    target: Target
    make_caches: Callable[[], list[Any]]
    """Makes the empty caches of one request."""
    vocabulary: int
    context_length: int
    clock: Callable[[], float]
    make_drafter: Callable[[], Draft] | None = None
    """Makes a drafter that has read no rows, or None if nothing is drafted."""
    modules: Sequence[nn.Module] = ()
    """The parts of the target, of which the one that differs is named."""
    row_bytes: int = 0
    """See `row_state_bytes`."""

    def read(self, rows: int = PROMPT_ROWS) -> list[Any]:
        """Caches after a prompt of `rows` rows."""
        caches = self.make_caches()
        ids = as_row(probe_ids(self.vocabulary, 0, rows))
        mx.eval(self.target.forward(ids, caches, want="last").logits, cache_arrays(caches))
        return caches

    def contexts(self, k: int) -> list[int]:
        """The CONTEXTS that fit into the context length, with room for blocks of K + 1 rows."""
        fit = [rows for rows in CONTEXTS if rows + 2 * k <= self.context_length]
        return fit or [PROMPT_ROWS]


def exact_depth(subject: Subject, k: int) -> Pieces[int]:
    """The most drafts, up to `k`, of which every number of rows computes what single steps do.

    Blocks of 2 to K + 1 rows, and the row after each one's rollback, are compared with single
    steps, since requests and an answer's last rounds may draft fewer tokens. The ids are arbitrary:
    kernels do not depend on them. All CONTEXTS that fit into the context length must be bitwise
    equal.
    """
    yield
    prompt = subject.read()  # once: on a slow machine that is most of the time
    depth = k
    for rows in subject.contexts(k):
        same = yield from _same_behind(rows, subject, prompt, range(2, depth + 2))
        depth = next((fewer for fewer in range(depth) if fewer + 2 not in same), depth)
    return depth


def exact_widths(subject: Subject, widths: Sequence[int]) -> Pieces[list[int]]:
    """The numbers of rows, of `widths`, whose blocks compute what single steps do.

    As `exact_depth`, but each width by itself.
    """
    yield
    prompt, exact = subject.read(), sorted(widths)
    for rows in subject.contexts(max(widths) - 1):
        same = yield from _same_behind(rows, subject, prompt, exact)
        exact = [width for width in exact if width in same]
    return exact


def warm_up(subject: Subject, widths: Sequence[int]) -> Pieces[None]:
    """Runs the kernels that answers use: a prompt, blocks of `widths` rows, and their rollback."""
    yield
    caches = subject.read()
    for rows in widths:
        yield
        ids = as_row(probe_ids(subject.vocabulary, 0, rows))
        mx.eval(subject.target.forward(ids, caches, want="all").logits)
        rollback(caches, rows)


def probe_ids(vocabulary: int, first: int, end: int) -> list[int]:
    """Arbitrary ids: kernels do not depend on them."""
    return [(7 * i + 3) % vocabulary for i in range(first, end)]


def _same_behind(
    context: int, subject: Subject, prompt: Sequence[object], widths: Sequence[int]
) -> Pieces[set[int]]:
    """The ascending `widths` that compute what single steps do after one context.

    `prompt`: caches of PROMPT_ROWS rows, not changed.
    """
    if not widths:
        return set()
    k, forward = widths[-1] - 1, subject.target.forward
    ids = probe_ids(subject.vocabulary, PROMPT_ROWS, PROMPT_ROWS + len(widths) + k)
    rest = [mx.array([token], dtype=mx.int32) for token in ids]
    single, block = copy.deepcopy(prompt), copy.deepcopy(prompt)
    # Blocks leave buffers of other sizes than single steps do, which may decide between kernels.
    extent = -(-(context + 2 * k) // KVCache.step) * KVCache.step
    yield from lengthen(single, context, extent)
    yield from lengthen(block, context, extent + KVCache.step - 1)
    expected = list[mx.array]()
    for token in rest:
        yield
        expected.append(forward(token, single, want="all").logits)
        mx.eval(expected[-1], cache_arrays(single))
    exact = set[int]()
    for start, rows in enumerate(widths):
        yield
        end = start + rows
        logits = forward(mx.concatenate(rest[start:end]), block, want="all").logits
        rollback(block, rows - 1)
        mx.eval(logits, cache_arrays(block))
        yield
        next_logits = forward(rest[start + 1], block, want="all").logits
        rollback(block, 1)
        same = mx.array_equal(mx.concatenate(expected[start:end]), logits)
        same &= mx.array_equal(expected[start + 1], next_logits)
        if same.item():
            exact.add(rows)
    return exact


def lengthen(caches: Sequence[object], rows: int, extent: int) -> Pieces[None]:
    """Fills caches with `rows` rows of deterministic noise, which saves reading a long prompt.

    The caches then have room for `extent` rows.
    """
    room = [(0, 0), (0, 0), (0, extent - rows), (0, 0)]
    for number, cache in enumerate(part for layer in caches for part in parts_of(layer)):
        yield
        if isinstance(cache, WindowCache):
            _lengthen_window(cache, rows, 2 * number)
        if not holds_rows(cache):
            continue
        long = cast("KVCache | QuantizedKVCache", cache)
        if long.offset >= rows:
            continue
        past = [_noise(like, rows, 2 * number + i) for i, like in enumerate(_keys_and_values(long))]
        if isinstance(long, QuantizedKVCache):
            form = (long.group_size, long.bits)
            quantised = [mx.quantize(each, *form) for each in past]
            long.keys, long.values = (
                tuple(mx.pad(array, room) for array in each) for each in quantised
            )
        else:
            long.keys, long.values = (mx.pad(each, room) for each in past)
        long.offset = rows
        mx.eval(cache_arrays([long]))


def _lengthen_window(cache: WindowCache, rows: int, number: int) -> None:
    """`lengthen` for a window, which has its last rows only."""
    if cache.offset >= rows:
        return
    start = oldest_kept_row(rows, cache.max_size)
    keys, values = (
        _noise(cast("mx.array", like), rows - start, number + i)
        for i, like in enumerate((cache.keys, cache.values))
    )
    cache.state = keys, values, rows, start, cache.max_size
    mx.eval(cache_arrays([cache]))


def _keys_and_values(cache: KVCache | QuantizedKVCache) -> list[mx.array]:
    """A cache's keys and values, dequantised, (1, heads, rows, width) each."""
    halves = (cache.keys, cache.values)
    if isinstance(cache, QuantizedKVCache):
        whole = [
            mx.dequantize(numbers, scales, biases, cache.group_size, cache.bits)
            for numbers, scales, biases in cast("Any", halves)
        ]
    else:
        whole = [cast("mx.array", each) for each in halves]
    return [each[..., : cache.offset, :] for each in whole]


def _noise(like: mx.array, rows: int, number: int) -> mx.array:
    """Noise (1, heads, rows, width) of the same magnitude as `like`."""
    shape = (*like.shape[:2], rows, like.shape[-1])
    return mx.random.normal(shape, like.dtype, key=mx.random.key(number)) * like.std()


def live_arrays(caches: Sequence[object]) -> list[mx.array]:
    """The arrays of caches, without attention rows that were rolled back."""
    arrays: list[mx.array] = []
    for cache in caches:
        if isinstance(cache, ArraysCache):
            arrays += state_arrays(cache)
        elif isinstance(cache, WindowCache):
            arrays += cast("tuple[mx.array, mx.array]", cache.state[:2])
        elif holds_rows(cache):
            rows = cast("RowCache", cache)
            arrays += [array[..., : row_count(rows), :] for array in state_arrays(rows)]
    return arrays


def equal_arrays(some: Sequence[mx.array], others: Sequence[mx.array]) -> mx.array:
    """() whether two lists hold the same arrays; lazy."""
    same = mx.array(len(some) == len(others))
    for a, b in zip(some, others, strict=False):
        same &= mx.array_equal(a, b)
    return same


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: `verify[0]` of a plain step; of the i-th of the measured depths k, `verify[i]` of a
    forward of k + 1 rows and `draft[i - 1]` of k drafts.

    Each is waited for: a round in which they overlap costs less than their sum.
    """

    verify: tuple[float, ...]
    draft: tuple[float, ...]


def measure_costs(
    subject: Subject, prompt: Sequence[int], depths: Sequence[int], repeats: int
) -> Pieces[Costs]:
    """Medians of `repeats` measurements after `prompt`, after one warm-up each."""
    make_drafter, forward = subject.make_drafter, subject.target.forward
    assert make_drafter is not None
    yield
    caches = subject.make_caches()
    hidden = forward(as_row(prompt), caches, want="last").hidden
    assert hidden is not None
    last, token = hidden[:, -1:], as_row(prompt[:1])

    def verify(rows: int) -> None:
        block = forward(mx.concatenate([token] * rows), caches, want="all")
        mx.eval(greedy_token(block.logits))
        rollback(caches, rows)

    def draft(drafted: Draft, depth: int) -> None:
        mx.eval(drafted(last, token, depth))

    works = [partial(verify, depth + 1) for depth in (0, *depths)]
    works += [partial(draft, make_drafter(), depth) for depth in depths]
    medians = list[float]()
    for work in works:
        yield
        work()
        seconds = list[float]()
        for _ in range(repeats):
            yield
            seconds.append(_seconds(work, subject.clock))
        medians.append(statistics.median(seconds))
    return Costs(tuple(medians[: len(depths) + 1]), tuple(medians[len(depths) + 1 :]))


def _seconds(work: Callable[[], None], clock: Callable[[], float]) -> float:
    began_at = clock()
    work()
    return clock() - began_at
