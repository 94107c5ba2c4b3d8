"""Forwards over a prompt end where its own beginning says, so that prefixes are shared."""

from hypothesis import given
from hypothesis import strategies as st

from exo_node.mtp.schedule import LEAST_TURN, prefill_ends

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
        assert size == chunk or (prompt[end - 1] == END and size >= LEAST_TURN)


@given(shared=prompts(), one=prompts(), other=prompts(), chunk=st.sampled_from([64, 200, 512]))
def test_prompts_that_begin_alike_are_read_alike_as_far_as_they_are(
    shared: list[int], one: list[int], other: list[int], chunk: int
) -> None:
    first, second = [*shared, 5, *one], [*shared, 6, *other]
    ends = [prefill_ends(prompt, chunk, {END})[:-1] for prompt in (first, second)]
    within = [[end for end in each if end <= len(shared)] for each in ends]
    assert within[0] == within[1]


def test_a_turn_of_some_length_ends_a_forward_and_a_short_one_does_not() -> None:
    prompt = [2] * 199 + [END] + [2] * 49 + [END] + [2] * 100
    assert prefill_ends(prompt, 512, {END}) == [200, 350]
    assert prefill_ends(prompt, 512) == [350]
    assert prefill_ends([2] * 1024, 512, {END}) == [512, 1024]
