"""The index of earlier occurrences, and the copies that are drafted from it."""

import random
from collections.abc import Sequence

import pytest
from budget import seeds
from forced_copies import FixedLength

from exo_node.mtp.drafting import lookup_drafts
from exo_node.mtp.drafting.lookup import (
    LONGEST_MATCH,
    MAX_CHAIN,
    NO_MATCH,
    SHORTEST_MATCH,
    SMALLEST_TABLE,
    Match,
    Resumed,
    SuffixIndex,
)
from exo_node.mtp.drafting.lookup_drafts import READ_AT_ONCE, PromptLookup


def index_of(ids: Sequence[int]) -> SuffixIndex:
    index = SuffixIndex()
    index.extend(ids)
    return index


def naive(ids: Sequence[int]) -> Match:
    """The longest earlier occurrence of the last ids, the latest of equals, by trying all."""
    best = NO_MATCH
    for place in range(len(ids) - 1, SHORTEST_MATCH - 1, -1):
        length = 0
        while length < min(place, LONGEST_MATCH) and ids[place - 1 - length] == ids[-1 - length]:
            length += 1
        if length >= SHORTEST_MATCH and length > best.length:
            best = Match(length, place)
    return best


@pytest.mark.parametrize(
    ("ids", "match", "copy"),
    [
        ([], (0, 0), []),
        ([1, 2, 3], (0, 0), []),
        ([1, 2, 3, 9, 1, 2], (0, 0), []),  # two tokens are no evidence
        ([1, 2, 3, 9, 8, 1, 2, 3], (3, 3), [9, 8, 1]),
        ([1, 2, 3, 9, 1, 2, 3, 7, 1, 2, 3], (3, 7), [7, 1, 2]),  # the latest of equals
        ([0, 1, 2, 3, 9, 1, 2, 3, 7, 0, 1, 2, 3], (4, 4), [9, 1, 2]),  # the longest of all
        ([5, 5, 5, 5], (3, 3), [5, 5, 5]),  # a copy that reads on in itself
        ([1, 2, 3, 1, 2, 3], (3, 3), [1, 2, 3]),
        ([1, 2, 3, 1, 2, 3, 1], (4, 4), [2, 3, 1]),
    ],
)
def test_the_longest_earlier_occurrence(
    ids: list[int], match: tuple[int, int], copy: list[int]
) -> None:
    index = index_of(ids)
    assert index.find() == Match(*match)
    if match[0]:
        assert index.continuation(match[1], 3) == copy


@pytest.mark.parametrize("seed", seeds(20, 200))
def test_it_finds_what_a_search_of_all_places_finds(seed: int) -> None:
    """Added one by one or at once, before and after the growth of its table."""
    rng = random.Random(seed)
    ids = [rng.randrange(6) for _ in range(40)]
    for _ in range(3):  # copies, which give long matches
        start = rng.randrange(len(ids))
        ids += ids[start : start + rng.randrange(5, 90)]
    ids = ids[:MAX_CHAIN]  # as many places as one search compares
    one_by_one = SuffixIndex()
    for count, token in enumerate(ids, 1):
        one_by_one.extend((token,))
        assert one_by_one.find() == naive(ids[:count]) == index_of(ids[:count]).find()


def test_a_long_match_is_followed_as_far_as_it_is_evidence() -> None:
    ids = list(range(200))
    assert index_of([*ids, *ids[:150]]).find() == Match(LONGEST_MATCH, 150)


@pytest.mark.parametrize("count", [10 * SMALLEST_TABLE, 10 * SMALLEST_TABLE + 1])
def test_memory_is_bounded_by_tokens(count: int) -> None:
    """A token's id, its chain and two entries of the table, 4 bytes each, and spare room."""
    assert index_of(range(count)).bytes <= 24 * count
    index = SuffixIndex(count)
    index.extend(range(count))
    assert index.bytes <= 24 * count


class Recorder(FixedLength):
    """Copies `longest` tokens wherever it may, and records the evidence."""

    def __init__(self, longest: int = 4) -> None:
        super().__init__(longest)
        self.seen = list[tuple[int, bool]]()
        self.resumed = list[tuple[int, bool]]()
        """The evidence where a match resumed, and how."""

    def add(self, match_length: int, *, is_right: bool, resumed: Resumed = 0) -> None:
        self.seen.append((match_length, is_right))
        if resumed:
            self.resumed.append((resumed, is_right))


def copied(lookup: PromptLookup, limit: int) -> list[int]:
    """The copy of the next round, which has at most `limit` tokens."""
    _ = lookup.read()
    return lookup.tokens(len(lookup.reached(limit))) if lookup.reached(limit) else []


def pushed(lookup: PromptLookup, ids: Sequence[int]) -> PromptLookup:
    for token in ids:
        lookup.push(token)
    return lookup


def test_every_token_is_evidence_whether_it_was_drafted_or_not() -> None:
    evidence = Recorder()
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 9], evidence)
    assert copied(lookup, 10) == []
    _ = pushed(lookup, [1, 2, 3, 4, 5, 7])
    assert evidence.seen == [(3, True), (4, True), (5, False)]
    assert lookup.match == NO_MATCH


def test_a_copy_begins_after_committed_tokens() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 9], Recorder())
    assert copied(lookup, 10) == []
    assert copied(pushed(lookup, [1, 2, 3]), 10) == [4, 5, 6, 9]
    # Two of the drafts stand, then the target chose another token.
    assert copied(pushed(lookup, [4, 5, 8]), 10) == []
    # The answer is indexed as the prompt is.
    assert copied(pushed(lookup, [3, 4, 5]), 10) == [8, 3, 4, 5]


@pytest.mark.parametrize("seed", seeds(10, 200))
def test_following_a_match_is_searching_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as a search compares all occurrences, and no match resumes."""
    monkeypatch.setattr(lookup_drafts, "RESUMABLE", LONGEST_MATCH + 1)
    rng = random.Random(seed)
    prompt = [rng.randrange(50) for _ in range(60)]
    lookup, ids = PromptLookup(prompt, Recorder()), list(prompt)
    _ = lookup.read()
    for _ in range(60):
        start = rng.randrange(len(ids))
        for token in (*ids[start : start + rng.randrange(8)], rng.randrange(50)):
            lookup.push(token)
            ids.append(token)
            assert lookup.match.length == index_of(ids).find().length


FILE = list(range(100, 130))


@pytest.mark.parametrize(
    ("answer", "copy"),
    [
        ([*FILE[:8], 7], FILE[9:12]),  # in place of the next one
        ([*FILE[:8], 7, FILE[9]], FILE[10:13]),
        ([*FILE[:8], 7, FILE[8]], FILE[9:12]),  # in front of it
        ([*FILE[:8], FILE[9]], FILE[10:13]),  # which is left out
        ([*FILE[:8], FILE[12]], FILE[13:16]),
        ([*FILE[:8], 7, 8, 9, FILE[9]], FILE[10:13]),  # in place of one: three
        ([*FILE[:8], 7, 8, FILE[12]], FILE[13:16]),  # in place of four: two
        ([*FILE[:8], 7, 8, FILE[16]], []),  # of more than eight
        ([*FILE[:8], *range(7), FILE[9]], FILE[10:13]),
        ([*FILE[:8], *range(8), FILE[9]], []),
        ([*FILE[:8], 7, FILE[9], 8], FILE[11:14]),  # two changes
        ([*FILE[:7], 7], []),  # seven tokens in common may be chance
        ([*FILE[:8], 7, 8], []),  # nothing in common again
        ([*FILE[:8], 7, FILE[9], FILE[10], *FILE[:3]], FILE[3:6]),  # other places are found still
    ],
)
def test_a_long_copy_resumes_after_a_change(answer: list[int], copy: list[int]) -> None:
    lookup = PromptLookup([*FILE, 1], Recorder(3))
    assert copied(lookup, 9) == []
    assert copied(pushed(lookup, answer), 9) == copy


def test_a_token_after_a_change_is_evidence_of_its_own() -> None:
    evidence = Recorder()
    lookup = PromptLookup([*FILE, 1], evidence)
    assert copied(lookup, 9) == []
    _ = pushed(lookup, [*FILE[:8], 7, FILE[9], 8, 7, FILE[11], FILE[12]])
    assert evidence.seen[-5:] == [(8, False), (8, True), (9, False), (9, False), (9, True)]
    assert evidence.resumed == [(1, True), (1, False), (2, True)]


def test_no_copy_resumes_beyond_the_last_token() -> None:
    """The copied text is the answer's own end, of which little is left."""
    for count in range(1, 4):
        lookup = PromptLookup([0, 1], Recorder(3))
        assert copied(lookup, 9) == []
        _ = pushed(lookup, [*[5] * (12 - count), *range(6, 6 + count), 5, 7, 8])
        assert len(copied(lookup, 9)) in (0, 3)
        assert not lookup.match.length or lookup.match.place < 2 + 15


def test_a_long_prompt_is_indexed_in_parts_between_rounds() -> None:
    body = list(range(READ_AT_ONCE + 10))
    lookup = PromptLookup([*body, 1, 2], Recorder())
    lookup.push(3)
    assert copied(lookup, 8) == []  # the rest is not indexed yet
    lookup.push(4)
    assert copied(lookup, 8) == [5, 6, 7, 8]


@pytest.mark.parametrize("limit", [-1, 0, 3])
def test_no_copy_is_longer_than_the_answer_may_be(limit: int) -> None:
    lookup = pushed(PromptLookup([1, 2, 3, 4], Recorder(4)), [1, 2, 3])
    assert len(copied(lookup, limit)) == max(0, limit)


@pytest.mark.parametrize(("text", "count"), [([], 0), ([4], 1), ([4, 5], 2), ([4, 5, 6], 2)])
def test_rows_of_images_are_never_copied(text: list[int], count: int) -> None:
    lookup = PromptLookup([1, 2, 3, *text, -7, -8, 1, 2, 3], FixedLength(2))
    assert copied(lookup, 9) == text[:count]
