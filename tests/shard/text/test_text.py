"""Ids to text as it grows: whole characters, end tokens, stop strings."""

from types import SimpleNamespace
from typing import Any

import pytest
from engines import DEMO
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer
from mlx_lm.tokenizer_utils import load as load_tokenizer  # pyright: ignore[reportUnknownVariableType]

from exo_node.shard.text.codec import TextCodec, TextStream
from exo_node.shard.text.stop_strings import StopStrings

IM_END, END_OF_TEXT = 4095, 4093
CODEC = TextCodec.load(DEMO)
REFERENCE: Any = load_tokenizer(DEMO)


def ids_of(text: str) -> list[int]:
    return REFERENCE.encode(text, add_special_tokens=False)


def streamed(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[str, int, bool]:
    """The text, the ids that were taken, and whether one of them ended the answer."""
    stream = CODEC.stream(StopStrings(stop), ignore_end=False)
    text, count = "", 0
    for token in ids:
        count += 1
        ended = stream.push(token)
        text += stream.take()
        if ended is not None:
            return text + stream.finish(), count, True
    return text + stream.finish(), count, False


@pytest.mark.parametrize(
    "text",
    [
        "Hello there, friend.",
        "naïve café",
        "👩‍👩‍👧‍👦 and 🙂!",
        "line\n\n  indented\n\n",
        "日本語のテキスト",
        "x ",
        "\n",
    ],
)
def test_streamed_text_is_the_text_that_was_encoded(text: str) -> None:
    assert streamed(ids_of(text)) == (text, len(ids_of(text)), False)


def test_what_continues_in_a_text_keeps_the_space_that_begins_it() -> None:
    beginning, whole = ids_of("Once upon"), ids_of("Once upon a time")
    assert whole[: len(beginning)] == beginning, "the rest must be ids of its own for this test"
    for continues, text in ((True, " a time"), (False, "a time")):
        stream = CODEC.stream(StopStrings(()), ignore_end=False, continues=continues)
        assert [stream.push(token) for token in whole[len(beginning) :]] == [None, None]
        assert stream.take() + stream.finish() == text


def test_a_sentencepiece_text_continues_with_its_space_too() -> None:
    pieces = ["\u2581a", "\u2581time"]
    vocabulary: Any = _Pieces(pieces)
    for continues, text in ((True, " a time"), (False, "a time")):
        wrapped: Any = SimpleNamespace(detokenizer=SPMStreamingDetokenizer(vocabulary))
        stream = TextStream(wrapped, frozenset(), StopStrings(()), continues=continues)
        assert [stream.push(token) for token in range(len(pieces))] == [None, None]
        assert stream.take() + stream.finish() == text


class _Pieces(list[str]):
    """A vocabulary as mlx-lm's detokenizers want it."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self[i] for i in ids]


def test_an_end_token_ends_the_answer_and_is_not_in_its_text() -> None:
    ids = ids_of("Hello there")
    for end in (IM_END, END_OF_TEXT):
        assert streamed([*ids, end, *ids]) == ("Hello there", len(ids) + 1, True)


def test_ignoring_the_end_continues_past_it() -> None:
    stream = CODEC.stream(StopStrings(()), ignore_end=True)
    ids = ids_of("Hello")
    assert [stream.push(token) for token in [*ids, IM_END, *ids]] == [None] * (2 * len(ids) + 1)
    assert (stream.take() + stream.finish()).count("Hello") == 2


def test_half_a_character_is_held_back_and_never_shown_broken() -> None:
    ids = ids_of("ok 🙂")
    assert len(ids) >= 5, "the emoji must be split over several ids for this test"
    stream = CODEC.stream(StopStrings(()), ignore_end=False)
    parts: list[str] = []
    for token in ids:
        assert stream.push(token) is None
        parts.append(stream.take())
    assert "".join(parts) + stream.finish() == "ok 🙂"
    assert not any("\ufffd" in part for part in parts)


def test_half_a_character_at_the_end_comes_out_as_a_replacement() -> None:
    text, _, _ = streamed(ids_of("ok 🙂")[:-1])
    assert text.startswith("ok ")
    assert set(text.removeprefix("ok ")) <= {"\ufffd"}


STOPS: list[tuple[str, tuple[str, ...], str]] = [
    ("one two three", ("e t",), "on"),
    ("one two three", ("one two three",), ""),
    ("one two three", ("three", "two"), "one "),
    ("one two three", ("ree", "thr"), "one two "),
    ("one two three", ("two three", "two"), "one "),
    ("one two three", ("wo t", "two thr!"), "one t"),
    ("one two three", ("two thrice",), "one two three"),
    ("aaab", ("aab",), "a"),
    ("smile 🙂 now", ("🙂 n",), "smile "),
    ("日本語", ("本",), "日"),
    ("family 👩‍👧 here", ("\u200d",), "family 👩"),
]


@pytest.mark.parametrize(("text", "stop", "expected"), STOPS, ids=str)
def test_a_stop_string_cuts_the_text_before_it(
    text: str, stop: tuple[str, ...], expected: str
) -> None:
    got, _, ended = streamed(ids_of(text), stop)
    assert got == expected
    assert ended == (expected != text)


def test_the_stop_string_that_ended_an_answer_is_named() -> None:
    for text, stop, expected in (("a, b. c", (".", ","), ","), ("a b", ("x",), "")):
        stream = CODEC.stream(StopStrings(stop), ignore_end=False)
        for token in ids_of(text):
            if stream.push(token):
                break
        _ = stream.finish()
        assert stream.stopped_by == expected


@settings(deadline=None)
@given(
    text=st.text("ab\n🙂é ", max_size=24), stops=st.lists(st.text("ab🙂", min_size=1, max_size=4))
)
def test_any_text_and_stops_agree_with_a_search_of_the_whole_text(
    text: str, stops: list[str]
) -> None:
    text = "x" + text  # mlx-lm's detokenizer drops a space that begins an answer
    # What plain reading says: the first moment at which the text so far holds a stop string.
    ends = [at + len(s) for s in stops if (at := text.find(s)) >= 0]
    got, _, ended = streamed([t for c in text for t in ids_of(c)], tuple(stops))
    assert ended == bool(ends)
    if not ends:
        assert got == text
        return
    so_far = text[: min(ends)]
    assert got == so_far[: min(so_far.find(s) for s in stops if s in so_far)]


def test_a_possible_stop_is_held_back_until_it_is_known_not_to_be_one() -> None:
    stream = CODEC.stream(StopStrings(("ab!",)), ignore_end=False)
    parts: list[str] = []
    for character in "xabab?":
        for token in ids_of(character):
            assert stream.push(token) is None
            parts.append(stream.take())
    assert parts == ["x", "", "", "ab", "", "ab?"]


def test_finishing_gives_what_was_held_and_only_once() -> None:
    stream = CODEC.stream(StopStrings(("tail!",)), ignore_end=False)
    for token in ids_of("the tail"):
        assert stream.push(token) is None
    assert stream.take() == "the "
    assert stream.finish() == "tail"
    assert stream.finish() == ""


def test_streams_of_one_codec_do_not_share_state() -> None:
    one, two = (CODEC.stream(StopStrings(()), ignore_end=False) for _ in range(2))
    first, second = ids_of("🙂🙂"), ids_of("other")
    for a, b in zip(first, second, strict=False):
        _ = one.push(a), two.push(b)
    assert "🙂" not in two.take() + two.finish()
