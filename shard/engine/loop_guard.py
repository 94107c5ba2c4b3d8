"""Ends an answer that repeats itself: its last tokens have an exact period of ids."""

from typing import Final

REPEATS: Final = 6
TOKENS: Final = 72
"""The least repeats, and the least tokens, that end an answer."""
MAX_PERIOD: Final = 512
"""The longest sequence whose repeats are found, so that a token costs a bounded time."""
_EVERY: Final = 32
_SEEN: Final = 28
"""A period that ends an answer has matched for 60 tokens by then (six times 12; any other period
needs more), so one that has matched for 28 at a search every 32 tokens is found before."""
_KEPT: Final = MAX_PERIOD + _SEEN + _EVERY


class LoopGuard:
    """Watches one answer's tokens. Whether it ends depends on the ids alone, not on how many of
    them come at a time."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        """The last ids, `_KEPT` of them at least."""
        self._pushed = 0
        self._lengths: dict[int, int] = {}
        """Periods that have matched for `_SEEN` tokens, and the number of last tokens that have
        them."""
        self.reason = ""
        """Why the answer ended, for a person; empty while it has not."""

    def push(self, token: int) -> bool:
        """Adds the next id. Returns whether the answer ends with it."""
        self._ids.append(token)
        self._pushed += 1
        for period, length in list(self._lengths.items()):
            if self._ids[-1 - period] != token:
                del self._lengths[period]
                continue
            self._lengths[period] = length = length + 1
            if length >= max(TOKENS, REPEATS * period):
                self.reason = (
                    f"the last {length} tokens are a loop of {period}; to let an answer go on, "
                    'send "loop_guard": false, or set EXO_LOOP_GUARD=0'
                )
                return True
        if self._pushed % _EVERY == 0:
            self._search()
        return False

    def _search(self) -> None:
        """Adds the periods that have matched for `_SEEN` tokens."""
        if len(self._ids) > 2 * _KEPT:
            del self._ids[:-_KEPT]
        ids = self._ids
        tail = ids[-_SEEN:]
        for period in range(1, min(MAX_PERIOD, len(ids) - _SEEN) + 1):
            is_new = ids[-1 - period] == ids[-1] and period not in self._lengths
            if is_new and ids[-_SEEN - period : -period] == tail:
                self._lengths[period] = self._length(period)

    def _length(self, period: int) -> int:
        """The number of last tokens that have a period, at most as many as are kept."""
        ids, length = self._ids, period + _SEEN
        while length < len(ids) and ids[-1 - length] == ids[-1 - length + period]:
            length += 1
        return length
