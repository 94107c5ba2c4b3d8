"""The prompts of a benchmark: bundled ones, or a user's file; free of MLX."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exo_node.placement.errors import InvalidSettings

MAX_BYTES = 64 << 20
MAX_LABEL = 60


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message; `category` groups figures, "" if the file has none."""

    name: str
    category: str
    text: str


def bundled_prompts() -> tuple[Prompt, ...]:
    """The broad set: stories, questions, code, maths, lists, long contexts and more."""
    return read_prompts(Path(__file__).parent / "broad.jsonl")


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """A `.jsonl` file of objects with "prompt" (also read: "id", "category"), else lines of text.

    Blank lines are ignored. Raises InvalidSettings with the line's number.
    """
    lines = [(n, line.strip()) for n, line in enumerate(_read(path).split("\n"), 1)]
    nonblank = [(number, line) for number, line in lines if line]
    if not nonblank:
        raise _fault(path, "it holds no prompt; write one a line")
    if path.suffix != ".jsonl":
        return tuple(Prompt(f"line {number}", "", line) for number, line in nonblank)
    return tuple(_from_json(path, number, line) for number, line in nonblank)


def _read(path: Path) -> str:
    if not path.is_file():  # a pipe would block for ever
        raise _fault(path, "there is no such file" if not path.exists() else "it is not a file")
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise _fault(path, f"it cannot be read ({error.strerror})") from error
    if len(raw) > MAX_BYTES:
        raise _fault(path, f"it has over {MAX_BYTES / 1e6:.0f} MB; split it")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise _fault(path, f"line {line} is not UTF-8; save the file as UTF-8") from error


def _from_json(path: Path, number: int, line: str) -> Prompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _fault(path, f"line {number} is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise _fault(path, f'line {number} is not an object; write {{"prompt": "…"}}')
    text = _text_of(path, number, fields, "prompt", None)
    if not text.strip():
        raise _fault(path, f"line {number}: prompt is empty; write one or remove the line")
    name = _text_of(path, number, fields, "id", f"line {number}")
    return Prompt(_label(name), _label(_text_of(path, number, fields, "category", "")), text)


def _label(text: str) -> str:
    """A short printable label for a table on a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_LABEL])


def _text_of(
    path: Path, number: int, fields: Mapping[str, Any], field: str, default: str | None
) -> str:
    value = fields.get(field, default)
    if isinstance(value, str):
        return value
    if field == "id" and isinstance(value, int):
        return str(value)
    what = "is missing" if field not in fields else "is not a text"
    raise _fault(path, f'line {number}: {field} {what}; write {{"prompt": "…"}}')


def _fault(path: Path, what: str) -> InvalidSettings:
    return InvalidSettings(f"--prompts {path}: {what}", param="--prompts")
