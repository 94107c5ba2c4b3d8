"""The abilities of a checkpoint's chat template, read as text: it is not rendered here."""

import re
from pathlib import Path
from typing import Any, Final, cast

from ...placement.card import Capability
from ...placement.errors import InvalidCheckpoint
from .headers import MAX_OBJECT_BYTES, read_object, read_whole

_TOOLS: Final = re.compile(r"\btools\b")
_TOGGLE: Final = re.compile(r"\b(enable_thinking|thinking)\b")
_THINKING: Final = re.compile(
    r"</?(longcat_)?think>|<\|think:|<\|channel>|\b(enable_thinking|reasoning_effort)\b"
)
"""The marks of thoughts that mlx-lm knows, and variables that turn thoughts on or limit them."""


def capabilities(folder: Path) -> tuple[Capability, ...]:
    """Tools and thinking as the template mentions them; empty without a readable template."""
    try:
        text = _template(folder)
    except InvalidCheckpoint:  # a load of the model names the file and the fault
        return ()
    abilities: list[Capability] = []
    if _THINKING.search(text):
        abilities.append("thinking")
        if _TOGGLE.search(text):
            abilities.append("thinking_toggle")
    if _TOOLS.search(text):
        abilities.append("tools")
    return tuple(abilities)


def _template(folder: Path) -> str:
    """The text of all templates, in the order in which transformers looks for them."""
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        return read_whole(jinja, MAX_OBJECT_BYTES).decode("utf-8", "replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        if path.exists() and (text := _texts(read_object(path))):
            return text
    return ""


def _texts(config: dict[str, Any]) -> str:
    """One template, or a list of `{"name": …, "template": …}`."""
    value: object = config.get("chat_template")
    if isinstance(value, str):
        return value
    named = cast("list[object]", value) if isinstance(value, list) else []
    entries = [cast("dict[str, object]", entry) for entry in named if isinstance(entry, dict)]
    return "\n".join(text for e in entries if isinstance(text := e.get("template"), str))
