"""The gated delta rule over a prompt, some rows at a time, in plain MLX operations.

mlx-lm has a kernel for it on Metal and a loop over rows elsewhere. Here the rows of a chunk are
solved for together (Yang et al., Gated Delta Networks, arXiv 2412.06464, section 3.3), and only
chunks follow each other.
"""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx
from mlx import nn

from ...mtp.families.taped_gated_delta import TapedGatedDelta

CHUNK: Final = 16
"""Rows of a chunk. More rows lengthen the triangle that is solved row by row, fewer add chunks."""


def use_chunks(models: Sequence[nn.Module]) -> int:
    """Makes recurrent layers without an MLX kernel compute prompts in chunks from now on.

    Returns the number of those layers.
    """
    if mx.metal.is_available() and mx.default_device() == mx.gpu:
        return 0
    layers = [
        module
        for model in models
        for _, module in model.named_modules()
        if isinstance(module, TapedGatedDelta) and module.kernel is None
    ]
    for layer in layers:
        layer.chunked = chunked_update
    return len(layers)


def chunked_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Computes mlx-lm's `gated_delta_update` without a mask, in chunks."""
    return chunked_delta(q, k, v, log_decay(a_log, a, dt_bias), mx.sigmoid(b), state)


def log_decay(a_log: mx.array, a: mx.array, dt_bias: mx.array) -> mx.array:
    """The logarithm of mlx-lm's `compute_g`, float32, (B, T, H)."""
    step: mx.array = nn.softplus(a + dt_bias)
    return -mx.exp(a_log.astype(mx.float32)) * step.astype(mx.float32)


def chunked_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    state: mx.array,
    size: int = CHUNK,
) -> tuple[mx.array, mx.array]:
    """Computes mlx-lm's `gated_delta_ops` in float32 and with another order of sums.

    q, k: (B, T, k heads, Dk); v: (B, T, H, Dv); log_g, beta: (B, T, H); state: (B, H, Dv, Dk).
    Returns y (B, T, H, Dv) in the dtype of q, and the state after the last row in float32.
    """
    dtype, (rows, heads) = q.dtype, v.shape[1:3]
    repeats = heads // k.shape[2]
    q, k = (mx.repeat(x, repeats, 2) if repeats > 1 else x for x in (q, k))
    q, k, v, log_g, beta = (_in_chunks(x, size) for x in (q, k, v, log_g, beta))
    log_g, beta = log_g[..., 0], beta[..., 0]

    log_decays = mx.cumsum(log_g, axis=-1)  # from the chunk's start to after each row
    differences = log_decays[..., :, None] - log_decays[..., None, :]
    below = mx.tril(mx.ones((size, size), dtype=mx.bool_))
    decay = mx.exp(mx.where(below, differences, -mx.inf))
    from_start, to_end = (
        mx.exp(log_decays)[..., None],
        mx.exp(log_decays[..., -1:] - log_decays)[..., None],
    )

    k_transposed = k.swapaxes(-1, -2)
    coupling = mx.tril(beta[..., None] * decay * (k @ k_transposed), -1)
    inverse = _inverse(coupling)
    values = inverse @ (beta[..., None] * v)
    keys = inverse @ (beta[..., None] * from_start * k)
    scores = decay * (q @ k_transposed)
    queries, update_keys = from_start * q, to_end * k
    chunk_decay = mx.exp(log_decays[..., -1])[..., None, None]

    ys: list[mx.array] = []
    state = state.astype(mx.float32)
    for i in range(q.shape[2]):
        previous = state.swapaxes(-1, -2)
        update = values[:, :, i] - keys[:, :, i] @ previous
        ys.append(queries[:, :, i] @ previous + scores[:, :, i] @ update)
        state = chunk_decay[:, :, i] * state + update.swapaxes(-1, -2) @ update_keys[:, :, i]
    y = mx.concatenate(ys, axis=2)[:, :, :rows].swapaxes(1, 2)
    return y.astype(dtype), state


def _in_chunks(x: mx.array, size: int) -> mx.array:
    """(B, T, H, D) or (B, T, H) to (B, H, chunks, size, D), D = 1 for the latter, in float32.

    The last chunk is padded with zero rows, which neither decay nor write anything.
    """
    x = x.astype(mx.float32).reshape(*x.shape[:3], -1)
    batch, rows, heads, width = x.shape
    x = mx.pad(x, [(0, 0), (0, -rows % size), (0, 0), (0, 0)])
    return x.reshape(batch, -1, size, heads, width).transpose(0, 3, 1, 2, 4)


def _inverse(lower: mx.array) -> mx.array:
    """(1 + lower)^-1 for strictly lower triangular matrices (.., n, n), solved row by row."""
    size = lower.shape[-1]
    one = mx.broadcast_to(mx.eye(size), lower.shape)
    solution = one[..., :1, :]
    for i in range(1, size):
        row = one[..., i : i + 1, :] - lower[..., i : i + 1, :i] @ solution
        solution = mx.concatenate([solution, row], axis=-2)
    return solution
