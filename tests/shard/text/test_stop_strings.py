"""Stop strings end an answer where its content spells them, and nowhere else."""

import pytest
from families_text import codec_of
from hypothesis import given
from hypothesis import strategies as st

from exo_node.shard.text.stop_strings import StopStrings
from exo_node.shard.text.tools.channels import AnswerFormat

QWEN = codec_of("qwen")
OPENED = tuple(QWEN.encode_text("<think>\n"))
"""A prompt whose template opens the reasoning, as Qwen's do."""
CALL = "<tool_call>\n<function=f>\n<parameter=a>\nEND\n</parameter>\n</function>\n</tool_call>"


def run(
    text: str,
    *stop: str,
    format: AnswerFormat | None = None,
    prompt: tuple[int, ...] = (),
    pieces: list[str] | None = None,
) -> tuple[str, str]:
    """The text up to its end, and the stop string that was found."""
    strings, output = StopStrings(stop, format or QWEN.answer_format, prompt), ""
    for piece in pieces or list(text):
        output += strings.feed(piece)
        if strings.match:
            return output, strings.match
    return output + strings.finish(), strings.match


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("I END here.</think>\n\nIt is ENDless", "I END here.</think>\n\nIt is "),
        ("END</think>", "END</think>"),
        ("one END", "one END"),
        ("x</think>EN", "x</think>EN"),
    ],
)
def test_a_stop_string_does_not_end_reasoning(text: str, end: str) -> None:
    """It ended the answer with no content at all."""
    assert run(text, "END", prompt=OPENED) == (end, "END" if end != text else "")


def test_line_breaks_after_reasoning_are_the_templates_and_end_nothing() -> None:
    text = "hm\n\nso</think>\n\nYes.\n\nMore."
    for stop in ("\n", "\n\n"):
        assert run(text, stop, prompt=OPENED) == ("hm\n\nso</think>\n\nYes.", stop)
    assert run("\nYes.", "\n", prompt=()) == ("", "\n"), "which begin a content without reasoning"


def test_a_stop_string_does_not_end_a_call() -> None:
    text = f"Look.\n{CALL}\nEND"
    assert run(text, "END") == (f"Look.\n{CALL}\n", "END")
    without = QWEN.answer_format.without_calls()
    cut = text.index("END")
    assert run(text, "END", format=without) == (text[:cut], "END"), "no tools: it is content"


def test_a_stop_string_does_not_reach_over_what_stands_between() -> None:
    text = "E<think>N</think>ND END"
    assert run(text, "END", "EN") == ("E<think>N</think>ND ", "EN")


def test_harmonys_headers_and_analysis_end_nothing() -> None:
    codec = codec_of("gpt_oss")
    text = (
        "<|channel|>analysis<|message|>final?<|end|><|start|>assistant<|channel|>final<|message|>"
    )
    output = run(f"{text}the final word", "final", format=codec.answer_format)
    assert output == (f"{text}the ", "final")


@given(st.lists(st.sampled_from(["E", "EN", "D", "a", "\n", "<think>", "</think>", CALL, "<to"])))
def test_the_division_of_the_text_changes_nothing(pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = run(text, "END", "\n\n", pieces=[text])
    assert run(text, "END", "\n\n", pieces=pieces or [""]) == whole
    assert run(text, "END", "\n\n", pieces=list(text) or [""]) == whole
    assert text.startswith(whole[0]), "nothing is lost or changed before the end"
    if not whole[1]:
        assert whole[0] == text


@given(st.text("END ab\n"), st.sampled_from(["END", "\n", "ab"]))
def test_of_a_bare_text_all_is_content(text: str, stop: str) -> None:
    before, match, _ = text.partition(stop)
    assert run(text, stop, format=AnswerFormat(), pieces=list(text) or [""]) == (before, match)
