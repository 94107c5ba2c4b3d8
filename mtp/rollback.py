"""Taking rows back from a model's caches, bit for bit as if they had never been written.

Attention caches are trimmed. A recurrent layer keeps no past: during a forward of several rows it
records the inputs of its recurrence (the tape), and the first m rows are replayed from the state
before. The recurrence is sequential in float32, so the replay repeats the same operations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

MAX_TAPE_ROWS = 64
"""Prefill chunks are never rolled back; a tape of one would keep all of its inputs alive."""
MAX_KERNEL_ROWS = 16
"""Rows of one launch of a layer's kernel, which keeps the state behind each: a rollback is a choice
among them."""


class Chosen(NamedTuple):
    """What a kernel left behind every row of a forward, and the row that each request keeps: known
    to the GPU alone, perhaps. The kernel begins there; nothing is copied."""

    window: mx.array
    """(B, n + 3, C) the convolution's rows."""
    states: mx.array
    """(n, B, v heads, v dim, k dim) behind each row."""
    at: mx.array
    """(2, B) int32, as `DeltaKernel.rows` takes it."""

    def arrays(self) -> "list[mx.array | None]":
        """What a cache holds of it."""
        batch = self.at.shape[1]
        window = _rows_of_each(self.window, self.at[1], self.window.shape[1] - self.states.shape[0])
        return [window, self.states[self.at[0], mx.arange(batch)]]


def kept_rows(rows: mx.array) -> mx.array:
    """(2, B) as `Chosen.at`, where each request keeps `rows` (B,) of the last forward."""
    return mx.stack([rows - 1, rows]).astype(mx.int32)


@lru_cache(maxsize=64)
def beginning(batch: int) -> mx.array:
    """`Chosen.at` where there is one state of each sequence, and its last 3 rows."""
    made = mx.zeros((2, batch), dtype=mx.int32)
    mx.eval(made)
    return made


Held = tuple[mx.array, mx.array, mx.array]
"""A choice, or the convolution's last rows and the states (B, v heads, v dim, k dim), and where
they begin: what a kernel goes on from."""
Restore = Callable[[int], list[mx.array | None]]
RestoreEach = Callable[[mx.array], "list[mx.array | None] | Chosen"]
Recurrence = Callable[..., tuple[mx.array, mx.array]]
"""Rows and the state behind them, of q, k, v, a, b and the state before."""
Written = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]
"""What a gated delta layer's kernel gives for a few rows."""

Swaps = Mapping[type[nn.Module], type[nn.Module]]
"""Layer classes of mlx-lm, and what stands in for them so that a verify can be taken back."""


class DeltaKernel(Protocol):
    """Computes a gated delta layer between its projections in place of MLX's operations.

    Each row's numbers are independent of how many rows there are. `layer` is the layer's `fixed`.
    """

    def rows(
        self,
        qkv: mx.array,
        z: mx.array,
        b: mx.array,
        a: mx.array,
        before: mx.array,
        layer: Any,
        state: mx.array,
        at: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Up to MAX_KERNEL_ROWS rows: y (B, n, v heads, D), the convolution's rows (B, 3 + n, C)
        and the state after each row (n, B, v heads, D, D).

        `before` are the convolution's last 3 rows, `state` what the recurrence left: (B, v heads,
        D, D). Or both are what an earlier call gave, of which `at` (2, B) int32 says for each
        sequence which state is its own, and which is the first of its 3 rows.
        """
        ...

    def recurrence(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        layer: Any,
        state: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """As mlx-lm's `gated_delta_update` without a mask, for any number of rows: y and the last
        state."""
        ...


class TapedCache(ArraysCache):
    """A recurrent layer's state, and how to get back to an earlier row of the last forward."""

    def __init__(self, size: int) -> None:
        self.chosen: Chosen | None = None
        """In place of `cache`, until somebody reads that."""
        super().__init__(size)
        self._tape: tuple[int, Restore, RestoreEach | None] | None = None

    @property
    def cache(self) -> list[mx.array | None]:
        if self.chosen is not None:
            self._arrays, self.chosen = self.chosen.arrays(), None
        return self._arrays

    @cache.setter
    def cache(self, arrays: list[mx.array | None]) -> None:
        self._arrays, self.chosen = arrays, None

    def record(self, rows: int, restore: Restore, each: RestoreEach | None = None) -> None:
        """`restore(m)` gives the state after the first m of the `rows` rows just written.

        `each`: the same for a batch, of which every request keeps 1 row or more of its own; see
        `keep`.
        """
        self._tape = (rows, restore, each)

    def forget(self) -> None:
        self._tape = None

    def rollback(self, rows: int) -> None:
        """Drops the last `rows` rows. Once per forward."""
        if self._tape is None or not 0 <= rows <= self._tape[0]:
            raise AssertionError(f"cannot take {rows} rows back: the tape does not reach that far")
        written, restore, _ = self._tape
        if rows:  # a tape of one row holds nothing but the state before it
            self.cache = restore(written - rows)
        self._tape = None

    def keep(self, at: mx.array) -> None:
        """Keeps some rows of the last forward, at least 1 of each request: `kept_rows`."""
        each = None if self._tape is None else self._tape[2]
        if each is None:
            raise AssertionError("the last forward left no tape for a batch")
        kept = each(at)
        if isinstance(kept, Chosen):
            # The arrays behind the last row are no request's state: nothing may find them.
            self.cache = [None] * len(self._arrays)
            self.chosen = kept
        else:
            self.cache = kept
        self._tape = None


class TapedGatedDelta(nn.Module):
    """Mixed into a gated-delta layer of mlx-lm: the same numbers, and a tape for a `TapedCache`.

    A family's class lists it before mlx-lm's and says how that layer projects its inputs.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    conv_dim: int
    conv_kernel_size: int
    A_log: mx.array
    dt_bias: mx.array
    conv1d: nn.Conv1d
    norm: Callable[[mx.array, mx.array], mx.array]
    out_proj: nn.Linear
    kernel: DeltaKernel | None = None
    """What computes it in place of MLX's operations; the loader sets it and `fixed`."""
    fixed: Any
    """The layer's parameters as its kernel takes them."""
    projections: ClassVar[tuple[str, ...]] = ()
    """What `project` multiplies its input with."""
    together: Callable[[mx.array], Sequence[mx.array]] | None = None
    """Their products in one launch; the loader sets it."""
    chunked: Recurrence | None = None
    """Computes a prompt's rows some at a time, of the layer's A_log and dt_bias too, which come
    before the state; the loader sets it."""

    def project(self, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """(B, n, H) -> qkv (B, n, conv_dim), z (B, n, v heads, v dim), b and a (B, n, v heads)."""
        raise NotImplementedError

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: ArraysCache | None = None
    ) -> mx.array:
        stock = cast(Any, super()).__call__
        if not isinstance(cache, TapedCache) or cache.lengths is not None:
            return stock(inputs, mask, cache)
        rows = inputs.shape[1]
        if self.chunked is not None and mask is None and rows > MAX_TAPE_ROWS:
            return self._prompt(inputs, cache, self._by_chunks)
        if self.kernel is not None and mask is None:
            if rows > MAX_KERNEL_ROWS:
                return self._prompt(inputs, cache, self._by_kernel)
            held = self.held(cache, inputs.shape[0], inputs.dtype)
            out, *written = self.few_rows(inputs, *held)
            self.wrote(cache, rows, held, written)
            return self.out_proj(out)
        if rows == 1 or rows > MAX_TAPE_ROWS:
            before = list(cache.cache)
            out = stock(inputs, mask, cache)
            if rows == 1:
                cache.record(1, lambda _kept: before)
            else:
                cache.forget()
            return out
        return self._taped(inputs, cache)

    def _taped(self, inputs: mx.array, cache: TapedCache) -> mx.array:
        batch, rows, _ = inputs.shape
        width = self.conv_kernel_size - 1
        qkv, z, b, a = self.project(inputs)
        conv_state, state = cache[0], cache[1]
        if conv_state is None:
            conv_state = mx.zeros((batch, width, self.conv_dim), dtype=inputs.dtype)
        conv_input = mx.concatenate([conv_state, qkv], axis=1)
        q, k, v = self._split_heads(nn.silu(self.conv1d(conv_input)), batch, rows)

        def recur(upto: int, mask: mx.array | None = None) -> tuple[mx.array, mx.array]:
            return gated_delta_update(
                q[:, :upto],
                k[:, :upto],
                v[:, :upto],
                a[:, :upto],
                b[:, :upto],
                self.A_log,
                self.dt_bias,
                state,
                mask,
                use_kernel=not self.training,
            )

        def restore(kept: int) -> list[mx.array | None]:
            if kept == 0:
                return [conv_state, state]
            return [mx.contiguous(conv_input[:, kept : kept + width]), recur(kept)[1]]

        def restore_each(at: mx.array) -> list[mx.array | None]:
            kept = at[1]
            # A masked row leaves a state as it was: the others' operations are those of `recur`.
            mask = mx.arange(rows) < kept[:, None]
            return [_rows_of_each(conv_input, kept, width), recur(rows, mask)[1]]

        out, cache[1] = recur(rows)
        cache[0] = mx.contiguous(conv_input[:, -width:])
        cache.record(rows, restore, restore_each)
        cache.advance(rows)
        return self.out_proj(self.norm(out, z).reshape(batch, rows, -1))

    def takes(self, rows: int, mask: object, cache: object) -> bool:
        """Whether `few_rows` computes a forward of so many."""
        alone = mask is None and isinstance(cache, TapedCache) and cache.lengths is None
        return self.kernel is not None and alone and rows <= MAX_KERNEL_ROWS

    def held(self, cache: TapedCache, batch: int, dtype: mx.Dtype) -> Held:
        """What a kernel goes on from."""
        if cache.chosen is not None:
            return cache.chosen
        return *self.last_of(cache, batch, dtype), beginning(batch)

    def last_of(self, cache: TapedCache, batch: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """The convolution's last rows and the state; zeros before the first row."""
        before, state = cache[0], cache[1]
        if before is None:
            before = mx.zeros((batch, self.conv_kernel_size - 1, self.conv_dim), dtype=dtype)
            shape = (batch, self.num_v_heads, self.head_v_dim, self.head_k_dim)
            state = mx.zeros(shape, dtype=mx.float32)
        return before, state

    def few_rows(
        self, inputs: mx.array, before: mx.array, state: mx.array, at: mx.array
    ) -> Written:
        """From what was `held`: (B, n, v heads v dim), what `out_proj` takes; the convolution's
        rows with those before them, its last ones, and the state after each row and the last."""
        assert self.kernel is not None
        batch, rows, _ = inputs.shape
        qkv, z, b, a = self.project(inputs)
        out, window, states = self.kernel.rows(qkv, z, b, a, before, self.fixed, state, at)
        return (
            out.reshape(batch, rows, -1),
            window,
            window[:, rows:],
            states,
            _one_of(states, rows - 1),
        )

    def wrote(
        self,
        cache: TapedCache,
        rows: int,
        held: Held,
        written: Sequence[mx.array],
    ) -> None:
        """Keeps what `few_rows` gave behind its first array, from what was `held`."""
        window, last, states, state = written
        width = last.shape[1]

        def restore(kept: int) -> list[mx.array | None]:
            if kept == 0:
                return Chosen(*held).arrays() if held[1].ndim == states.ndim else list(held[:2])
            return [window[:, kept : kept + width], _one_of(states, kept - 1)]

        def restore_each(at: mx.array) -> Chosen:
            return Chosen(window, states, at)

        cache.cache = [last, state]
        cache.record(rows, restore, restore_each)
        cache.advance(rows)

    def _by_kernel(
        self, q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        assert self.kernel is not None
        return self.kernel.recurrence(q, k, v, a, b, self.fixed, state)

    def _by_chunks(
        self, q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        assert self.chunked is not None
        return self.chunked(q, k, v, a, b, self.A_log, self.dt_bias, state)

    def _prompt(self, inputs: mx.array, cache: TapedCache, recurrence: Recurrence) -> mx.array:
        """As `_taped`, for any number of rows."""
        batch, rows, _ = inputs.shape
        qkv, z, b, a = self.project(inputs)
        before, state = self.last_of(cache, batch, inputs.dtype)
        window = mx.concatenate([before, qkv], axis=1)
        q, k, v = self._split_heads(nn.silu(self.conv1d(window)), batch, rows)

        def recur(upto: int) -> tuple[mx.array, mx.array]:
            first = [x[:, :upto] for x in (q, k, v, a, b)]
            return recurrence(*first, state)

        def restore(kept: int) -> list[mx.array | None]:
            if kept == 0:
                return [before, state]
            return [_rows_of(window, kept, before.shape[1]), recur(kept)[1]]

        out, cache[1] = recur(rows)
        cache[0] = _rows_of(window, rows, before.shape[1])
        if rows > MAX_TAPE_ROWS:
            cache.forget()
        else:
            cache.record(rows, restore)
        cache.advance(rows)
        return self.out_proj(self.norm(out, z).reshape(batch, rows, -1))

    def _split_heads(
        self, conv_out: mx.array, batch: int, rows: int
    ) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v = mx.split(conv_out, [self.key_dim, 2 * self.key_dim], -1)
        q = q.reshape(batch, rows, self.num_k_heads, self.head_k_dim)
        k = k.reshape(batch, rows, self.num_k_heads, self.head_k_dim)
        v = v.reshape(batch, rows, self.num_v_heads, self.head_v_dim)
        q, k = normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=1e-6)
        return q, k, v


def _one_of(states: mx.array, index: int) -> mx.array:
    """A view; MLX gathers, and so copies, what an index alone asks for."""
    return mx.squeeze(states[index : index + 1], axis=0)


def _rows_of(window: mx.array, first: int, count: int) -> mx.array:
    """A copy: a view would keep the whole of `window` in memory."""
    return mx.contiguous(window[:, first : first + count])


def _rows_of_each(window: mx.array, first: mx.array, count: int) -> mx.array:
    """(B, count, C): the rows of each request behind its own `first` (B,)."""
    at = (first[:, None] + mx.arange(count))[:, :, None]
    return mx.take_along_axis(window, mx.broadcast_to(at, (*at.shape[:2], window.shape[2])), axis=1)


def takes_tapes(model: nn.Module) -> bool:
    """Whether the model's recurrent layers, if it has any, record tapes."""
    return any(isinstance(module, TapedGatedDelta) for _, module in model.named_modules())


def with_tapes(caches: Sequence[object]) -> list[object]:
    """A fresh cache list in which the recurrent entries take tapes, for a model that `takes_tapes`.

    Under layers that record none, rows could not be taken back and nothing would say so.
    """
    return [TapedCache(len(c.cache)) if type(c) is ArraysCache else c for c in caches]


def holds_rows(cache: object) -> bool:
    """Whether it keeps one row for each token, as they are or quantised: each on its own, so that
    rows are taken back by forgetting them."""
    return type(cache) in (KVCache, QuantizedKVCache)


def fixed_kinds(caches: Sequence[object]) -> list[str]:
    """Names of the kinds of cache that rows cannot be taken back from, each once."""
    kinds = (type(c) for c in caches if not isinstance(c, TapedCache) and not holds_rows(c))
    return sorted({kind.__name__ for kind in kinds})


def can_roll_back(caches: Sequence[object]) -> bool:
    """Whether every layer's cache is of a kind that `rollback` takes rows back from."""
    return not fixed_kinds(caches)


def rollback(caches: Sequence[object], rows: int) -> None:
    """Drops the last `rows` rows, all of which the last forward wrote, from every layer."""
    for cache in caches:
        if isinstance(cache, TapedCache):
            cache.rollback(rows)
        elif holds_rows(cache):
            dropped = cast("KVCache | QuantizedKVCache", cache).trim(rows)
            if dropped != rows:
                raise AssertionError(f"asked to drop {rows} rows of {dropped}")
        else:
            raise AssertionError(f"{type(cache).__name__} cannot be rolled back")


def state_arrays(cache: ArraysCache | KVCache | QuantizedKVCache) -> list[mx.array]:
    """The arrays that one cache's state consists of, in their order; none before its first row.

    Recurrent states, or keys and values (three arrays each where they are quantised), as the
    cache's own methods resolve them. Rows of attention may be more than `offset`.
    """
    if isinstance(cache, ArraysCache):
        return [state for state in cache.cache if state is not None]
    return [array for half in (cache.keys, cache.values) for array in _arrays_in(half)]


def cache_arrays(caches: Sequence[object]) -> list[mx.array]:
    """Every array that the caches hold, in no particular order: to be evaluated or measured.

    Attributes rather than `state`: that is a copy where a cache holds more rows than it shows.
    To read a state, take `state_arrays`: what is found here may be in another form.
    """
    return [array for cache in caches for array in _arrays_in(vars(cache))]


def _arrays_in(held: object) -> Iterator[mx.array]:
    match held:
        case mx.array():
            yield held
        case Mapping():
            for each in cast("Mapping[object, object]", held).values():
                yield from _arrays_in(each)
        case list() | tuple():
            for each in cast("Sequence[object]", held):
                yield from _arrays_in(each)
        case _ if type(held).__module__.startswith("mlx_lm.models."):  # a cache in a CacheList
            yield from _arrays_in(vars(held))
        case _:
            pass
