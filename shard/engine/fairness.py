"""Whose turn it is: prompts or answers, and which of them has waited longest.

A piece of prefill is a part of one forward over prompts. After each piece every decoding request
has a round, and all of them together as much time as the piece took. So during prefill decoding
keeps at least half of its speed, however long a forward takes and however many prompts wait.
"""

from collections.abc import Iterable, Sequence

from .request import Request


class Fairness:
    """Counts turns, and the time that decoding is owed. It reads no clock."""

    def __init__(self) -> None:
        self._turn = 0
        """Grows with each piece of work; see `Request.turn`."""
        self._prefill_turn = 0
        """The turn of the last piece of prefill: a decoding request is due if its own is older."""
        self._owed_s = 0.0
        """Seconds of prefill that decoding has not had since."""

    def take_turn(self, requests: Iterable[Request], *, for_prefill: bool = False) -> None:
        """Counts a piece of work for `requests`."""
        self._turn += 1
        if for_prefill:
            self._prefill_turn = self._turn
        for request in requests:
            request.turn = self._turn

    def is_due(self, idle: Sequence[Request]) -> bool:
        """Whether a round is next. `idle`: decoding requests that have none under way."""
        return self._owed_s > 0 or any(request.turn < self._prefill_turn for request in idle)

    def charge(self, seconds: float, *, for_prefill: bool) -> None:
        """Accounts for time of the compute thread, spent on prefill or on decoding."""
        owed_s = self._owed_s + (seconds if for_prefill else -seconds)
        self._owed_s = max(0.0, owed_s)

    def forgive(self) -> None:
        """Drops what decoding is owed, since no request waits for this thread."""
        self._owed_s = 0.0
