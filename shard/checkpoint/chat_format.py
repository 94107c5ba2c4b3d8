"""A checkpoint's chat templates, and their abilities, read as text: none is rendered here."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from .headers import name_in_model, optional_object, optional_text, quote

if TYPE_CHECKING:
    from ...placement.card import Capability

_TOOLS: Final = re.compile(r"\btools\b")
_TOGGLE: Final = re.compile(r"\b(enable_thinking|thinking)\b")
_THINKING: Final = re.compile(
    r"</?(longcat_)?think>|<\|think:|<\|channel>|\b(enable_thinking|reasoning_effort)\b"
)
"""The marks of thoughts that mlx-lm knows, and variables that turn thoughts on or limit them."""

_CALLS: Final = re.compile(
    r"<minimax:tool_call>|<\|tool_call>|<start_function_call>|<(?:longcat_|seed:)?tool_call>"
    r"|<\|tool_(?:list|call)_start\|>|<\|tool_calls_section_begin\|>|<function name=|\[TOOL_CALLS\]"
    r"|<atem:function_calls>|<arg_key>|<\|call\|>|<｜tool▁calls▁begin｜>|｜DSML｜|<\|python_tag\|>"  # noqa: RUF001
    r"|<\|open\|>"
)
"""The marks of the calls that are read; `shard/text/tools/call_formats.py` has their syntax."""
_OTHER_CALLS: Final = re.compile(
    r"<\|tool_call\|>|<tool_calls>|<TOOLCALL>|<\|START_ACTION\|>|\bAction:|<\|tools_prefix\|>"
    r"|<function=|>>>|<\|function_call\|>|<tool_request>"
)
"""Marks of calls in formats that it does not read."""
_JSON_CALL: Final = re.compile(
    r"""\\?["']name\\?["'].{0,200}?\\?["'](?:parameters|arguments)\\?["']""", re.DOTALL
)
"""A call as a JSON object, which is read where it is a whole answer."""

_FILES: Final = (
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "tokenizer_config.json",
)
_DEFAULT: Final = "default"
_WITH_TOOLS: Final = "tool_use"
EXTRA_FILES: Final = tuple(
    f"additional_chat_templates/{name}.jinja" for name in (_DEFAULT, _WITH_TOOLS)
)
"""Templates beside those of the first file: transformers' form of several of them."""


def chat_templates(folder: Path, notes: list[str]) -> dict[str, str]:
    """The chat templates `default`, and `tool_use` where chats with tools have one of their own.

    Empty without any. They are those of the first file that has any, in the order of transformers'
    processors, and `additional_chat_templates/`. Appends to `notes` each file that cannot be read.
    """
    templates: dict[str, str] = {}
    for name in _FILES:
        read = _jinja if name.endswith(".jinja") else _in_json
        if templates := read(folder / name, notes):
            break
    for path in (folder / name for name in EXTRA_FILES):
        if extra := _jinja(path, notes):
            templates[path.stem] = extra[_DEFAULT]
    if not templates:
        return {}
    first = next(iter(templates.values()))
    default = templates.get(_DEFAULT, templates.get(_WITH_TOOLS, first))
    with_tools = templates.get(_WITH_TOOLS, default)
    return {_DEFAULT: default} | ({_WITH_TOOLS: with_tools} if with_tools != default else {})


def capabilities(folder: Path, notes: list[str] | None = None) -> "tuple[Capability, ...]":
    """Tools and thinking as the templates mention them; empty without a readable template."""
    text = "\n".join(chat_templates(folder, [] if notes is None else notes).values())
    abilities: list[Capability] = []
    if _THINKING.search(text):
        abilities.append("thinking")
        if _TOGGLE.search(text):
            abilities.append("thinking_toggle")
    if _TOOLS.search(text):
        if reads_calls(text):
            abilities.append("tools")
        elif notes is not None:
            notes.append(
                "no tools: nothing here reads calls as this model's chat template has them; "
                "tool_choice 'required' makes it call in JSON"
            )
    return tuple(abilities)


def reads_calls(template: str) -> bool:
    """Whether this node reads the calls of a model with this template."""
    is_plain = _JSON_CALL.search(template) and not _OTHER_CALLS.search(template)
    return bool(_CALLS.search(template) or is_plain)


def _jinja(path: Path, notes: list[str]) -> dict[str, str]:
    text = optional_text(path, notes)
    return {_DEFAULT: text} if text.strip() else {}


def _in_json(path: Path, notes: list[str]) -> dict[str, str]:
    value = optional_object(path, notes).get("chat_template")
    named = _named(value)
    if not named and value not in (None, "", []):
        at = name_in_model(path)
        notes.append(f"ignored: {at} has a chat_template that is no template: {quote(value)}")
    return named


def _named(value: object) -> dict[str, str]:
    """The templates of one text, of a list of `{"name": …, "template": …}`, or of an object."""
    if isinstance(value, dict):
        pairs = list(cast("dict[str, object]", value).items())
    elif isinstance(value, list):
        entries = [each for each in cast("list[object]", value) if isinstance(each, dict)]
        tables = cast("list[dict[str, object]]", entries)
        pairs = [(str(each.get("name")), each.get("template")) for each in tables]
    else:
        pairs = [(_DEFAULT, value)]
    return {name: text for name, text in pairs if isinstance(text, str) and text.strip()}
