"""The groups of decoding requests that share forwards."""

from collections.abc import Sequence
from typing import Final

from ...mtp.caches.batch_slots import padding_of
from ..pipeline.frames import MAX_TOGETHER
from .request import Request

MAX_PADDING: Final = 2.0
"""Each request of a batch has room for the rows of the longest: the batch has at most this multiple
of the rows that its requests need."""


class Grouping:
    """Divides requests into groups, which stay as they are where that is as good."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._groups = 0
        """Number of the last group."""

    def of(self, decoders: Sequence[Request]) -> list[list[Request]]:
        """The groups of requests that share forwards.

        A new request joins the largest group that needs little padding, or in a pipeline the
        smallest. If there are more groups than stages, groups that fit are merged.
        """
        # A round that is repeated belongs to the state that it began with.
        single = [[r] for r in decoders if r.batching_reason or r.checks_target]
        sharing = [r for r in decoders if not (r.batching_reason or r.checks_target)]
        most = len(sharing)
        if self._stages > 1:
            most = min(MAX_TOGETHER, -(-most // self._stages))
        merged = list[list[Request]]()
        for group in self._numbered(sharing, most):
            hosts = sorted(merged, key=len) if self._stages > 1 else merged
            hosts = hosts if len(merged) >= self._stages else []
            fits = (each for each in hosts if len(each) + len(group) <= most and _fit(each, group))
            if (host := next(fits, None)) is None:
                merged.append(group)
            else:
                host.extend(group)
        for group in merged:
            number = min(request.group for request in group if request.group is not None)
            for request in group:
                request.group = number
        return [*single, *merged]

    def _numbered(self, sharing: Sequence[Request], most: int) -> list[list[Request]]:
        """The present groups, the largest first, of at most `most` requests each.

        A request without a group, or beyond that size, becomes a group of its own.
        """
        groups: dict[int, list[Request]] = {}
        others = list[Request]()
        for request in sharing:
            if request.group is None or len(groups.get(request.group, ())) >= most:
                others.append(request)
            else:
                groups.setdefault(request.group, []).append(request)
        for request in others:
            self._groups += 1
            request.group = self._groups
            groups[self._groups] = [request]
        return [group for _, group in sorted(groups.items(), key=lambda it: (-len(it[1]), it[0]))]


def _fit(some: Sequence[Request], others: Sequence[Request]) -> bool:
    return padding_of([request.position for request in (*some, *others)]) <= MAX_PADDING
