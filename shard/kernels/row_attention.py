"""Attention of a few rows over a cache by kernels of our own, bit for bit that of single rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from ...mtp.caches.positions import counts_array
from ...mtp.families.placed_rope import PlacedRope, is_in_three
from .cuda import TYPES, CudaKernel
from .product import MAX_ROWS, JointProducts

KEYS: Final = 64
"""Keys of a chunk, as in attention.cuh."""
_PART_BYTES = 1 << 30
"""Bytes of the chunks' results of one launch: more rows take several, each of one row at least."""
_HEADS: Final = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """Numbers and size of heads, for which the kernels are compiled."""

    heads: int
    key_heads: int
    size: int
    rotary_size: int
    """The first numbers of a head, which rotary positions rotate."""
    dtype: mx.Dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        return f"{self.heads}/{self.key_heads} heads of {self.size}, {kind}"


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """A layer's norms of q and k, and its (eps, log2 of the rotary base, rotary scale)."""

    q_norm: mx.array
    k_norm: mx.array
    numbers: mx.array


class RowAttention:
    """The kernels of one kind of heads."""

    def __init__(self, heads: AttentionHeads) -> None:
        self._heads = heads
        self._prepare, self._attend, self._join = _kernels(
            heads.size, heads.rotary_size, heads.dtype
        )

    def prepare(
        self, wide: mx.array, k: mx.array, v: mx.array, fixed: AttentionParameters, first: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """q (B, heads, n, D), k and v (B, key heads, n, D), normed and rotated.

        `wide` (B, n, heads 2 D): each head's q and its gate. `first` (B,): each sequence's first
        position.
        """
        h, (batch, rows, _) = self._heads, wide.shape
        shapes = [(batch, count, rows, h.size) for count in (h.heads, h.key_heads, h.key_heads)]
        q, k, v = self._prepare(
            [wide, k, v, fixed.q_norm, fixed.k_norm, fixed.numbers, first],
            (h.heads + 2 * h.key_heads, rows, batch),
            h.size,
            [(shape, h.dtype) for shape in shapes],
        )
        return q, k, v

    def attend(
        self,
        q: mx.array,
        buffers: tuple[mx.array, mx.array],
        wide: mx.array,
        first: mx.array,
        longest: int,
    ) -> mx.array:
        """Attends; returns (B, n, heads D), gated.

        `buffers` (B, key heads, room, D) contain the new rows' keys and values too; `longest`: the
        number of rows of the longest sequence.
        """
        h, (batch, _, rows, _) = self._heads, q.shape
        chunks = -(-longest // KEYS)
        most = max(1, _PART_BYTES // (4 * batch * h.heads * chunks * h.size))
        if rows > most:
            pieces = [
                self.attend(
                    q[:, :, i : i + most], buffers, wide[:, i : i + most], first + i, longest
                )
                for i in range(0, rows, most)
            ]
            return mx.concatenate(pieces, axis=1)
        parts, tops = self._attend(
            [q, *buffers, first],
            (chunks, h.key_heads, batch),
            h.size // 2,
            [
                ((batch, h.heads, rows, chunks, h.size), mx.float32),
                ((batch, h.heads, rows, chunks, 2), mx.float32),
            ],
        )
        [y] = self._join(
            [parts, tops, wide],
            (h.heads, rows, batch),
            h.size,
            [((batch, rows, h.heads * h.size), h.dtype)],
        )
        return y


@cache
def _kernels(
    size: int, rotary_size: int, dtype: mx.Dtype
) -> tuple[CudaKernel, CudaKernel, CudaKernel]:
    label, wide = f"{size}_{TYPES[dtype]}", f"{2 * size}"
    prepare = CudaKernel(
        f"attention_prepare_{rotary_size}_{label}",
        f"exo::prepare<{size}, {rotary_size}>(wide, k, v, q_norm, k_norm, fixed, first, q_out, "
        f"k_out, v_out, wide_shape[1], wide_shape[2] / {wide}, k_shape[2] / {size})",
        ("wide", "k", "v", "q_norm", "k_norm", "fixed", "first"),
        ("q_out", "k_out", "v_out"),
        file="attention.cuh",
    )
    attend = CudaKernel(
        f"attention_attend_{label}",
        f"exo::attend<{size}>(q, keys, values, first, parts, tops, {size**-0.5!r}f, q_shape[2], "
        "q_shape[1], keys_shape[1], keys_shape[2])",
        ("q", "keys", "values", "first"),
        ("parts", "tops"),
        file="attention.cuh",
    )
    join = CudaKernel(
        f"attention_join_{label}",
        f"exo::join<{size}>(parts, tops, wide, y, wide_shape[1], wide_shape[2] / {wide}, "
        "parts_shape[3])",
        ("parts", "tops", "wide"),
        ("y",),
        file="attention.cuh",
    )
    return prepare, attend, join


class KernelAttention(Qwen3NextAttention):
    """Qwen's gated attention for up to MAX_ROWS rows over a plain or a left-aligned batch cache.

    The `offset` (B,) of a batch cache is the end of each sequence.
    """

    kernel: RowAttention
    fixed: AttentionParameters
    together: JointProducts

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any | None = None
    ) -> mx.array:
        if not self.takes(x.shape[1], mask, cache):
            return super().__call__(x, mask, cache)
        first = self.first_positions(cache, x.shape[0])
        wide, q, k, v = self.project(x, self.rope_positions(first))
        return cast("Any", self).o_proj(self.attend(wide, q, k, v, first, cache))

    def takes(self, rows: int, mask: object, cache: object) -> bool:
        """Whether the kernels compute a forward of `rows` rows."""
        alone = type(cache) is KVCache and not isinstance(mask, mx.array)
        fits = rows <= MAX_ROWS and not is_in_three(cast("Any", self).rope)
        return fits and (alone or getattr(cache, "left_aligned", False))

    def first_positions(self, cache: Any, batch: int) -> mx.array:
        """The position of each sequence's first new row, (B,)."""
        return positions(cache.offset, batch) if type(cache) is KVCache else cache.offset

    def rope_positions(self, first: mx.array) -> mx.array:
        """The rotary positions of the first new rows, by `first_positions`."""
        rope = cast("Any", self).rope
        return (
            cast("mx.array", rope.positions.shifted(first)) if type(rope) is PlacedRope else first
        )

    def project(self, x: mx.array, first: mx.array) -> tuple[mx.array, ...]:
        """Each head's q and its gate, then q, k and v of `RowAttention.prepare`."""
        wide, k, v = self.together(x)
        return wide, *self.kernel.prepare(wide, k, v, self.fixed, first)

    def attend(
        self,
        wide: mx.array,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        first: mx.array,
        cache: Any,
    ) -> mx.array:
        """Writes keys and values to the cache and attends; returns the input of `o_proj`."""
        longest = cache.update_and_fetch(k, v)[0].shape[2]
        return self.kernel.attend(q, (cache.keys, cache.values), wide, first, longest)


@lru_cache(maxsize=64)
def positions(first: int, batch: int) -> mx.array:
    """The positions of a step, (batch,); one array for all of its layers."""
    array = counts_array([first] * batch)
    mx.eval(array)
    return array


def heads_of(layer: Any) -> AttentionHeads:
    """The heads of one of Qwen's gated attention layers."""
    sizes = (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim)
    return AttentionHeads(*sizes, getattr(layer.rope, "dims", 0), layer.q_norm.weight.dtype)


def fixed_of(layer: Any) -> AttentionParameters:
    numbers = [layer.q_norm.eps, math.log2(layer.rope.base), layer.rope.scale]
    parameters = AttentionParameters(
        layer.q_norm.weight, layer.k_norm.weight, mx.array(numbers, dtype=mx.float32)
    )
    mx.eval(parameters.numbers)
    return parameters


def unfit(layer: Any) -> str:
    """The reason why there is no kernel for a layer; empty if there is one."""
    heads = heads_of(layer)
    if heads.dtype not in (mx.float16, mx.bfloat16):
        return f"it computes in {heads.dtype}"
    if heads.size not in _HEADS:
        return f"its heads have {heads.size} numbers, not one of {_HEADS}"
    if (
        type(layer.rope) not in (nn.RoPE, PlacedRope)
        or layer.rope.traditional
        or heads.rotary_size % 2
    ):
        return "its rotary positions are of another kind"
    if layer.q_norm.eps != layer.k_norm.eps or layer.k_norm.weight.dtype != heads.dtype:
        return "its norms differ"
    return ""


def projections(layer: Any) -> Sequence[nn.Module]:
    return layer.q_proj, layer.k_proj, layer.v_proj
