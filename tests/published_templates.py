"""Chat templates of publishers, read from a folder: none of them is copied into this repository.

`CHAT_TEMPLATES` names a folder with any of: files `*.jinja`; JSON files with `chat_template`
anywhere in them; packages (`*.whl`, `*.tar.gz`) that hold such files, as pip downloads them. See
CONTRIBUTING.md.
"""

import json
import os
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

FOLDER = os.environ.get("CHAT_TEMPLATES", "")
_MAX_BYTES = 4 << 20


def published_templates() -> dict[str, str]:
    """The different templates by name; empty without a folder."""
    names: dict[str, str] = {}
    for name, data in _files(Path(FOLDER)) if FOLDER else ():
        text = data.decode("utf-8", "replace")
        if name.endswith(".jinja"):
            _ = names.setdefault(text, name)
        elif '"chat_template"' in text:
            for number, template in enumerate(_templates(_json(text))):
                _ = names.setdefault(template, f"{name} {number}")
    return {name: text for text, name in names.items()}


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as package:
                for entry in package.infolist():
                    if _is_wanted(entry.filename, entry.file_size):
                        yield entry.filename, package.read(entry)
        elif path.name.endswith(".tar.gz"):
            with tarfile.open(path) as package:
                for member in package:
                    file = package.extractfile(member) if member.isfile() else None
                    if file is not None and _is_wanted(member.name, member.size):
                        yield member.name, file.read()
        elif path.is_file() and _is_wanted(path.name, path.stat().st_size):
            yield path.name, path.read_bytes()


def _is_wanted(name: str, size: int) -> bool:
    return name.endswith((".jinja", ".json")) and size <= _MAX_BYTES


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _templates(value: object) -> Iterator[str]:
    """The texts of all `chat_template` in a JSON value."""
    match value:
        case dict():
            for name, each in cast("dict[str, Any]", value).items():
                if name == "chat_template" and isinstance(each, str) and "{" in each:
                    yield each
                yield from _templates(each)
        case list():
            for each in cast("list[object]", value):
                yield from _templates(each)
        case _:
            pass
