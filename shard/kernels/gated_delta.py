"""The gated delta rule on CUDA: a layer between its projections for a few rows, and a prompt's
recurrence. MLX has neither there: mlx-lm runs a loop over rows, some 25 launches for each."""

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.gated_delta import compute_g, gated_delta_ops

from ...mtp.families.taped_gated_delta import start_rows
from .cuda import TYPES, CudaKernel

_IN = ("qkv", "z", "b", "a", "before", "kernel", "a_log", "dt_bias", "norm", "state", "at")


@dataclass(frozen=True, slots=True)
class Sizes:
    """A kernel's constants: heads of q and k, heads of v, numbers of a head, and the norm's eps."""

    k_heads: int
    v_heads: int
    size: int
    dtype: mx.Dtype
    eps: float = 1e-6

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        return f"{self.k_heads}/{self.v_heads} heads of {self.size}, {kind}"


@dataclass(frozen=True, slots=True)
class DeltaParameters:
    """The parameters of a layer between its projections; `a_log` in float32."""

    kernel: mx.array
    a_log: mx.array
    dt_bias: mx.array
    norm: mx.array

    def arrays(self, state: mx.array) -> tuple[mx.array, ...]:
        return self.kernel, self.a_log, self.dt_bias, self.norm, state


class GatedDelta:
    """The kernels of one size; a `DeltaKernel` for layers with `DeltaParameters`."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        size, type_name = sizes.size, TYPES[sizes.dtype]
        label = f"{size}_{type_name}"
        self._rows, self._many_rows = (
            _layer_kernel(sizes, many=False),
            _layer_kernel(sizes, many=True),
        )
        self._recurrence = CudaKernel(
            f"gated_delta_recurrence_{label}",
            f"exo::recurrence<{size}>(q, k, v, g, beta, state, y, last, q_shape[1], q_shape[2], "
            "v_shape[2])",
            ("q", "k", "v", "g", "beta", "state"),
            ("y", "last"),
            file="gated_delta.cuh",
        )

    def rows(
        self,
        qkv: mx.array,
        z: mx.array,
        b: mx.array,
        a: mx.array,
        before: mx.array,
        layer: DeltaParameters,
        state: mx.array,
        at: mx.array | None = None,
        ends: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        (batch, rows, channels), s = qkv.shape, self._sizes
        arrays = [qkv, z, b, a, before, *layer.arrays(state)]
        arrays.append(start_rows(batch) if at is None else at)
        kernel, count = self._rows, (rows,)
        if ends is not None:
            kernel, count = self._many_rows, ()
            arrays.append(ends)
        y, window, states = kernel(
            arrays,
            (s.v_heads, batch, 1),
            s.size * s.size // 32,
            [
                ((batch, rows, s.v_heads, s.size), s.dtype),
                ((batch, 3 + rows, channels), s.dtype),
                ((*count, *state.shape[-4:]), mx.float32),
            ],
        )
        return y, window, states

    def recurrence(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        layer: DeltaParameters,
        state: mx.array,
    ) -> tuple[mx.array, mx.array]:
        s, g = self._sizes, compute_g(layer.a_log, a, layer.dt_bias)
        y, last = self._recurrence(
            [q, k, v, g, mx.sigmoid(b), state],
            (s.size * s.size // 4096, s.v_heads, q.shape[0]),
            128,
            [(v.shape, s.dtype), (state.shape, mx.float32)],
        )
        return y, last


def _layer_kernel(sizes: Sizes, *, many: bool) -> CudaKernel:
    size, eps = sizes.size, f"{sizes.eps!r}f"
    label = f"{size}_{TYPES[sizes.dtype]}_{eps.replace('-', '_').replace('.', '_')}"
    kind, ends = ("many_rows", "ends") if many else ("rows", "nullptr")
    return CudaKernel(
        f"gated_delta_{kind}_{label}",
        f"exo::layer_rows<{size}, {str(many).lower()}>(qkv, z, b, a, before, kernel, a_log, "
        f"dt_bias, norm, state, at, {ends}, y, window, states, {eps}, qkv_shape[0], qkv_shape[1], "
        f"(qkv_shape[2] / {size} - z_shape[2]) / 2, z_shape[2], before_shape[1])",
        (*_IN, "ends") if many else _IN,
        ("y", "window", "states"),
        file="gated_delta.cuh",
    )


def reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    layer: DeltaParameters,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Computes `GatedDelta.recurrence` in plain operations."""
    g = compute_g(layer.a_log, a, layer.dt_bias)
    return gated_delta_ops(q, k, v, g, mx.sigmoid(b), state)


def unfit(sizes: Sizes, value_size: int, width: int) -> str:
    """The reason why there is no kernel for a layer; empty if there is one."""
    if sizes.dtype not in TYPES:
        return f"it computes in {sizes.dtype}"
    if sizes.size not in (64, 128) or value_size != sizes.size:
        return f"its heads have {sizes.size} and {value_size} numbers, not 64 or 128 each"
    if width != 4:
        return f"its convolution reads {width} rows, not 4"
    return ""
