"""Where the forwards over a prompt end."""

from collections.abc import Collection, Sequence

LEAST_TURN = 128
"""Rows of a forward that may end with a turn: shorter ones would cost more than they spare."""
MOST_SCORES = 512 * 65_536
"""Rows of a forward times the rows that they attend to. Where attention is not fused, as on CPUs,
at some head sizes and over quantised keys, each head keeps a number of each for a while."""


def prefill_ends(prompt: Sequence[int], chunk: int, turn_ends: Collection[int] = ()) -> list[int]:
    """The row behind each forward, ascending; the last is the prompt's length.

    A forward ends behind `chunk` rows, or fewer far into a prompt (`rows_at`), or with the first of
    the tokens `turn_ends` that is at least LEAST_TURN rows behind the last end. An end depends on
    the ids before it alone, so that prompts which begin alike are read by the same forwards as far
    as they are alike: only then is what one of them computed, bit for bit, what another would have.
    """
    ends, start = list[int](), 0
    while start + (rows := rows_at(start, chunk)) < len(prompt):
        start = _turn_end(prompt, start, rows, turn_ends) or start + rows
        ends.append(start)
    if turn_ends:
        while end := _turn_end(prompt, start, rows_at(start, chunk), turn_ends):
            ends.append(start := end)
    return ends if start == len(prompt) and ends else [*ends, len(prompt)]


def rows_at(start: int, chunk: int) -> int:
    """The most rows of a forward that begins at `start`: `chunk`, halved until they and what they
    attend to are within MOST_SCORES, but not below LEAST_TURN."""
    rows = chunk
    while rows >= 2 * LEAST_TURN and rows * (start + rows) > MOST_SCORES:
        rows //= 2
    return rows


def _turn_end(
    prompt: Sequence[int], start: int, chunk: int, turn_ends: Collection[int]
) -> int | None:
    if not turn_ends:
        return None
    stop = min(start + chunk, len(prompt))
    for row in range(start + LEAST_TURN - 1, stop):
        if prompt[row] in turn_ends:
            return row + 1
    return None
