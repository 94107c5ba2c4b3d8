"""The verdict over a batch's verify: the drafts that each request accepts, in one read."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import mlx.core as mx

from .finite import tokens_of
from .logprobs import Scores, score
from .sampler import Sampler
from .sampling import greedy_choice
from .seams import Drafts, as_row


class VerifiedRequest(Protocol):
    """The part of a request that the verdict needs."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def top_logprobs(self) -> int | None:
        """Alternatives whose log-probabilities are returned with each token's, if any."""
        ...


class RowDrafts(NamedTuple):
    """K drafts of each request; lazy."""

    tokens: mx.array  # (B, K) int32
    finite: mx.array  # (B, K) whether the logits of each were
    drawn: tuple[Drafts | None, ...]
    """Drafts of each request that its own sampler drew, with their distributions; None for greedy
    drafts, for which `tokens` suffice."""


class BatchVerdict(NamedTuple):
    """The verdict over B requests with K drafts each; lazy."""

    table: mx.array  # (B, K + 3) accepted, whether its drafts' logits were finite, K + 1 tokens
    scores: list[Scores | None]

    @property
    def tokens(self) -> mx.array:
        """(B, K + 1): `VerifyResult.tokens` of each request."""
        return self.table[:, 2:]

    def read(self) -> list[tuple[int, list[int], bool]]:
        """The round's one synchronisation: (accepted, ids that may be emitted, finite) of each."""
        rows = cast("list[list[int]]", self.table.tolist())
        return [(a, tokens[: a + 1], bool(sound)) for a, sound, *tokens in rows]


def judge(
    requests: Sequence[VerifiedRequest],
    logits: mx.array,
    drafts: RowDrafts | None,
    limits: Sequence[int],
    starts: Sequence[int],
) -> BatchVerdict:
    """Judges logits (B, K + 1, V). Request b drafted `limits[b]` of K tokens, after `starts[b]`
    rows.

    A request's verdict depends on its own logits and drafts alone.
    """
    are_argmax = [request.sampler.is_argmax for request in requests]
    greedy = _greedy(logits, drafts, limits) if any(are_argmax) else None
    plain = all(are_argmax) and all(request.top_logprobs is None for request in requests)
    if plain and greedy is not None:
        return BatchVerdict(greedy, [None] * len(requests))
    rows, scores = list[mx.array](), list[Scores | None]()
    for index, request in enumerate(requests):
        k = limits[index]
        own = _drafts_of(drafts, index, k)
        mine = logits[index, : k + 1]
        if greedy is not None and are_argmax[index]:
            rows.append(greedy[index])
        else:
            rows.append(_sampled(request, mine, own, starts[index] + 1, logits.shape[1]))
        scores.append(_scores(request, mine, own, rows[-1][2 : k + 3]))
    return BatchVerdict(mx.stack(rows), scores)


def _scores(
    request: VerifiedRequest, logits: mx.array, drafts: Drafts | None, tokens: mx.array
) -> Scores | None:
    """Scores of `tokens` (n,) in the target's logits (n, V), before they are committed."""
    if request.top_logprobs is None:
        return None
    chosen = request.sampler.target_logprobs(logits, drafts)
    return score(chosen, tokens, request.top_logprobs)


def _greedy(logits: mx.array, drafts: RowDrafts | None, limits: Sequence[int]) -> mx.array:
    """The verdict's table for greedy decoding."""
    size, rows, vocabulary = logits.shape
    ids, finite = greedy_choice(logits.reshape(size * rows, vocabulary))
    tokens = tokens_of(finite, ids).reshape(size, rows)
    if drafts is None:
        none = mx.zeros((size, 1), mx.int32)
        return mx.concatenate([none, none + 1, tokens], axis=1)
    k = rows - 1
    is_drafted = mx.arange(k) < as_row(limits)[:, None]
    matches = (tokens[:, :k] == drafts.tokens) & is_drafted
    accepted = mx.cumprod(matches.astype(mx.int32), axis=1).sum(axis=1, keepdims=True)
    sound = mx.all(drafts.finite | ~is_drafted, axis=1, keepdims=True)
    parts = [accepted.astype(mx.int32), sound.astype(mx.int32), tokens]
    return mx.concatenate(parts, axis=1)


def _sampled(
    request: VerifiedRequest, logits: mx.array, drafts: Drafts | None, position: int, width: int
) -> mx.array:
    """One request's row of the table, by its own sampler; tokens are padded to `width`."""
    verdict = request.sampler.judge(logits, drafts, position)
    sound = mx.array([1], dtype=mx.int32)
    if drafts is not None and drafts.finite is not None:
        sound = drafts.finite.all()[None].astype(mx.int32)
    tokens = mx.pad(verdict.tokens, [(0, width - verdict.tokens.shape[0])])
    return mx.concatenate([verdict.accepted[None].astype(mx.int32), sound, tokens])


def _drafts_of(drafts: RowDrafts | None, index: int, k: int) -> Drafts | None:
    if drafts is None or k == 0:
        return None
    drawn = drafts.drawn[index]
    if drawn is not None:
        return drawn
    return Drafts(drafts.tokens[index, :k], None, None, drafts.finite[index, :k])
