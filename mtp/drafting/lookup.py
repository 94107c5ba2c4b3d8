"""An index of the earlier occurrences of a request's last tokens. Pure: no clock, no arrays of MLX.

Trigrams are hashed, and the places of one hash are chained, the latest first, as in deflate
(RFC 1951, section 4). A place is the index of the token after an occurrence.
"""

from array import array
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

SHORTEST_MATCH: Final = 3
"""Tokens that an occurrence has at least in common with the last ones."""
LONGEST_MATCH: Final = 64
"""Tokens that are compared at most: a longer match is no better evidence."""
MAX_CHAIN: Final = 32
"""Places that one search compares at most, the latest ones."""
RESUMABLE: Final = 8
"""Tokens in common from which on a match resumes after a change: fewer occur by chance."""
NEAR: Final = 8
"""Tokens of a change, and tokens that it replaces, after which a match resumes at most."""
SMALLEST_TABLE: Final = 1024
"""Entries of the table of an empty index; a power of two."""
_NONE: Final = -1


Resumed = Literal[0, 1, 2]


class Match(NamedTuple):
    """An earlier occurrence of the last tokens."""

    length: int
    """Tokens in common, from SHORTEST_MATCH to LONGEST_MATCH, or 0 if there is no occurrence."""
    place: int
    """The index of the token after the occurrence."""
    resumed: Resumed = 0
    """1: the last token differs from the occurrence's, `length` tokens before it do not. 2: some
    tokens before the last one differ, and `length` before them do not."""


NO_MATCH: Final = Match(0, 0)


class SuffixIndex:
    """The tokens of one request, and where the last ones occurred before.

    A trigram is entered when the token after it is added, so a search for the last tokens finds
    earlier occurrences only.
    """

    def __init__(self, expected_tokens: int = 0) -> None:
        """`expected_tokens`: tokens that will be added soon; more may be."""
        self._ids = array("i")
        self._before = _table(SHORTEST_MATCH)
        """The next earlier place with the same hash, or _NONE, by place."""
        self._latest = _table(max(SMALLEST_TABLE, 1 << expected_tokens.bit_length()))
        """The latest place, or _NONE, by hash. As many entries as tokens, or more."""

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: int) -> int:
        return self._ids[place]

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens, and enters the trigrams in front of them."""
        self._ids.extend(tokens)
        size = len(self._latest)
        while size < len(self._ids):
            size *= 2
        if size > len(self._latest):
            self._latest, self._before = _table(size), _table(SHORTEST_MATCH)
        self._enter()

    def find(self) -> Match:
        """The longest of the MAX_CHAIN latest occurrences of the last tokens; of several that are
        equally long, the latest."""
        ids, end = self._ids, len(self._ids)
        if end < SHORTEST_MATCH:
            return NO_MATCH
        slot = hash((ids[-3], ids[-2], ids[-1])) & (len(self._latest) - 1)
        place, best = self._latest[slot], NO_MATCH
        for _ in range(MAX_CHAIN):
            if place == _NONE or best.length == LONGEST_MATCH:
                break
            length = self._common(place)
            if length >= SHORTEST_MATCH and length > best.length:
                best = Match(length, place)
            place = self._before[place]
        return best

    def resume(self, broken: Match, since: int) -> Match:
        """The place at which a broken match may continue, `since` tokens after the wrong one.

        Behind the next token of the occurrence that equals the last one; where the change has just
        begun and there is none, after one token.
        """
        length, place, _ = broken
        end = len(self._ids) - 1
        if length < RESUMABLE or since >= NEAR:
            return NO_MATCH
        following = self._ids[place : min(place + NEAR, end)]
        if (token := self._ids[end]) in following:
            return Match(length, place + following.index(token) + 1, resumed=2)
        return NO_MATCH if since else Match(length, place + 1, resumed=1)

    def continuation(self, place: int, count: int) -> list[int]:
        """The `count` tokens from `place` on. A copy that reaches the last token reads on in
        itself."""
        ids, period = self._ids, len(self._ids) - place
        return [ids[place + offset % period] for offset in range(count)]

    @property
    def bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(len(each) * each.itemsize for each in (self._ids, self._before, self._latest))

    def _common(self, place: int) -> int:
        """Tokens in front of `place` that equal the last ones, up to LONGEST_MATCH."""
        ids, end = self._ids, len(self._ids)
        most, length = min(place, LONGEST_MATCH), 0
        while length < most and ids[place - 1 - length] == ids[end - 1 - length]:
            length += 1
        return length

    def _enter(self) -> None:
        """Enters the trigrams of the places after those in `_before`: of new tokens, or of all for
        a larger table."""
        latest, before = self._latest, self._before
        mask, place = len(latest) - 1, len(before)
        ids = self._ids[place - SHORTEST_MATCH : -1]
        for trigram in zip(ids, ids[1:], ids[2:], strict=False):
            slot = hash(trigram) & mask  # of integers: the same in each process
            before.append(latest[slot])
            latest[slot] = place
            place += 1


def _table(size: int) -> "array[int]":
    return array("i", [_NONE]) * size
