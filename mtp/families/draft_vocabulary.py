"""Drafting from the first rows of lm_head only: a draft reads a part of the matrix, not all of it.

Tokenizers trained by merging pairs number frequent tokens first, so a prefix of the vocabulary
holds nearly all of a text (llama.cpp's pull request 20700 drafts from 32k of Qwen's 248k ids). Rows
are quantised each by itself, so the logits that remain are the same numbers; the target verifies
against its whole vocabulary, so nothing that is emitted changes. An id beyond the prefix is never
drafted.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

Logits = Callable[[mx.array], mx.array]


def first_rows(matrix: nn.Module, rows: int) -> Logits:
    """(1, n, H) -> (1, n, rows) of an lm_head or of embeddings that serve as one.

    `rows` below the vocabulary's size. The slices are views: they take no memory of their own.
    """
    m: Any = matrix
    weight = m.weight[:rows]
    if isinstance(matrix, nn.QuantizedLinear | nn.QuantizedEmbedding):
        scales = m.scales[:rows]
        biases = None if m.get("biases") is None else m.biases[:rows]

        def quantised(x: mx.array) -> mx.array:
            return mx.quantized_matmul(
                x,
                weight,
                scales=scales,
                biases=biases,
                transpose=True,
                group_size=m.group_size,
                bits=m.bits,
                mode=m.mode,
            )

        return quantised
    bias = m.get("bias")
    if bias is None:
        return lambda x: x @ weight.T
    return lambda x: x @ weight.T + bias[:rows]
