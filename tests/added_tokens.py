"""Tokenizers that have more tokens than the demo's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIRST = 4096
"""The id of the first added token."""


def add_tokens(folder: Path, names: Sequence[str], *, special: bool = False) -> dict[str, int]:
    """Adds tokens to the demo's tokenizer in `folder`. Returns their ids."""
    file = folder / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(file.read_text())
    ids = {name: FIRST + number for number, name in enumerate(names)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": id, "content": name, "special": special, **flags} for name, id in ids.items()
    ]
    file.unlink()
    file.write_text(json.dumps(tokenizer))
    return ids
