"""Long answers under observation: the rows of the head, and memory."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from engines import request

from exo_node.mtp.batch_verdict import RowDrafts
from exo_node.shard.engine.answers.events import Delta
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.drafter import Drafter
from exo_node.shard.engine.engine import CLEAR_EVERY


@contextmanager
def watched_heads() -> Generator[list[tuple[int, int]]]:
    """One pair for each drafting round of one request, after its drafts: committed rows in the
    head's cache, rows of the target."""
    rows: list[tuple[int, int]] = []
    draft = Drafter.draft

    def noting(self: Drafter, k: int, *rest: Any) -> RowDrafts:
        drafts = draft(self, k, *rest)
        _limits, _samplers, (position,), *_ = rest
        rows.append((self._set.caches[0].offset, position - 1))  # pyright: ignore[reportPrivateUsage]
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "draft", noting)
        yield rows


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes after `tokens` tokens: active beside the caches, and kept by MLX for reuse (`kept`)."""

    tokens: int
    rounds: int
    beside_caches: int
    kept: int


def memory_over(
    engine: TextEngine, prompt: list[int], k: int, tokens: int, every: int
) -> list[Memory]:
    """Samples memory every `every` tokens of one answer whose end token is ignored."""
    samples: list[Memory] = []
    emitted = rounds = 0
    for event in engine.generate(request(prompt, k, tokens, ignore_eos=True)):
        if not isinstance(event, Delta):
            continue
        rounds, emitted = rounds + 1, emitted + len(event.round.tokens)
        if emitted // every > len(samples):
            beside = mx.get_active_memory() - engine.cache_bytes()
            samples.append(Memory(emitted, rounds, beside, mx.get_cache_memory()))
    return samples


def growth(samples: list[Memory]) -> int:
    """Bytes between the peaks beside the caches of the first and second half of the samples."""
    half = len(samples) // 2
    before, after = samples[:half], samples[half:]
    return max(s.beside_caches for s in after) - max(s.beside_caches for s in before)


def kept_after_clearing(samples: list[Memory], clear_every: int = CLEAR_EVERY) -> int:
    """The largest minimum of bytes kept for reuse over stretches between two releases.

    Within a stretch they pile up, faster for longer caches.
    """
    stretches: dict[int, int] = {}
    for s in samples:
        stretch = s.rounds // (clear_every + clear_every // 4)
        stretches[stretch] = min(s.kept, stretches.get(stretch, s.kept))
    *whole, _ = stretches.values()  # the last may have ended before its moment
    return max(whole)
