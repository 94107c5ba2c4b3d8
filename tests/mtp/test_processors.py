"""Penalties row by row: each row sees exactly the prefix that plain decoding would have had."""

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors

from exo_node.mtp.processors import Processors
from exo_node.mtp.types import Sampling

PROMPT = [3, 5, 5, 1]
ALL = Sampling(
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_context_size=3,
    logit_bias=((2, -7.0), (6, 1.5)),
)


def logits(rows: int) -> mx.array:
    return mx.random.normal((rows, 8), key=mx.random.key(rows))


def by_mlx_lm(p: Sampling, prefix: list[int], row: mx.array) -> mx.array:
    size = p.repetition_context_size
    processors = make_logits_processors(
        dict(p.logit_bias), p.repetition_penalty, size, p.presence_penalty, size,
        p.frequency_penalty, size,
    )  # fmt: skip
    for processor in processors:
        row = processor(mx.array(prefix), row)
    return row


def test_a_block_is_processed_as_its_rows_would_be_one_by_one() -> None:
    block, drafts = logits(4), [5, 7, 3]
    got = Processors(ALL, PROMPT).apply(block, mx.array(drafts))
    for i in range(4):
        expected = by_mlx_lm(ALL, PROMPT + drafts[:i], block[i : i + 1])
        assert mx.array_equal(got[i : i + 1], expected)


def test_a_draft_sees_the_drafts_before_it() -> None:
    row = logits(1)
    got = Processors(ALL, PROMPT).apply_after(row, [mx.array([5]), mx.array([7])])
    assert mx.array_equal(got, by_mlx_lm(ALL, [*PROMPT, 5, 7], row[:]))


def test_committed_tokens_move_the_window() -> None:
    processors = Processors(ALL, PROMPT)
    processors.commit(mx.array([7, 2]))
    processors.commit(mx.array([4]))
    row = logits(1)
    assert mx.array_equal(processors.apply(row), by_mlx_lm(ALL, [*PROMPT, 7, 2, 4], row[:]))


@pytest.mark.parametrize("penalties", [Sampling(), Sampling(repetition_context_size=5)])
def test_without_penalties_logits_pass_untouched(penalties: Sampling) -> None:
    block = logits(2)
    assert not Processors(penalties, PROMPT).active
    assert Processors(penalties, PROMPT).apply(block, mx.array([1])) is block


@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_a_row_over_the_first_ids_is_processed_as_in_the_whole_row(
    width: int, is_repeated: bool
) -> None:
    """Tokens and biases past its end touch nothing; `is_repeated`: the target's width is known."""
    whole = Processors(ALL, PROMPT)
    row, drafts = logits(1), [mx.array([7]), mx.array([2])]
    expected = whole.apply_after(row, drafts)[:, :width]
    processors = Processors(ALL, PROMPT)
    if is_repeated:
        _ = processors.apply(logits(2), mx.array([1]))
    assert mx.array_equal(processors.apply_after(row[:, :width], drafts), expected)


def test_a_drafts_logits_are_not_written_to() -> None:
    processors, row = Processors(ALL, PROMPT), logits(1)
    before = mx.array(row)
    for _ in range(2):
        _ = processors.apply_after(row, [mx.array([5])])
        _ = processors.apply(logits(1))
    assert mx.array_equal(row, before)
