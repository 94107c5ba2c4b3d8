"""A tokenizer's files as this engine reads them, in a folder of links for the libraries.

Those read each file again by rules of their own, and some of config.json that no tokenizer needs.
So what they find there is what was read here: settings as clean JSON, and one chat template. Files
that would take minutes or all memory to read are refused.
"""

import json
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

from ..checkpoint.checkpoint import read_config
from ..checkpoint.headers import fault as file_fault
from ..checkpoint.headers import (
    name_in_model,
    optional_object,
    quote,
    read_bytes,
    read_object,
    size_of,
)

_TOKENIZERS: Final = (
    *("tokenizer.json", "tokenizer.*.json", "tekken.json", "vocab*.json", "normalizer.json"),
    *("emoji.json", "byte_maps.json", "entity_vocab.json", "word_*.json", "target_vocab.json"),
    *("merges.txt", "vocab.txt", "dict.txt", "bpe.codes", "*.model", "tokenizer.model.*"),
    *("*.tiktoken", "*.spm", "*.tokenizer"),
)
"""Patterns of the names that transformers' tokenizers have for their vocabularies."""
_MODEL_FIELDS: Final = ("model_type", "tokenizer_class", "model_name", "transformers_version")
"""The fields of config.json by which transformers chooses a tokenizer's class, all texts."""
SETTINGS: Final = "tokenizer_config.json"
_PLUGINS: Final = ("chat_template_type", "tool_parser_type")
"""Fields of it by which mlx-lm imports one of its own modules."""
_PLUGIN: Final = re.compile(r"[a-z0-9_]{1,64}")
_MAX_TEXT_BYTES: Final = 64 << 20
"""The largest tokenizer file; the largest known tokenizer has 35 MB."""
MAX_ENTRIES: Final = 1_000_000
"""The most tokens, and merges: twice the most known (Gemma's 514,906 merges). The library takes
about 20 us of CPU time for each."""
_BYTES_AN_ENTRY: Final = 4  # at least: two quotes, a character and a comma


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a tokenizer's vocabulary, whatever they are."""
    names = sorted(folder.iterdir())
    return [p for p in names if any(fnmatchcase(p.name, pattern) for pattern in _TOKENIZERS)]


def require_reasonable(folder: Path) -> None:
    """Refuses files that are too large. Raises InvalidCheckpoint, which names the file."""
    for path in tokenizer_files(folder):
        if (size := size_of(path)) > _MAX_TEXT_BYTES:
            raise file_fault(path, f"has {size} bytes, over the limit of {_MAX_TEXT_BYTES}")
        if size > MAX_ENTRIES * _BYTES_AN_ENTRY:
            _count(path, read_bytes(path, 0, size))


def _count(path: Path, raw: bytes) -> None:
    match path.name:
        case "merges.txt" | "vocab.txt":
            _limit(path, "lines", raw.count(b"\n"))
        case "tokenizer.json" | "vocab.json":
            strings = raw.count(b'"') // 2
            # Merges as pairs are two strings each; more strings exceed one limit or the other.
            _limit(path, "tokens and parts of merges", strings, factor=3)
            if strings > MAX_ENTRIES:
                _limit_parsed(path, raw)
        case _:
            return


def _limit_parsed(path: Path, raw: bytes) -> None:
    try:
        whole: Any = json.loads(raw)
    except (ValueError, RecursionError):  # the loader reports this error
        return
    table = cast("dict[str, Any]", whole) if isinstance(whole, dict) else {}
    if path.name == "vocab.json":
        _limit(path, "tokens", len(table))
        return
    model = table.get("model")
    for field, what in (("vocab", "tokens"), ("merges", "merges")):
        entries = cast("dict[str, Any]", model).get(field) if isinstance(model, dict) else None
        _limit(
            path, what, len(cast("list[Any]", entries)) if isinstance(entries, dict | list) else 0
        )


def _limit(path: Path, what: str, count: int, factor: int = 1) -> None:
    if count > (limit := factor * MAX_ENTRIES):
        remedy = "Use the tokenizer of the model that this one was made of."
        message = f"has {count:,} {what}, over the limit of {limit:,}"
        raise file_fault(path, message, remedy=remedy)


@contextmanager
def tokenizer_folder(folder: Path, template: str, notes: list[str]) -> Generator[Path]:
    """A folder of the same name with the tokenizer's files and this chat template, "" for none.

    Appends to `notes` what of optional files is not used. Raises InvalidCheckpoint.
    """
    contents = {
        "config.json": _model_fields(folder),
        SETTINGS: _settings(folder, template),
        # Earlier forms of what tokenizer_config.json and tokenizer.json have.
        "special_tokens_map.json": _usable(folder / "special_tokens_map.json", _is_token, notes),
        "added_tokens.json": _usable(folder / "added_tokens.json", _is_id, notes),
    }
    with TemporaryDirectory() as root:
        view = Path(root) / folder.absolute().name
        view.mkdir()
        for path in tokenizer_files(folder):
            (view / path.name).symlink_to(path.absolute())
        for name, fields in contents.items():
            if fields:
                _ = (view / name).write_text(json.dumps(fields))
        yield view


def _model_fields(folder: Path) -> dict[str, object]:
    config = read_config(folder) if (folder / "config.json").exists() else {}
    values = {name: config.get(name) for name in _MODEL_FIELDS}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _settings(folder: Path, template: str) -> dict[str, object]:
    """The file decides which ids a text becomes: one that cannot be read is refused."""
    path = folder / SETTINGS
    settings = read_object(path) if path.exists() else {}
    for field in _PLUGINS:
        name = settings.get(field)
        if name is not None and not (isinstance(name, str) and _PLUGIN.fullmatch(name)):
            raise file_fault(
                path,
                f"has {field} = {quote(name)}, which is not the name of a module of mlx-lm",
                remedy="Use a checkpoint whose chat format mlx-lm has built in.",
            )
    settings.pop("chat_template", None)
    return settings | ({"chat_template": template} if template else {})


def _is_id(value: object) -> bool:
    return type(value) is int


def _is_token(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_token(each) for each in cast("list[object]", value))
    content = cast("dict[str, object]", value).get("content") if isinstance(value, dict) else value
    return isinstance(content, str)


def _usable(path: Path, is_usable: Callable[[object], bool], notes: list[str]) -> dict[str, object]:
    """An optional file's table of usable values."""
    table = optional_object(path, notes)
    dropped = {name: value for name, value in table.items() if not is_usable(value)}
    if dropped:
        notes.append(f"ignored: {name_in_model(path)} has {quote(dropped)}")
    return {name: value for name, value in table.items() if name not in dropped}
