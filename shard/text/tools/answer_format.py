"""The format of a checkpoint's answers, derived from its tokenizer's vocabulary and template."""

import re
from typing import Any, Final

from .call_formats import FORMATS, OWN_MARKS
from .call_scanners import Declared
from .channels import AnswerFormat, Edge, State
from .object_formats import DEEPSEEK_MARKS
from .tagged_calls import DSML_MARK

_STATES: Final[dict[str, State]] = {"normal": "content", "reasoning": "reasoning", "tool": "call"}
"""States by mlx-lm's names; all other names are headers."""

HARMONY: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
"""Tokens of OpenAI's Harmony format, as its specification names them."""
_START, _CHANNEL, _MESSAGE, _END, _CALL, _RETURN = HARMONY
_ADDRESS: Final = re.compile(r"\bto=(functions\.)?([^\s<]+)")
"""The tool that a header names; models forget the namespace."""

_ENFORCED: Final = ("Harmony", "DeepSeek", "json_tools")
_TURN_ENDS: Final = (
    *(_END, "<|END_OF_TURN_TOKEN|>", "<|user_end|>", "<|assistant|>", "<｜Assistant｜>"),  # noqa: RUF001
    *("[/SYSTEM_PROMPT]", "[/AVAILABLE_TOOLS]", "[/INST]", "[/TOOL_RESULTS]"),
)
"""Tokens of publishers' templates that come after a user's turn or a result, and end no answer."""
_PYTHON_TAG: Final = "<|python_tag|>"
"""Llama's mark before calls, which it may leave out."""


def format_of(tokenizer: Any) -> AnswerFormat:
    """The answer format of a model; `tokenizer` is mlx-lm's wrapper."""
    if is_harmony(tokenizer):
        return _harmony(tokenizer)
    edges: dict[State, list[Edge]] = {}
    for state, transitions in tokenizer.response_transitions.items():
        edges[_state(state)] = [(marker, _state(to)) for marker, to in transitions]
    edges.setdefault("content", [])
    if tokenizer.has_thinking:
        edges["content"].append((tokenizer.think_start, "reasoning"))
        edges.setdefault("reasoning", []).append((tokenizer.think_end, "content"))
    marks = call_marks(tokenizer)
    for state in ("content", "reasoning"):
        if state in edges and not any(to == "call" for _, to in edges[state]):
            edges[state].extend((mark, "call") for mark in marks)
    for marker in tokenizer.structural_markers:
        edges["content"].append((marker, "content"))
    return AnswerFormat(
        edges,
        starts=tuple(tokenizer.think_start_tokens or ()),
        ends=tuple(tokenizer.think_end_tokens or ()),
        opens=tuple(tokenizer.think_end_tokens or ()),
        calls=_ids(tokenizer, marks[0]) if marks else (),
        thought=(
            tuple(tokenizer.think_start_tokens or ()),
            tuple(tokenizer.think_end_tokens or ()),
        ),
        call_format=call_format(tokenizer),
        initial=_state(tokenizer.response_initial_state or "normal"),
    )


def call_marks(tokenizer: Any) -> tuple[str, ...]:
    """The marks that begin a call; none if the model has no known call format."""
    name = call_format(tokenizer)
    if not name:
        return (_PYTHON_TAG,) if _PYTHON_TAG in tokenizer.get_vocab() else ()
    return OWN_MARKS.get(name) or (tokenizer.tool_call_start,)


def call_format(tokenizer: Any) -> str:
    """The name of a model's call format; empty if it has no known one."""
    if is_harmony(tokenizer):
        return "Harmony"
    if tokenizer.has_tool_calling:
        name = str(tokenizer.tool_parser.__module__).rpartition(".")[2]
        return name if name in FORMATS else ""
    vocabulary, template = tokenizer.get_vocab(), str(getattr(tokenizer, "chat_template", None))
    if DSML_MARK in vocabulary or f"<{DSML_MARK}" in template:
        return "DSML"
    if all(token in vocabulary for token in DEEPSEEK_MARKS):
        return "DeepSeek"
    return "Seed" if OWN_MARKS["Seed"][0] in template else ""


def has_call_grammar(tokenizer: Any) -> bool:
    """Whether a required call can be enforced in the model's own format."""
    return call_format(tokenizer) in _ENFORCED


def other_turn_ends(tokenizer: Any) -> frozenset[int]:
    """The tokens that end turns of other roles than the assistant's, and no answer."""
    vocabulary = tokenizer.get_vocab()
    return frozenset(int(vocabulary[token]) for token in _TURN_ENDS if token in vocabulary)


def is_harmony(tokenizer: Any) -> bool:
    vocabulary = tokenizer.get_vocab()
    return all(token in vocabulary for token in HARMONY)


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))


def _state(name: str) -> State:
    return _STATES.get(name, "header")


def _harmony(tokenizer: Any) -> AnswerFormat:
    vocabulary = tokenizer.get_vocab()
    exits: list[Edge] = [(each, "header") for each in (_END, _CALL, _RETURN, _START, _CHANNEL)]
    edges: dict[State, list[Edge]] = {"header": [(_MESSAGE, "content")]}
    for state in ("content", "reasoning"):
        edges[state] = list(exits)
    # A prompt that ends within a message's text is one whose last answer is continued.
    starts, ends = (vocabulary[_MESSAGE],), (vocabulary[_START],)
    opens = _ids(tokenizer, f"{_CHANNEL}final{_MESSAGE}")
    thought = _ids(tokenizer, f"{_CHANNEL}analysis{_MESSAGE}"), (vocabulary[_END],)
    return AnswerFormat(
        edges,
        starts,
        ends,
        opens,
        (),
        thought,
        call_format=call_format(tokenizer),
        within="content",
        initial="header",
        route=_harmony_state,
    )


def _harmony_state(header: str, declared: Declared) -> State:
    address = _ADDRESS.search(header)
    if address and (address[1] or address[2] in declared):
        return "call" if declared else "content"
    return "reasoning" if "analysis" in header else "content"
