"""Ways of choosing tokens, each run once after a model's load.

MLX compiles a CUDA kernel at its first use. The first sampled answer on a new machine waited 15 s
for eight such kernels, the first one with a penalty 5 s more (one H200), and so did all other
answers: one thread computes for all.
"""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from ...mtp.pieces import Pieces
from ...mtp.sampler import Sampler
from ...mtp.seams import Drafts, joined_drafts
from ...mtp.types import Sampling
from .cuda import available

WAYS: Final = (
    Sampling(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
    Sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05),
    Sampling(temperature=0.7, top_p=0.9, min_p=0.05),
    Sampling(temperature=0.7),
    Sampling(temperature=0.7, seed=1),
)
"""Sampling that clients and cards use; together they run every rule of acceptance."""


def choose_first(
    vocabulary: int, k: int, dtype: mx.Dtype, ways: Sequence[Sampling] = WAYS
) -> Pieces[None]:
    """Draws a token, `k` drafts and their verdict from zero logits, in each of `ways`.

    Has no pieces if MLX does not run on CUDA.
    """
    if not available():
        return
    logits = mx.zeros((k + 1, vocabulary), dtype=dtype)
    for sampling in ways:
        yield
        sampler = Sampler(sampling, entropy=0, prompt=(0, 0))
        token = sampler.token(logits[:1], 0)
        sampler.commit(token)
        drafts = list[Drafts]()
        for index in range(k):
            drafts.append(sampler.draft(logits[:1], 1 + index, drafts))
        verdict = sampler.judge(logits, joined_drafts(drafts) if drafts else None, 1)
        mx.eval(token, verdict.accepted, verdict.tokens)
