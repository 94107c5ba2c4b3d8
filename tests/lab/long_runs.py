"""Long answers under observation: the head's cache, memory, acceptance over time."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import itertools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from engines import request

from exo_node.mtp.answer import CLEAR_EVERY
from exo_node.mtp.drafters import NativeDrafter
from exo_node.mtp.seams import Drafts, as_ids, as_row
from exo_node.shard.engine.engine import TextEngine
from exo_node.shard.engine.events import Delta


@contextmanager
def watched_heads() -> Generator[list[tuple[int, int]]]:
    """(rows that a head's cache holds without its speculative ones, committed tokens - 1), one
    for each round, when its first draft has been made."""
    seen: list[tuple[int, int]] = []
    draft = NativeDrafter.draft

    def noting(self: NativeDrafter, k: int, position: int) -> Drafts:
        drafts = draft(self, k, position)
        seen.append((self.cache.offset - (k - 1), position - 1))
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeDrafter, "draft", noting)
        yield seen


@contextmanager
def steered_heads(ids: Sequence[int], prompt: int) -> Generator[None]:
    """Heads run as ever, but of every three rounds one has all of its drafts right and one only
    the first: a random head is never right, and a row is easily lost where all drafts stand.

    `ids` is the answer, after `prompt` tokens.
    """
    rounds = itertools.count()
    draft = NativeDrafter.draft

    def steered(self: NativeDrafter, k: int, position: int) -> Drafts:
        own = as_ids(draft(self, k, position).tokens)
        right = (k, 1, 0)[next(rounds) % 3]
        start = position - prompt
        return Drafts(as_row([*ids[start : start + right], *own[right:]]), None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeDrafter, "draft", steered)
        yield


@contextmanager
def holed_heads() -> Generator[None]:
    """exo#2110's fault: the last row of a block that was accepted as a whole is lost."""
    observe = NativeDrafter.observe

    def holed(self: NativeDrafter, hidden: mx.array | None, tokens: mx.array) -> None:
        assert hidden is not None
        if tokens.shape[0] == self.k + 1:
            hidden, tokens = hidden[:, :-1], tokens[:-1]
        observe(self, hidden, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeDrafter, "observe", holed)
        yield


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes after some tokens: what MLX holds besides the caches, and what it keeps for reuse."""

    tokens: int
    beside_caches: int
    kept: int


def memory_over(
    engine: TextEngine, prompt: list[int], k: int, tokens: int, every: int
) -> list[Memory]:
    """Memory every so many tokens of one answer whose end token is ignored."""
    samples: list[Memory] = []
    emitted = 0
    for event in engine.generate(request(prompt, k, tokens, ignore_end=True)):
        if not isinstance(event, Delta):
            continue
        emitted += len(event.round.tokens)
        if emitted // every > len(samples):
            beside = mx.get_active_memory() - engine.cache_bytes()
            samples.append(Memory(emitted, beside, mx.get_cache_memory()))
    return samples


def growth(samples: list[Memory]) -> int:
    """Bytes that the most memory beside the caches grew by from the first half to the second."""
    half = len(samples) // 2
    before, after = samples[:half], samples[half:]
    return max(s.beside_caches for s in after) - max(s.beside_caches for s in before)


def kept_after_clearing(samples: list[Memory], clear_every: int = CLEAR_EVERY) -> int:
    """The most bytes kept for reuse at the best moment of any stretch in which they are freed.

    Between two of these moments they pile up, the more the longer the caches are.
    """
    stretches: dict[int, int] = {}
    for s in samples:
        stretch = s.tokens // (clear_every + clear_every // 4)
        stretches[stretch] = min(s.kept, stretches.get(stretch, s.kept))
    *whole, _ = stretches.values()  # the last may have ended before its moment
    return max(whole)


def accepted_by_quarter(rounds: Any) -> list[tuple[int, int]]:
    """(accepted, drafted) in each quarter of an answer's rounds."""
    drafted = [r for r in rounds if r.drafted]
    size = len(drafted) // 4
    quarters = [drafted[i * size : (i + 1) * size] for i in range(4)]
    return [(sum(r.accepted for r in q), sum(r.drafted for r in q)) for q in quarters]
