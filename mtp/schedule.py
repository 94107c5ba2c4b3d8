"""The row counts at which the forwards over a prompt end."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

LEAST_TURN = 128
"""Minimum rows of a forward that ends with a turn, far into a prompt: see `least_turn`."""
FIRST_LEAST_TURN = 32
"""The same at the beginning of a prompt. Fewer rows would cost about as much time as these."""
TURN_SHARE = 16
"""A turn ends a forward if it has at least this part of the rows before it."""
KEY_ROWS = 8
"""First rows of an image that are read by one forward: their ids have 248 bits of its hash, so that
no state after fewer of them is kept."""
MOST_SCORES = 512 * 65_536
"""Limit of the rows of a forward times the rows that they attend to. Attention that is not fused
(on CPUs, at some head sizes, over quantised keys) stores that many scores per head."""
SCORED_ROWS = 256
"""Rows of a forward whose tokens get log-probabilities: of as many rows it has all logits at once,
which are 256 MiB for a vocabulary of 262,144."""


class Schedule(NamedTuple):
    """How the prompts of one engine are cut into forwards."""

    chunk: int
    turn_ends: frozenset[int] = frozenset()
    """The tokens that end a turn."""
    whole_images: bool = False

    def ends(self, prompt: Sequence[int], *, is_scored: bool = False) -> list[int]:
        """See `prefill_ends`. `is_scored`: whether its tokens get log-probabilities."""
        chunk = min(self.chunk, SCORED_ROWS) if is_scored else self.chunk
        return prefill_ends(prompt, chunk, self.turn_ends, whole_images=self.whole_images)


def prefill_ends(
    prompt: Sequence[int],
    chunk: int,
    turn_ends: Collection[int] = (),
    *,
    whole_images: bool = False,
) -> list[int]:
    """The row after each forward, ascending; the last is the prompt's length.

    A forward ends after `chunk` rows, or fewer far into a prompt (`rows_at`), or with the first of
    the tokens `turn_ends` that is at least `least_turn` rows after the last end. An end depends
    only on the ids before it, so that prompts with a common prefix are read by the same forwards
    within it: only then is the cached state of one, bit for bit, the state that another would
    compute.

    `whole_images`: whether all rows of an image, ids below 0, are read by one forward, which has
    more than `chunk` rows if the image has.
    """
    ends, start = list[int](), 0
    place = _whole_image if whole_images else _whole_key
    while start + (rows := rows_at(start, chunk)) < len(prompt):
        start = _turn_end(prompt, start, rows, turn_ends) or place(prompt, start, start + rows)
        ends.append(start)
    if turn_ends:
        while end := _turn_end(prompt, start, rows_at(start, chunk), turn_ends):
            ends.append(start := end)
    return ends if start == len(prompt) and ends else [*ends, len(prompt)]


def _whole_key(prompt: Sequence[int], start: int, end: int) -> int:
    """`end`, or the first row of an image of which fewer than KEY_ROWS rows would be in front."""
    first = end
    if prompt[end] < 0:
        while first > start and end - first < KEY_ROWS and prompt[first - 1] < 0:
            first -= 1
    return end if end - first >= KEY_ROWS or first == start else first


def _whole_image(prompt: Sequence[int], start: int, end: int) -> int:
    """`end`, or where it is within an image the image's first row, or its end if the forward would
    have no rows."""
    first = end
    while prompt[end] < 0 and first > start and prompt[first - 1] < 0:
        first -= 1
    while first == start and end < len(prompt) and prompt[end] < 0:
        end += 1
    return end if first == start else first


def rows_at(start: int, chunk: int) -> int:
    """The most rows of a forward that begins at `start`: `chunk`, halved until their scores are
    within MOST_SCORES, but not below LEAST_TURN."""
    rows = chunk
    while rows >= 2 * LEAST_TURN and rows * (start + rows) > MOST_SCORES:
        rows //= 2
    return rows


def least_turn(start: int) -> int:
    """Minimum rows of a forward that begins at `start` and ends with a turn.

    It grows with the rows before it: what a next turn cannot find cached stays a small part of its
    prompt, and a long history of short turns is still read by few forwards.
    """
    return min(LEAST_TURN, max(FIRST_LEAST_TURN, start // TURN_SHARE))


def _turn_end(
    prompt: Sequence[int], start: int, chunk: int, turn_ends: Collection[int]
) -> int | None:
    if not turn_ends:
        return None
    stop = min(start + chunk, len(prompt))
    for row in range(start + least_turn(start) - 1, stop):
        if prompt[row] in turn_ends:
            return row + 1
    return None
