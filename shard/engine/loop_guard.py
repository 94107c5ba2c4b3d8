"""Ends an answer that repeats itself: its last tokens have an exact period of ids."""

from collections.abc import Sequence
from typing import Final, NamedTuple


class LoopLimits(NamedTuple):
    """The least tokens, and the least repeats, that end an answer."""

    tokens: int
    repeats: int

    def of(self, period: int) -> int:
        """The least tokens of a loop whose period is `period` tokens."""
        return max(self.tokens, self.repeats * period)


EARLY: Final = LoopLimits(1024, 24)
"""Tables, boards and lists of zeros are shorter, as people and programs want them."""
LATE: Final = LoopLimits(4096, 64)
"""Within the arguments of a call, which may be a file, and without a client that waits."""
MAX_PERIOD: Final = 512
"""The longest sequence whose repeats are found, so that a token costs a bounded time."""
_EVERY: Final = 32
_SEEN: Final = 28
"""Far fewer than the tokens of any loop that ends an answer: a period that has matched for as many
at a search every 32 tokens is found before."""
_KEPT: Final = MAX_PERIOD + _SEEN + _EVERY


class LoopGuard:
    """Watches one answer's tokens. Whether it ends depends on the ids alone, not on how many of
    them come at a time."""

    def __init__(
        self,
        limits: LoopLimits = EARLY,
        prompt: Sequence[int] = (),
        call: Sequence[int] = (),
    ) -> None:
        """`prompt`: an answer may repeat as much as it does. `call`: the ids that begin a call,
        after which the limits are `LATE`."""
        self._limits = limits
        self._prompt = prompt
        self._call = list(call)
        self._ids: list[int] = []
        """The last ids, `_KEPT` of them at least."""
        self._pushed = 0
        self._lengths: dict[int, int] = {}
        """Periods that have matched for `_SEEN` tokens, and the number of last tokens that have
        them."""
        self._in_prompt: dict[int, int] = {}
        """Tokens of the longest run of the same loop in the prompt, by period."""
        self.reason = ""
        """Why the answer ended, for a person; empty while it has not."""

    def push(self, token: int) -> bool:
        """Adds the next id. Returns whether the answer ends with it."""
        self._ids.append(token)
        self._pushed += 1
        if self._call and self._ids[-len(self._call) :] == self._call:
            self._limits = LATE
        for period, length in list(self._lengths.items()):
            if self._ids[-1 - period] != token:
                del self._lengths[period]
                _ = self._in_prompt.pop(period, None)
                continue
            self._lengths[period] = length = length + 1
            most = self._limits.of(period)
            if length >= most and length >= most + self._run_in_prompt(period):
                self.reason = (
                    f"the last {length} tokens are a loop of {period}; to let an answer go on, "
                    'send "loop_guard": false, or set EXO_LOOP_GUARD=0'
                )
                return True
        if self._pushed % _EVERY == 0:
            self._search()
        return False

    def _run_in_prompt(self, period: int) -> int:
        if period not in self._in_prompt:
            self._in_prompt[period] = longest_run(self._prompt, self._ids[-period:])
        return self._in_prompt[period]

    def _search(self) -> None:
        """Adds the periods that have matched for `_SEEN` tokens, but for multiples of others."""
        if len(self._ids) > 2 * _KEPT:
            del self._ids[:-_KEPT]
        ids = self._ids
        tail = ids[-_SEEN:]
        for period in range(1, min(MAX_PERIOD, len(ids) - _SEEN) + 1):
            is_new = ids[-1 - period] == ids[-1] and period not in self._lengths
            if is_new and not self._is_implied(period) and ids[-_SEEN - period : -period] == tail:
                self._lengths[period] = self._length(period)
        for period in [each for each in self._lengths if self._is_implied(each)]:
            del self._lengths[period]

    def _is_implied(self, period: int) -> bool:
        """Whether a shorter period, of which this is a multiple, ends and breaks before it."""
        return any(
            period % other == 0 and other < period <= length
            for other, length in self._lengths.items()
        )

    def _length(self, period: int) -> int:
        """The number of last tokens that have a period, at most as many as are kept."""
        ids, length = self._ids, period + _SEEN
        while length < len(ids) and ids[-1 - length] == ids[-1 - length + period]:
            length += 1
        return length


def longest_run(prompt: Sequence[int], loop: Sequence[int]) -> int:
    """Tokens of the longest part of a prompt that is `loop` twice or more, begun at any place."""
    period, twice, longest, same = len(loop), [*loop, *loop], 0, 0
    for at in range(period, len(prompt) + 1):
        if at < len(prompt) and prompt[at] == prompt[at - period]:
            same += 1
            continue
        if same >= period and same + period > longest:
            begin = list(prompt[at - period : at])
            if any(twice[turn : turn + period] == begin for turn in range(period)):
                longest = same + period
        same = 0
    return longest
