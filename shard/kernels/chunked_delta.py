"""The gated delta rule over a prompt, some rows at a time, in plain MLX operations.

mlx-lm has a kernel for it on Metal and a loop over rows elsewhere. Here the rows of a chunk are
solved for together (Yang et al., Gated Delta Networks, arXiv 2412.06464, section 3.3), and only
chunks follow each other.
"""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx
from mlx import nn

from ...mtp.rollback import TapedGatedDelta

CHUNK: Final = 16
"""Rows. More make the triangle longer that is solved row by row, fewer make more chunks."""


def take_chunks(models: Sequence[nn.Module]) -> int:
    """Prompts of recurrent layers are computed in chunks from here on, where MLX has no kernel for
    them; the number of those layers."""
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
    """As mlx-lm's `gated_delta_update` without a mask."""
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
    """As mlx-lm's `gated_delta_ops`, but for the order of sums; computed in float32.

    q, k: (B, T, k heads, Dk); v: (B, T, H, Dv); log_g, beta: (B, T, H); state: (B, H, Dv, Dk).
    Returns y (B, T, H, Dv) in the dtype of q, and the state behind the last row in float32.
    """
    kind, (rows, heads) = q.dtype, v.shape[1:3]
    repeats = heads // k.shape[2]
    q, k = (mx.repeat(x, repeats, 2) if repeats > 1 else x for x in (q, k))
    q, k, v, log_g, beta = (_in_chunks(x, size) for x in (q, k, v, log_g, beta))
    log_g, beta = log_g[..., 0], beta[..., 0]

    since = mx.cumsum(log_g, axis=-1)  # decay from the chunk's begin to behind each row
    apart = since[..., :, None] - since[..., None, :]
    below = mx.tril(mx.ones((size, size), dtype=mx.bool_))
    decay = mx.exp(mx.where(below, apart, -mx.inf))
    from_start, to_end = mx.exp(since)[..., None], mx.exp(since[..., -1:] - since)[..., None]

    turned = k.swapaxes(-1, -2)
    mixed = mx.tril(beta[..., None] * decay * (k @ turned), -1)
    solved = _inverse(mixed)
    values = solved @ (beta[..., None] * v)
    keys = solved @ (beta[..., None] * from_start * k)
    seen = decay * (q @ turned)
    queries, written = from_start * q, to_end * k
    kept = mx.exp(since[..., -1])[..., None, None]

    ys: list[mx.array] = []
    state = state.astype(mx.float32)
    for i in range(q.shape[2]):
        held = state.swapaxes(-1, -2)
        new = values[:, :, i] - keys[:, :, i] @ held
        ys.append(queries[:, :, i] @ held + seen[:, :, i] @ new)
        state = kept[:, :, i] * state + new.swapaxes(-1, -2) @ written[:, :, i]
    y = mx.concatenate(ys, axis=2)[:, :, :rows].swapaxes(1, 2)
    return y.astype(kind), state


def _in_chunks(x: mx.array, size: int) -> mx.array:
    """(B, T, H, D) or (B, T, H) to (B, H, chunks, size, D), D = 1 for the latter, in float32.

    Rows that fill the last chunk are zero: they decay by nothing and write nothing.
    """
    x = x.astype(mx.float32).reshape(*x.shape[:3], -1)
    batch, rows, heads, width = x.shape
    x = mx.pad(x, [(0, 0), (0, -rows % size), (0, 0), (0, 0)])
    return x.reshape(batch, -1, size, heads, width).transpose(0, 3, 1, 2, 4)


def _inverse(lower: mx.array) -> mx.array:
    """(1 + lower)^-1 for strictly lower triangles (.., n, n), row by row from the first."""
    size = lower.shape[-1]
    one = mx.broadcast_to(mx.eye(size), lower.shape)
    found = one[..., :1, :]
    for i in range(1, size):
        row = one[..., i : i + 1, :] - lower[..., i : i + 1, :i] @ found
        found = mx.concatenate([found, row], axis=-2)
    return found
