"""The drafts of a round: how many, and whose."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from ...mtp.batch_verdict import RowDrafts
from ...mtp.drafting.round_policy import Offer, RoundPolicy
from .request import Request

Copy = tuple[Sequence[int], Sequence[float]]
NONE: Final = ()
NO_COPY: Final[Copy] = (NONE, NONE)
_UNUSED: Final = 0
"""The id at places of a round for which a request has no draft."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The drafts of a round."""

    width: int
    """Drafts for which each request has a row."""
    head: int
    """Drafts of the head for requests that do not copy, or 0 if it does not run."""
    copies: Sequence[Sequence[int]]
    """Copied drafts by request, empty for one that does not copy."""

    @property
    def is_copied(self) -> list[bool]:
        """Whether a request copies its drafts, by request."""
        return [bool(copy) for copy in self.copies]

    def head_limits(self, requests: Sequence[Request]) -> list[int]:
        """Drafts of the head that each request uses."""
        return [
            0 if copy else min(self.head, request.draft_limit)
            for request, copy in zip(requests, self.copies, strict=True)
        ]

    def limits(self, requests: Sequence[Request]) -> list[int]:
        """Drafts that each request uses, copied or the head's."""
        own = self.head_limits(requests)
        return [len(copy) or limit for limit, copy in zip(own, self.copies, strict=True)]

    def drafts(self, requests: Sequence[Request], of_head: RowDrafts | None) -> RowDrafts | None:
        """The drafts of all requests. `of_head`: the head's, where it runs."""
        if not any(self.copies):
            return of_head
        rows = [[*copy, *[_UNUSED] * (self.width - len(copy))] for copy in self.copies]
        tokens, finite = mx.array(rows, dtype=mx.int32), mx.ones((len(rows), self.width), mx.bool_)
        drawn = [
            request.sampler.copy(copy) if copy else None
            for request, copy in zip(requests, self.copies, strict=True)
        ]
        if of_head is None:
            return RowDrafts(tokens, finite, tuple(drawn))
        is_copied = mx.array(self.is_copied)[:, None]
        missing = [(0, 0), (0, self.width - self.head)]
        tokens = mx.where(is_copied, tokens, mx.pad(of_head.tokens, missing))
        finite = mx.where(is_copied, finite, mx.pad(of_head.finite, missing))
        parts = zip(drawn, of_head.drawn, strict=True)
        return RowDrafts(tokens, finite, tuple(a if a is not None else b for a, b in parts))


def plan_round(
    requests: Sequence[Request],
    policy: RoundPolicy,
    *,
    drafts: bool,
    unread: int,
    running: int,
    in_flight: bool,
) -> RoundPlan | None:
    """The next round of requests that share it, or None if one in flight must be read first, since
    a copy begins after tokens that are known.

    `drafts`: whether the head drafts for any. `unread`, `running`: see `RoundPolicy.choose`.
    """
    copies: list[Copy] = [NO_COPY] * len(requests)
    if policy.lengths if len(requests) == 1 else policy.shared_lengths:
        lookups = [r.drafts.lookup for r in requests if r.drafts.lookup is not None]
        _ = any(lookup.read() for lookup in lookups)  # a part of one prompt between two rounds
        copies = [_copy(request, in_flight=in_flight) for request in requests]
    most = policy.most_drafts(len(requests)) if drafts else 0
    offers = [
        Offer(request.drafts.demand, min(request.draft_limit, most), reached)
        for request, (_, reached) in zip(requests, copies, strict=True)
    ]
    first = requests[0]
    own = first.drafts.demand.policy if len(requests) == 1 else None
    choice = (own or policy).choose(offers, first.position, unread=unread, running=running)
    for request in requests:
        request.drafts.choice = choice
        demand = request.drafts.demand
        demand.sharers = max(demand.sharers, len(requests))
    if in_flight and any(choice.is_copied):
        return None
    parts = zip(copies, choice.is_copied, strict=True)
    return RoundPlan(
        choice.width,
        choice.head,
        [tokens[: choice.width] if is_copied else NONE for (tokens, _), is_copied in parts],
    )


def _copy(request: Request, *, in_flight: bool) -> Copy:
    """The longest copy of a request, and the chances that its first 1, 2, … tokens stand.

    While a round is in flight its grammar's state is not known, which is asked before a copy.
    """
    if request.drafts.lookup is None:
        return NO_COPY
    reached = request.drafts.lookup.reached(request.copy_limit)
    if not reached:
        return NO_COPY
    tokens = request.drafts.lookup.tokens(len(reached))
    count = len(tokens) if in_flight else request.sampler.allowed_count(tokens)
    return tokens[:count], reached[:count]
