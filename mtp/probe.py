"""Measures, on the loaded weights, whether a verify of several rows computes what single steps do.

Backends choose kernels by the number of rows. Where the numbers are the same bit for bit, drafts
cannot change a greedy answer; elsewhere they can where two tokens are about equally likely.
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from .rollback import cache_arrays, holds_rows, rollback, state_arrays
from .sampling import greedy_token
from .seams import Block, Want, as_row

Identity = Literal["bitwise", "near_tie"]
PADDING_ID = 0
"""Of rows that strict mode pads a forward with: any id would do, what they compute is discarded."""
PROMPT_ROWS = 24
CONTEXTS = (PROMPT_ROWS, 1100, 4200)
"""Rows of context that are probed: backends change their kernels of attention in between."""
LONGEST_PROBED = CONTEXTS[-1] + 64
"""No longer context than this makes a difference to what is measured."""


Draft = Callable[[mx.array, mx.array, int], mx.array]
"""Drafts so many tokens behind one more row: its hidden (1, 1, H), and the token (1,) after it."""


class Forward(Protocol):
    """`Target.forward` of the engine."""

    def __call__(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block: ...


def greedy_identity(
    forward: Forward,
    make_caches: Callable[[], list[Any]],
    vocabulary: int,
    k: int,
    context_length: int = LONGEST_PROBED,
) -> Identity:
    """Compares blocks of 2 to K + 1 rows, and the row after each one's rollback, with single steps.

    Every width counts: a request may ask for fewer drafts, and the budget's last rounds have fewer.
    Behind the longer contexts the narrowest and the widest do.
    The ids are arbitrary: kernels do not depend on them, and no text is wanted. The worst of the
    CONTEXTS that fit into `context_length` is told.
    """
    fit = [rows for rows in CONTEXTS if rows + 2 * k <= context_length] or [PROMPT_ROWS]
    prompt = make_caches()  # read once: on a slow machine that is most of the time
    mx.eval(forward(as_row(probe_ids(vocabulary, 0, PROMPT_ROWS)), prompt, want="last").logits)
    mx.eval(cache_arrays(prompt))
    same = all(_same_behind(rows, forward, prompt, vocabulary, k) for rows in fit)
    return "bitwise" if same else "near_tie"


def warm_up(
    forward: Forward, make_caches: Callable[[], list[Any]], vocabulary: int, k: int
) -> None:
    """Runs what answers run: a prompt, blocks of each width up to K + 1, and their rollback."""
    caches = make_caches()
    mx.eval(forward(as_row(probe_ids(vocabulary, 0, PROMPT_ROWS)), caches, want="last").logits)
    for rows in range(1, k + 2):
        mx.eval(forward(as_row(probe_ids(vocabulary, 0, rows)), caches, want="all").logits)
        rollback(caches, rows)


def probe_ids(vocabulary: int, first: int, end: int) -> list[int]:
    """Any: kernels do not depend on them."""
    return [(7 * i + 3) % vocabulary for i in range(first, end)]


def _same_behind(
    context: int,
    forward: Forward,
    prompt: Sequence[object],
    vocabulary: int,
    k: int,
) -> bool:
    """`prompt`: caches that have read PROMPT_ROWS rows; they stay as they are."""
    # Behind much context a forward takes longer, and all but attention was seen by then.
    widths = list(range(2, k + 2))
    if context > PROMPT_ROWS:
        widths = sorted({*widths[:1], *widths[-1:]})
    ids = probe_ids(vocabulary, PROMPT_ROWS, PROMPT_ROWS + len(widths) + k)
    rest = [mx.array([token], dtype=mx.int32) for token in ids]
    single, block = copy.deepcopy(prompt), copy.deepcopy(prompt)
    # Blocks leave buffers of other sizes than single steps do, which may choose the kernel.
    extent = -(-(context + 2 * k) // KVCache.step) * KVCache.step
    lengthen(single, context, extent)
    lengthen(block, context, extent + KVCache.step - 1)
    wanted = [forward(token, single, want="all").logits for token in rest]
    same = mx.array(True)
    for start, rows in enumerate(widths):
        end = start + rows
        got = forward(mx.concatenate(rest[start:end]), block, want="all").logits
        rollback(block, rows - 1)
        again = forward(rest[start + 1], block, want="all").logits
        rollback(block, 1)
        same &= mx.array_equal(mx.concatenate(wanted[start:end]), got)
        same &= mx.array_equal(wanted[start + 1], again)
        mx.eval(same)
    return bool(same.item())


def lengthen(caches: Sequence[object], rows: int, extent: int) -> None:
    """Noise in place of the past, so that no long prompt need be read; the same for each caller.

    The caches then have room for `extent` rows.
    """
    room = [(0, 0), (0, 0), (0, extent - rows), (0, 0)]
    for number, cache in enumerate(caches):
        if isinstance(cache, RotatingKVCache):
            _lengthen_ring(cache, rows, 2 * number)
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


def _lengthen_ring(ring: RotatingKVCache, rows: int, number: int) -> None:
    """As single rows would have left it."""
    if ring.offset >= rows:
        return
    held = min(rows, ring.max_size)
    ring.keys, ring.values = (
        _noise(like, held, number + i)
        for i, like in enumerate(cast("tuple[mx.array, mx.array]", (ring.keys, ring.values)))
    )
    ring.offset = rows
    ring._idx = held  # pyright: ignore[reportPrivateUsage]
    mx.eval(cache_arrays([ring]))


def _keys_and_values(cache: KVCache | QuantizedKVCache) -> list[mx.array]:
    """What it holds, (1, heads, rows, width) each; of quantised numbers what they stand for."""
    held = (cache.keys, cache.values)
    if isinstance(cache, QuantizedKVCache):
        whole = [
            mx.dequantize(numbers, scales, biases, cache.group_size, cache.bits)
            for numbers, scales, biases in cast("Any", held)
        ]
    else:
        whole = [cast("mx.array", each) for each in held]
    return [each[..., : cache.offset, :] for each in whole]


def _noise(like: mx.array, rows: int, number: int) -> mx.array:
    """(1, heads, rows, width) as large as what a cache holds."""
    shape = (*like.shape[:2], rows, like.shape[-1])
    return mx.random.normal(shape, like.dtype, key=mx.random.key(number)) * like.std()


@dataclass(frozen=True, slots=True)
class FixedRowsCheck:
    """Whether strict mode is exact on this backend."""

    holds: bool
    reason: str = ""
    """Why drafts must stay off in strict mode, with the remedy; empty where it holds."""


def fixed_rows_identity(
    forward: Forward, make_caches: Callable[[], list[Any]], vocabulary: int, rows: int
) -> FixedRowsCheck:
    """Whether, with `rows` rows in every forward, a row's numbers do not depend on how many of them
    are real: logits, and what is left in the caches with and without rejected rows.

    Measured behind a prompt of PROMPT_ROWS rows; a backend that changes kernels at some length of
    the context is not seen to do so.
    """
    plain, mixed = make_caches(), make_caches()
    ids = [(7 * i + 3) % vocabulary for i in range(PROMPT_ROWS + rows * (rows + 3))]
    for caches in (plain, mixed):
        mx.eval(forward(as_row(ids[:PROMPT_ROWS]), caches, want="last").logits)
    at, wanted, got = PROMPT_ROWS, dict[int, mx.array](), list[tuple[int, int, mx.array]]()
    for real in range(1, rows + 1):
        for kept in sorted({1, real}):
            logits = _padded(forward, ids[at : at + real], mixed, rows, kept)
            got += [(real, at + i, logits[i]) for i in range(real)]
            for i in range(at, at + kept):
                wanted[i] = _padded(forward, ids[i : i + 1], plain, rows, 1)[0]
            at += kept
            if not _equal(live_arrays(plain), live_arrays(mixed)):
                return FixedRowsCheck(False, _refusal("what it writes into the caches", real, rows))
    for real, position, logits in got:
        if position in wanted and not mx.array_equal(wanted[position], logits).item():
            return FixedRowsCheck(False, _refusal("a row's logits", real, rows))
    return FixedRowsCheck(True)


def live_arrays(caches: Sequence[object]) -> list[mx.array]:
    """What caches hold, without the rows of attention that were rolled back."""
    arrays: list[mx.array] = []
    for cache in caches:
        if isinstance(cache, ArraysCache):
            arrays += state_arrays(cache)
        elif isinstance(cache, RotatingKVCache):
            arrays += cast("tuple[mx.array, mx.array]", cache.keys_and_values())
        elif holds_rows(cache):
            rows = cast("KVCache | QuantizedKVCache", cache)
            arrays += [held[..., : rows.offset, :] for held in state_arrays(rows)]
    return arrays


def _padded(
    forward: Forward, ids: Sequence[int], caches: list[Any], rows: int, kept: int
) -> mx.array:
    """Logits of a forward of `rows` rows, of which `ids` are real and `kept` stay in the caches."""
    padding = [PADDING_ID] * (rows - len(ids))
    logits = forward(as_row([*ids, *padding]), caches, want="all").logits
    if kept < rows:
        rollback(caches, rows - kept)
    mx.eval(logits)
    return logits


def _equal(some: Sequence[mx.array], others: Sequence[mx.array]) -> bool:
    return len(some) == len(others) and all(
        mx.array_equal(a, b).item() for a, b in zip(some, others, strict=True)
    )


def _refusal(what: str, real: int, rows: int) -> str:
    return (
        f"in strict mode every forward has {rows} rows, and on this backend {what} still depend on "
        f"whether {real} or 1 of them are real, so drafts could change the answer; unset "
        "EXO_NATIVE_MTP_STRICT to draft all the same, and `exo-node verify` shows by how much"
    )


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
    make_drafter: Callable[[], Draft],
    prompt: Sequence[int],
    k: int,
    repeats: int,
    clock: Callable[[], float],
) -> Costs:
    """Medians of `repeats` behind `prompt`, after one warm-up each.

    `make_drafter` gives a draft head with nothing read.
    """
    caches = make_caches()
    hidden = forward(as_row(prompt), caches, want="last").hidden
    assert hidden is not None
    last, token = hidden[:, -1:], as_row(prompt[:1])

    def verify(rows: int) -> None:
        block = forward(mx.concatenate([token] * rows), caches, want="all")
        mx.eval(greedy_token(block.logits))
        rollback(caches, rows)

    def draft(drafted: Draft, depth: int) -> None:
        mx.eval(drafted(last, token, depth))

    def median(work: Callable[[], None]) -> float:
        work()
        return statistics.median(_seconds(work, clock) for _ in range(repeats))

    drafters = [make_drafter() for _ in range(k)]
    return Costs(
        tuple(median(partial(verify, rows)) for rows in range(1, k + 2)),
        tuple(median(partial(draft, d, depth)) for depth, d in enumerate(drafters, 1)),
    )


def _seconds(work: Callable[[], None], clock: Callable[[], float]) -> float:
    begun = clock()
    work()
    return clock() - begun
