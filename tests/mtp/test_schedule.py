"""Forwards over a prompt end where its own beginning says, so that prefixes are shared."""

from hypothesis import given
from hypothesis import strategies as st

from exo_node.mtp.schedule import (
    FIRST_LEAST_TURN,
    KEY_ROWS,
    LEAST_TURN,
    MOST_SCORES,
    TURN_SHARE,
    least_turn,
    prefill_ends,
    rows_at,
)

END = 9
IDS = st.lists(st.integers(0, 3), max_size=150)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Turns of some length, some of them ended."""
    turns = draw(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=6))
    return [1, *(t for rows, ends in turns for t in [*([2] * rows), *([END] if ends else [])])]


@given(prompt=prompts(), chunk=st.sampled_from([64, 128, 200, 512]))
def test_each_row_is_read_once_by_forwards_of_a_chunk_at_most(
    prompt: list[int], chunk: int
) -> None:
    ends = prefill_ends(prompt, chunk, {END})
    assert ends[-1] == len(prompt)
    sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    assert all(0 < size <= chunk for size in sizes)
    for size, end in zip(sizes[:-1], ends, strict=False):
        is_long = size >= least_turn(end - size)
        assert size == chunk or (prompt[end - 1] == END and is_long)


@given(shared=prompts(), one=prompts(), other=prompts(), chunk=st.sampled_from([64, 200, 512]))
def test_prompts_that_begin_alike_are_read_alike_as_far_as_they_are(
    shared: list[int], one: list[int], other: list[int], chunk: int
) -> None:
    first, second = [*shared, 5, *one], [*shared, 6, *other]
    ends = [prefill_ends(prompt, chunk, {END})[:-1] for prompt in (first, second)]
    within = [[end for end in each if end <= len(shared)] for each in ends]
    assert within[0] == within[1]


@given(length=st.integers(1, 300_000), chunk=st.sampled_from([128, 200, 512, 2048]))
def test_far_into_a_prompt_forwards_get_shorter_so_that_scores_keep_their_bound(
    length: int, chunk: int
) -> None:
    ends = prefill_ends(range(length), chunk)
    assert ends[-1] == length
    sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    for size, end in zip(sizes, ends, strict=True):
        assert 0 < size <= chunk
        assert size * end <= MOST_SCORES or size < 2 * LEAST_TURN
        # No shorter than it must be: an upper bound on forwards, so on the time they take.
        assert end == length or size == chunk or 2 * size * (end + size) > MOST_SCORES


def test_prompts_of_usual_lengths_are_read_in_whole_chunks() -> None:
    assert prefill_ends(range(65_024), 512) == list(range(512, 65_025, 512))
    sizes = {start: rows_at(start, 512) for start in (0, 65_024, 65_025, 131_072, 250_000)}
    assert sizes == {0: 512, 65_024: 512, 65_025: 256, 131_072: 128, 250_000: 128}


def test_a_turn_of_some_length_ends_a_forward_and_a_short_one_does_not() -> None:
    prompt = [2] * 199 + [END] + [2] * 30 + [END] + [2] * 100
    assert prefill_ends(prompt, 512, {END}) == [200, 331]
    assert prefill_ends(prompt, 512) == [331]
    longer = [2] * 199 + [END] + [2] * 31 + [END] + [2] * 100
    assert prefill_ends(longer, 512, {END}) == [200, 232, 332]
    assert prefill_ends([2] * 1024, 512, {END}) == [512, 1024]


@given(turns=st.lists(st.integers(1, 90), min_size=1, max_size=400))
def test_what_follows_the_last_end_is_a_small_part_and_short_turns_take_few_forwards(
    turns: list[int],
) -> None:
    prompt = [id_ for rows in turns for id_ in (*([2] * (rows - 1)), END)]
    *_, last = ends = [0, *prefill_ends([*prompt, 7], 512, {END})[:-1]]
    assert len(prompt) - last <= max(FIRST_LEAST_TURN, len(prompt) / TURN_SHARE, 1) + 90
    first = sum(end <= LEAST_TURN * TURN_SHARE for end in ends)
    assert first <= LEAST_TURN * TURN_SHARE / FIRST_LEAST_TURN + 1
    assert len(ends) - first <= len(prompt) / LEAST_TURN + 1


@given(
    before=st.integers(0, 40),
    rows=st.integers(1, 60),
    after=st.integers(0, 40),
    chunk=st.sampled_from([16, 20, 32]),
)
def test_no_forward_ends_within_the_first_rows_of_an_image(
    before: int, rows: int, after: int, chunk: int
) -> None:
    prompt = [1, *([2] * before), *([-5] * rows), *([2] * after), 3]
    ends, first = prefill_ends(prompt, chunk), 1 + before
    assert ends == sorted(set(ends)) and ends[-1] == len(prompt)
    assert all(b - a <= chunk for a, b in zip([0, *ends], ends, strict=False))
    for end in ends:
        assert not first < end < min(first + KEY_ROWS, first + rows)


def test_a_forward_ends_in_front_of_an_image_or_after_enough_of_it() -> None:
    image = [-5] * 12
    assert prefill_ends([2] * 12 + image + [3], 16) == [12, 25]
    assert prefill_ends([2] * 8 + image + [3], 16) == [16, 21]
    assert prefill_ends([2] * 16 + image + [3], 16) == [16, 29]
    assert prefill_ends([-5] * 30, 6) == [6, 12, 18, 24, 30], "a chunk of fewer rows"


@given(
    before=st.integers(0, 40),
    rows=st.integers(1, 60),
    between=st.integers(1, 20),
    chunk=st.sampled_from([16, 20, 32]),
)
def test_no_forward_ends_within_an_image_that_is_read_whole(
    before: int, rows: int, between: int, chunk: int
) -> None:
    image = [-5] * rows
    prompt = [1, *([2] * before), *image, *([2] * between), *image, 3]
    ends = prefill_ends(prompt, chunk, whole_images=True)
    assert ends == sorted(set(ends)) and ends[-1] == len(prompt)
    for begin, end in zip([0, *ends], ends, strict=False):
        assert end == len(prompt) or prompt[end - 1] >= 0 or prompt[end] >= 0
        assert end - begin <= max(chunk, rows)


def test_a_forward_grows_to_hold_an_image_and_nothing_else() -> None:
    image = [-5] * 30
    assert prefill_ends([2] * 4 + image + [3] * 20, 16, whole_images=True) == [4, 34, 50, 54]
    assert prefill_ends(image, 16, whole_images=True) == [30]
