"""Measures, on the loaded weights, whether a verify of several rows computes what single steps do.

Backends choose kernels by the number of rows. Where the numbers are the same bit for bit, drafts
cannot change a greedy answer; elsewhere they can where two tokens are about equally likely.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import mlx.core as mx

from .rollback import rollback
from .seams import Block, Want

Identity = Literal["bitwise", "near_tie"]
PROMPT_ROWS = 24


class Forward(Protocol):
    """`Target.forward` of the engine."""

    def __call__(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block: ...


def greedy_identity(
    forward: Forward, make_caches: Callable[[], list[Any]], vocabulary: int, k: int
) -> Identity:
    """Compares one block of K + 1 rows, and the row after a rollback, with single steps.

    The ids are arbitrary: kernels do not depend on them, and no text is wanted.
    """
    ids = [(7 * i + 3) % vocabulary for i in range(PROMPT_ROWS + k + 2)]
    prompt = mx.array(ids[:PROMPT_ROWS], dtype=mx.int32)
    rest = [mx.array([token], dtype=mx.int32) for token in ids[PROMPT_ROWS:]]
    single, block = make_caches(), make_caches()
    for caches in (single, block):
        mx.eval(forward(prompt, caches, want="last").logits)
    wanted = [forward(token, single, want="all").logits for token in rest[: k + 1]]
    rows = forward(mx.concatenate(rest[: k + 1]), block, want="all").logits
    mx.eval(wanted, rows)
    rollback(block, k)
    again = forward(rest[1], block, want="all").logits
    same = mx.array_equal(mx.concatenate(wanted), rows) & mx.array_equal(wanted[1], again)
    return "bitwise" if same.item() else "near_tie"
