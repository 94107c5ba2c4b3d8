"""Which attempt of each request a stage saw last, so that frames that come late are refused."""

from collections import OrderedDict
from collections.abc import Container
from typing import Final

from ...placement.errors import InvalidFrame, PeerLost

REMEMBERED_REQUESTS: Final = 4096
"""Ended requests whose attempt is kept."""


class SeenAttempts:
    """Those of one stage."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._latest: OrderedDict[str, int] = OrderedDict()
        self._expired: OrderedDict[str, int] = OrderedDict()

    def latest(self, request: str) -> int:
        """0 where there was none."""
        return self._latest.get(request, 0)

    def add(self, request: str, attempt: int, live: Container[str]) -> None:
        """Earlier ones are refused from now on. Those of `live` requests are not forgotten."""
        self._latest[request] = max(attempt, self._latest.pop(request, 0))
        while len(self._latest) > REMEMBERED_REQUESTS:
            oldest = next(iter(self._latest))
            if oldest in live:
                self._latest.move_to_end(oldest)
            else:
                del self._latest[oldest]

    def expire(self, request: str, attempt: int) -> None:
        """Its state was freed for want of frames, which its refusals say from now on."""
        self._expired[request] = attempt
        while len(self._expired) > REMEMBERED_REQUESTS:
            _ = self._expired.popitem(last=False)

    def check(self, request: str, attempt: int, *, live: bool) -> None:
        """`live`: whether there is state of the request. Raises InvalidFrame for an attempt that is
        over, PeerLost for one whose state was freed for want of frames."""
        known = self.latest(request)
        if attempt == known and not live and self._expired.get(request) == attempt:
            raise PeerLost(
                f"stage {self._stage} freed request {request}: nothing of it came for "
                "the length of its lease"
            )
        if attempt < known or (attempt == known and not live):
            raise InvalidFrame(
                f"attempt {attempt} of request {request} is over: attempt {known} was seen",
                param="attempt",
            )
