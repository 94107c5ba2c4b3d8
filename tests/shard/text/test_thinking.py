"""Reasoning efforts become those that a template accepts, and nothing is lost."""

from collections.abc import Mapping
from typing import Any

import pytest
from engines import DEMO
from families_text import codec_of

from exo_node.shard.text.codec import TextCodec
from exo_node.shard.text.template import TemplateOptions
from exo_node.shard.text.thinking import LEVELS, Level, ThinkingVariables

USER = {"role": "user", "content": "hi"}


def rendered(family: str, **options: Any) -> tuple[str, list[str]]:
    """The prompt, and the notes about it."""
    codec, notes = codec_of(family), list[str]()
    ids = codec.encode_chat([USER], options=TemplateOptions(**options), notes=notes)
    return codec.decode(ids), notes


NEAREST = {"minimal": "low", "high": "xhigh", "max": "xhigh"}


@pytest.mark.parametrize("effort", LEVELS)
def test_an_effort_that_the_template_refuses_becomes_the_nearest_that_it_accepts(
    effort: Level,
) -> None:
    """Claude Code sends `high` by default, and Qwen3.8 has xhigh, medium and low."""
    text, notes = rendered("qwen_levels", effort=effort)
    level = NEAREST.get(effort, effort)
    assert ("Effort:" in text) == (level != "medium")
    assert level == "medium" or f"Effort: {level}<" in text
    note = f"reasoning effort {effort} ({level} is the nearest it has)"
    assert notes == ([note] if effort in NEAREST else [])


def test_thinking_without_a_level_leaves_the_level_to_the_model() -> None:
    text, notes = rendered("qwen_levels", thinking=True)
    assert (text, notes) == rendered("qwen_levels")
    for off in ({"thinking": False}, {"effort": "none"}, {"thinking": False, "effort": "high"}):
        text, notes = rendered("qwen_levels", **off)
        assert text.endswith("<think>\n\n</think>\n\n") and not notes, off


@pytest.mark.parametrize(
    ("family", "options", "notes"),
    [
        ("qwen", {"effort": "high"}, ["reasoning effort high (the model has no levels)"]),
        ("qwen", {"budget": 5}, ["a budget of thinking (the model has none)"]),
        ("qwen", {"thinking": True}, []),
        ("gpt_oss", {"effort": "high"}, []),
        ("gpt_oss", {"effort": "max"}, ["reasoning effort max (high is the nearest it has)"]),
        (
            "gpt_oss",
            {"thinking": False},
            ["thinking off (the model cannot be kept from thinking; low is the least it has)"],
        ),
    ],
)
def test_what_a_template_cannot_follow_is_told(
    family: str, options: dict[str, Any], notes: list[str]
) -> None:
    assert rendered(family, **options)[1] == notes


def test_tools_that_a_template_has_no_place_for_are_told() -> None:
    tool: dict[str, Any] = {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": {}},
    }
    notes: list[str] = []
    _ = codec_of("qwen").encode_chat([USER], tools=[tool], notes=notes)
    assert notes == []
    _ = TextCodec.load(DEMO).encode_chat([USER], tools=[tool], notes=notes)
    assert notes == ["tools (the model's chat template has none)"]


def variables(*accepted: str, text: str = "reasoning_effort", tries: list[Any]) -> Any:
    def renders(kwargs: Mapping[str, Any]) -> bool:
        tries.append(dict(kwargs))
        return kwargs.get("reasoning_effort", accepted[0]) in accepted

    return ThinkingVariables(text, renders, thinks=True)


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        (("high", "max"), {"minimal": "high", "medium": "high", "xhigh": "max", "max": "max"}),
        (("low",), dict.fromkeys(LEVELS, "low")),
        (("medium", "low", "high"), {"minimal": "low", "xhigh": "high", "max": "high"}),
    ],
)
def test_of_two_levels_that_are_as_near_the_higher_one_is_chosen(
    accepted: tuple[str, ...], chosen: dict[Level, str]
) -> None:
    tries: list[Any] = []
    thinking = variables(*accepted, tries=tries)
    for effort, level in chosen.items():
        assert thinking.choose(effort, None, 0, []) == {"reasoning_effort": level}
    assert len(tries) <= len(LEVELS) + 1, "each level is rendered once, whoever asks for it"


def test_a_template_that_refuses_any_short_chat_is_given_the_effort_as_it_is() -> None:
    thinking = ThinkingVariables("reasoning_effort", lambda _: False, thinks=True)
    assert thinking.choose("high", None, 0, []) == {"reasoning_effort": "high"}


def test_a_template_that_accepts_no_level_is_given_none() -> None:
    tries: list[Any] = []
    thinking, notes = variables("other", tries=tries), list[str]()
    assert thinking.choose("high", None, 0, notes) == {}
    assert notes == ["reasoning effort high (the model has no levels)"]
