"""The format of a checkpoint's answers, derived from its tokenizer's vocabulary and template."""

from typing import Any, Final

from .channels import AnswerFormat, Edge, State

_STATES: Final[dict[str, State]] = {"normal": "content", "reasoning": "reasoning", "tool": "call"}
"""States by mlx-lm's names; all other names are headers."""

HARMONY: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
"""Tokens of OpenAI's Harmony format, as its specification names them."""
_START, _CHANNEL, _MESSAGE, _END, _CALL, _RETURN = HARMONY

_ENFORCED: Final = ("Harmony", "DeepSeek", "json_tools", "qwen3_coder", "glm47")
DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
"""The tokens round the calls of DeepSeek's models."""
DEEPSEEK_CALL: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")  # noqa: RUF001
"""The tokens that begin one call, separate its name from its arguments, and end it."""


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
    start, end = call_markers(tokenizer)
    if start:
        for state in ("content", "reasoning"):
            if state in edges and not any(to == "call" for _, to in edges[state]):
                edges[state].append((start, "call"))
        edges["call"] = [(end, "content")] if end else []
    for marker in tokenizer.structural_markers:
        edges["content"].append((marker, "content"))
    return AnswerFormat(
        edges,
        starts=tuple(tokenizer.think_start_tokens or ()),
        ends=tuple(tokenizer.think_end_tokens or ()),
        opens=tuple(tokenizer.think_end_tokens or ()),
        calls=_ids(tokenizer, start) if start else (),
        thought=(
            tuple(tokenizer.think_start_tokens or ()),
            tuple(tokenizer.think_end_tokens or ()),
        ),
        call_format=call_format(tokenizer),
        initial=_state(tokenizer.response_initial_state or "normal"),
    )


def call_markers(tokenizer: Any) -> tuple[str, str]:
    """The markers round a call; empty if the model has no known call format."""
    if tokenizer.has_tool_calling:
        return tokenizer.tool_call_start, tokenizer.tool_call_end or ""
    return DEEPSEEK if is_deepseek(tokenizer) else ("", "")


def call_format(tokenizer: Any) -> str:
    """The name of a model's call format; empty if it has no known one."""
    if is_harmony(tokenizer):
        return "Harmony"
    if is_deepseek(tokenizer):
        return "DeepSeek"
    if not tokenizer.has_tool_calling:
        return ""
    return str(tokenizer.tool_parser.__module__).rpartition(".")[2]


def has_call_grammar(tokenizer: Any) -> bool:
    """Whether a required call can be enforced in the model's own format."""
    return call_format(tokenizer) in _ENFORCED


def is_deepseek(tokenizer: Any) -> bool:
    vocabulary = tokenizer.get_vocab()
    return all(token in vocabulary for token in DEEPSEEK)


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
    for state in ("content", "reasoning", "call"):
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


def _harmony_state(header: str) -> State:
    if "to=functions." in header:
        return "call"
    return "reasoning" if "analysis" in header else "content"
