"""mlx-lm's gated delta layer with a tape of its inputs, so that its rows can be rolled back."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Final, Protocol, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import compute_g, gated_delta_update, normalize_qk

from ..caches.positions import counts_array
from ..caches.rollback import RowChoice, TapedCache, TapedLayer, rows_of_each
from ..caches.window import MAX_ROLLBACK_ROWS

MAX_STATE_ROWS = 16
"""Rows of a forward of which a layer's kernel returns the state after each, so that a rollback
chooses one of them. States of more rows would need too much memory: of those a rollback computes
the rows that stay again."""
ROUND_SHARE: Final = 16
"""One part in so many of the memory limit is left to what a forward computes beside states."""
UNBOUNDED_ROWS: Final = 1 << 30

LayerStart = tuple[mx.array, mx.array, mx.array]
"""The start of a kernel: a `RowChoice`, or the convolution's last rows, the states (B, v heads,
v dim, k dim) and `start_rows`."""
Recurrence = Callable[..., tuple[mx.array, mx.array]]
"""(q, k, v, a, b, the state before) -> rows and the state after them."""
LayerOutput = tuple[mx.array, tuple[mx.array, ...]]
"""The results of `TapedGatedDelta.few_rows`."""


@lru_cache(maxsize=64)
def start_rows(batch: int) -> mx.array:
    """`RowChoice.at` for one state of each sequence and its last 3 rows."""
    rows = mx.zeros((3, batch), dtype=mx.int32)[:2]  # a view: see `counts_array`
    mx.eval(rows)
    return rows


@lru_cache(maxsize=256)
def row_ends(rows: int, batch: int) -> mx.array:
    """The `ends` of `DeltaKernel.rows` if `rows` rows of each sequence stay."""
    ends = counts_array([rows] * batch)
    mx.eval(ends)
    return ends


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
        ends: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Up to MAX_STATE_ROWS rows: y (B, n, v heads, D), the convolution's rows (B, 3 + n, C)
        and the state after each row (n, B, v heads, D, D).

        `before`: the convolution's last 3 rows. `state`: the recurrence's state (B, v heads, D, D).
        Or both are results of an earlier call, and `at` (2, B) int32 gives for each sequence the
        index of its state and of the first of its 3 rows.

        With `ends` (B,) int32 any number of rows, and in place of the states one (B, v heads, D,
        D): that of each sequence after its first `ends` rows. Those behind them are not computed.
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
        """mlx-lm's `gated_delta_update` without a mask, for any number of rows: y and the last
        state."""
        ...


class TapedGatedDelta(TapedLayer):
    """Mixed into a gated-delta layer of mlx-lm: the same numbers, and a tape for a `TapedCache`.

    A family's class lists it before mlx-lm's and defines how that layer projects its inputs.
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
    """Computes the layer in place of MLX's operations; the loader sets it and `fixed`."""
    fixed: Any
    """The layer's parameters as its kernel takes them."""
    takes_kernel: ClassVar[bool] = True
    """Whether a `DeltaKernel` computes what the layer does."""
    projections: ClassVar[tuple[str, ...]] = ()
    """Names of the linear layers of `project`."""
    together: Callable[[mx.array], Sequence[mx.array]] | None = None
    """Their products in one launch; the loader sets it."""
    chunked: Recurrence | None = None
    """Computes a prompt's rows in chunks; takes A_log and dt_bias too, before the state. The loader
    sets it."""

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
        if self.chunked is not None and mask is None and rows > MAX_ROLLBACK_ROWS:
            return self._rows(inputs, cache, self._by_chunks)
        if self.kernel is not None and mask is None:
            if rows > MAX_ROLLBACK_ROWS:
                return self._rows(inputs, cache, self._by_kernel)
            start = self.start_of(cache, inputs.shape[0], inputs.dtype)
            out, output = self.few_rows(inputs, *start)
            self.commit(cache, rows, start, output)
            return self.out_proj(out)
        if rows == 1 or rows > MAX_ROLLBACK_ROWS:
            return self.by_stock(cache, rows, lambda: stock(inputs, mask, cache))
        return self._rows(inputs, cache, self._by_steps)

    def takes(self, rows: int, mask: object, cache: object) -> bool:
        """Whether `few_rows` computes a forward of `rows` rows."""
        is_plain = mask is None and isinstance(cache, TapedCache) and cache.lengths is None
        return self.kernel is not None and is_plain and rows <= MAX_ROLLBACK_ROWS

    def start_of(self, cache: TapedCache, batch: int, dtype: mx.Dtype) -> LayerStart:
        """The rows and the state that a kernel begins with."""
        if cache.chosen is not None:
            return cache.chosen
        return *self.last_of(cache, batch, dtype), start_rows(batch)

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
    ) -> LayerOutput:
        """Computes up to MAX_ROLLBACK_ROWS rows from the arrays of `start_of`.

        Returns (B, n, v heads v dim) for `out_proj`, and for `commit` the convolution's rows with
        those before them, and its last ones; the last state; and what a rollback needs: the state
        after each row, or of more than MAX_STATE_ROWS rows what the kernel reads of them.
        """
        assert self.kernel is not None
        batch, rows, _ = inputs.shape
        projected, is_many = self.project(inputs), rows > MAX_STATE_ROWS
        ends = row_ends(rows, batch) if is_many else None
        out, window, after = self.kernel.rows(*projected, before, self.fixed, state, at, ends)
        tape = (after, *projected) if is_many else (_one_of(after, rows - 1), after)
        return out.reshape(batch, rows, -1), (window, window[:, rows:], *tape)

    def commit(
        self,
        cache: TapedCache,
        rows: int,
        start: LayerStart,
        output: Sequence[mx.array],
    ) -> None:
        """Stores what `few_rows` returned for it; `start`: from `start_of`."""
        window, last, state, *tape = output
        width = last.shape[1]
        cache.cache = [last, state]
        cache.advance(rows)

        def restore(count: int) -> list[mx.array | None]:
            if count == 0:
                has_choice = start[1].ndim > state.ndim
                return RowChoice(*start).arrays() if has_choice else list(start[:2])
            if len(tape) == 1:
                earlier = _one_of(tape[0], count - 1)
            else:
                earlier = state_after(row_ends(count, state.shape[0]))
            return [window[:, count : count + width], earlier]

        def choose(at: mx.array) -> RowChoice:
            return RowChoice(window, tape[0], at)

        def state_after(ends: mx.array) -> mx.array:
            assert self.kernel is not None
            (qkv, z, b, a), (before, first, at) = tape, start
            return self.kernel.rows(qkv, z, b, a, before, self.fixed, first, at, ends)[2]

        def restore_each(at: mx.array) -> list[mx.array | None]:
            return [rows_of_each(window, at[1], width), state_after(at[1])]

        cache.record(rows, restore, choose if len(tape) == 1 else restore_each)

    def _by_steps(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        state: mx.array,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        if mask is None and q.shape[1] > 1 and mx.default_device() == mx.Device(mx.cpu):
            decay = compute_g(self.A_log, a, self.dt_bias)
            return _rows_in_turn(q, k, v, decay, mx.sigmoid(b), state)
        parameters = self.A_log, self.dt_bias, state, mask
        return gated_delta_update(q, k, v, a, b, *parameters, use_kernel=not self.training)

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

    def _rows(self, inputs: mx.array, cache: TapedCache, recurrence: Recurrence) -> mx.array:
        """Computes any number of rows by `recurrence`, with a tape if they can be rolled back."""
        batch, rows, _ = inputs.shape
        qkv, z, b, a = self.project(inputs)
        before, state = self.last_of(cache, batch, inputs.dtype)
        window, width = mx.concatenate([before, qkv], axis=1), before.shape[1]
        q, k, v = self._split_heads(nn.silu(self.conv1d(window)), batch, rows)

        def recur(upto: int) -> tuple[mx.array, mx.array]:
            first = [x[:, :upto] for x in (q, k, v, a, b)]
            return recurrence(*first, state)

        def restore(count: int) -> list[mx.array | None]:
            if count == 0:
                return [before, state]
            return [_rows_of(window, count, width), recur(count)[1]]

        def restore_each(at: mx.array) -> list[mx.array | None]:
            count = at[1]
            # A masked row leaves a state as it was: the others' operations are those of `recur`.
            mask = mx.arange(rows) < count[:, None]
            return [rows_of_each(window, count, width), recurrence(q, k, v, a, b, state, mask)[1]]

        out, cache[1] = recur(rows)
        cache[0] = _rows_of(window, rows, width)
        if rows > MAX_ROLLBACK_ROWS:
            cache.forget()
        else:
            cache.record(rows, restore, restore_each if recurrence == self._by_steps else None)
        cache.advance(rows)
        return self.out_proj(self.norm(out, z).reshape(batch, rows, -1))

    def _split_heads(
        self, conv_out: mx.array, batch: int, rows: int
    ) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v = mx.split(conv_out, [self.key_dim, 2 * self.key_dim], -1)
        q = q.reshape(batch, rows, self.num_k_heads, self.head_k_dim)
        k = k.reshape(batch, rows, self.num_k_heads, self.head_k_dim)
        v = v.reshape(batch, rows, self.num_v_heads, self.head_v_dim)
        return *self._normalized(q, k), v

    def _normalized(self, q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        return normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=1e-6)


def _rows_in_turn(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """mlx-lm's `gated_delta_ops`, its bits, in four fifths of its time on a CPU: there each of the
    five arrays is cut once, and not once for each row."""
    if (heads := v.shape[2] // k.shape[2]) > 1:
        q, k = mx.repeat(q, heads, axis=2), mx.repeat(k, heads, axis=2)
    state, outputs = state[:, None], list[mx.array]()
    pieces = (mx.split(x, q.shape[1], axis=1) for x in (q, k, v, decay, beta))
    for q_row, k_row, v_row, decay_row, beta_row in zip(*pieces, strict=True):
        output, state = _delta_step(q_row, k_row, v_row, decay_row, beta_row, state)
        outputs.append(output)
    return mx.concatenate(outputs, axis=1), state[:, 0]


@mx.compile
def _delta_step(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One row of (B, 1, heads, …)."""
    k = k[..., None, :]
    state = state * decay[..., None, None]
    delta = (v - (state * k).sum(axis=-1)) * beta[..., None]
    state = state + k * delta[..., None]
    return (state * q[..., None, :]).sum(axis=-1).astype(q.dtype), state


def _one_of(states: mx.array, index: int) -> mx.array:
    """A view of one state; indexing alone would gather and so copy."""
    return mx.squeeze(states[index : index + 1], axis=0)


def _rows_of(window: mx.array, first: int, count: int) -> mx.array:
    """A copy of some rows: a view would keep all of `window` in memory."""
    return mx.contiguous(window[:, first : first + count])


def row_state_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of the states that layers with a kernel keep for each row of a forward of up to
    MAX_STATE_ROWS; 0 without such layers."""
    layers = (m for m in modules if isinstance(m, TapedGatedDelta) and m.kernel is not None)
    return sum(4 * m.num_v_heads * m.head_v_dim * m.head_k_dim for m in layers)


def rows_with_room(row_bytes: int, freed: int = 0) -> int:
    """Rows of a round whose states, `row_bytes` each, fit into the process's memory limit with
    `freed` bytes that give way to them."""
    if not row_bytes:
        return UNBOUNDED_ROWS
    usable = mx.get_memory_limit() - mx.get_memory_limit() // ROUND_SHARE
    return max(0, (usable + freed - mx.get_active_memory()) // row_bytes)
