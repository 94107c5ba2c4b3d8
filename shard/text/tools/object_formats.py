"""How formats spell calls whose arguments are the members of an object."""

from dataclasses import dataclass
from typing import Final

TOOL: Final = r"(?P<tool>[\w.:/-]{1,256})"


@dataclass(frozen=True)
class ObjectSyntax:
    """How a format spells an object's members."""

    key: str
    """The pattern of a member's name; NAME stands for a declared one. Strings are `quoted`."""
    quotes: str = '"'
    """The pattern of what begins a string; the same text ends it."""
    plain: str = r'[^"\\]+'
    """Text in strings without a meaning of its own."""
    escapes: bool = True
    word: str = r'[^"\[\]{}(),:<]'
    """Characters of values that are no strings."""
    shut: str = r"\}"


JSON: Final = ObjectSyntax(r'"(?P<quoted>(?:[^"\\]|\\.)*+)"\s*+:')
GEMMA: Final = ObjectSyntax(
    r'(?:<\|"\|>)?+(?:(?P<name>NAME)|(?P<name>[^:{}<]{1,256}?))(?:<\|"\|>)?+\s*+:',
    quotes=r'<\|"\|>',
    plain="[^<]+",
    escapes=False,
    word="[^][{}(),:<]",
)
FUNCTION_GEMMA: Final = ObjectSyntax(
    r"(?:(?P<name>NAME)|(?P<name>[^:{}<]{1,256}?))\s*+:",
    quotes="<escape>",
    plain="[^<]+",
    escapes=False,
    word="[^][{}(),:<]",
)
PYTHON: Final = ObjectSyntax(
    r"(?:(?P<name>NAME)|(?P<name>[^\s=(),]{1,256}))\s*+=",
    quotes="""["']""",
    plain=r"""[^"'\\]+""",
    word=r"""[^]["'{}(),:<]""",
    shut=r"\)",
)


@dataclass(frozen=True)
class Objects:
    """Patterns of one format's calls.

    `start`, `end`: of a section. `head`: the text of a call up to its first argument, with the
    group `tool`; its group `outer` matches where the arguments are a member of a JSON object.
    `tail`: the text after a call. No pattern may end with something optional.
    """

    start: str
    end: str
    head: str
    tail: str = ""
    syntax: ObjectSyntax = JSON
    has_objects: bool = False
    """Whether calls are JSON objects, whose members may come in any order."""
    is_single: bool = False
    resumes: str = ""
    """The mark after which text continues, after a section without calls; by default `end`."""


_NAMED: Final = (
    rf'(?P<outer>\{{\s*+"name"\s*+:\s*+"{TOOL}"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+\{{)'
)
HERMES: Final = Objects("<tool_call>", "</tool_call>", _NAMED, has_objects=True)
PLAIN: Final = Objects(
    r"(?:<\|python_tag\|>|```\w*+[ ]*+\n)", r"(?:```\s*+)?+(?=\S)", _NAMED, has_objects=True
)
MISTRAL: Final = Objects(
    r"\[TOOL_CALLS\]",
    r"\]",
    rf"(?:{TOOL}\s*+(?:\[CALL_ID\][^\[]{{0,64}}+)?+\[ARGS\]\s*+\{{|{_NAMED})",
    has_objects=True,
    resumes=r"(?=\[TOOL_CALLS\])",
)
KIMI_K2: Final = Objects(
    r"<\|tool_calls_section_begin\|>",
    r"<\|tool_calls_section_end\|>",
    r"(?:<\|tool_call_begin\|>\s*+)?+(?:functions\.)?+(?P<tool>[\w.:/-]{1,256}):\d+\s*+"
    r"<\|tool_call_argument_begin\|>\s*+\{",
    r"<\|tool_call_end\|>",
)
DEEPSEEK_MARKS: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
"""The tokens round the calls of DeepSeek's models."""
DEEPSEEK_CALL: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")  # noqa: RUF001
"""The tokens that begin one call, separate its name from its arguments, and end it."""
_BEGIN, _SEP, _END = DEEPSEEK_CALL
DEEPSEEK: Final = Objects(
    *DEEPSEEK_MARKS,
    rf"(?:{_BEGIN}\s*+)?+(?:function{_SEP}\s*+{TOOL}\s*+```json\s*+|{TOOL}\s*+{_SEP}\s*+)\{{",
    rf"(?:```\s*+)?+{_END}",
)
HARMONY: Final = Objects(
    "",
    r"(?=<\|(?:end|call|return|start|channel)\|>)",
    rf"[^{{]*?\bto=(?:functions\.)?{TOOL}(?=[\s<])[^{{]*?<\|message\|>\s*+\{{",
    is_single=True,
)
GEMMA_4: Final = Objects(r"<\|tool_call>", r"<tool_call\|>", rf"call:{TOOL}\s*+\{{", syntax=GEMMA)
GEMMA_FUNCTION: Final = Objects(
    "<start_function_call>", "<end_function_call>", rf"call:{TOOL}\s*+\{{", syntax=FUNCTION_GEMMA
)
PYTHONIC: Final = Objects(
    r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", rf"{TOOL}\s*+\(", syntax=PYTHON
)
