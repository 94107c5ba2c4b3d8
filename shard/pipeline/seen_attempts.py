"""The last attempt of each request on a stage, so that frames that arrive late are refused."""

from collections import OrderedDict
from collections.abc import Container
from typing import Final

from ...placement.errors import InvalidFrame, PeerLost

REMEMBERED_REQUESTS: Final = 4096
"""Ended requests whose last attempt is remembered."""


class SeenAttempts:
    """The last attempt of each request on one stage."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._latest: OrderedDict[str, int] = OrderedDict()
        self._expired: OrderedDict[str, int] = OrderedDict()

    def latest(self, request: str) -> int:
        """The last attempt, or 0 if there was none."""
        return self._latest.get(request, 0)

    def add(self, request: str, attempt: int, live: Container[str]) -> None:
        """Records an attempt: earlier ones are refused from now on. `live`: requests whose attempts
        must be remembered."""
        self._latest[request] = max(attempt, self._latest.pop(request, 0))
        while len(self._latest) > REMEMBERED_REQUESTS:
            oldest = next(iter(self._latest))
            if oldest in live:
                self._latest.move_to_end(oldest)
            else:
                del self._latest[oldest]

    def expire(self, request: str, attempt: int) -> None:
        """Records that an attempt's lease expired, which later refusals of it report."""
        self._expired[request] = attempt
        while len(self._expired) > REMEMBERED_REQUESTS:
            _ = self._expired.popitem(last=False)

    def check(self, request: str, attempt: int, *, live: bool) -> None:
        """Raises InvalidFrame for an attempt that has ended, and PeerLost for one whose lease
        expired. `live`: whether the stage has a state of the request."""
        latest = self.latest(request)
        if attempt == latest and not live and self._expired.get(request) == attempt:
            raise PeerLost(
                f"stage {self._stage} freed request {request}: nothing of it came for "
                "the length of its lease"
            )
        if attempt < latest or (attempt == latest and not live):
            raise InvalidFrame(
                f"attempt {attempt} of request {request} is over: attempt {latest} was seen",
                param="attempt",
            )
