"""Pieces of llguidance's Lark: fixed text, control tokens, JSON documents."""

import json
import re
from collections.abc import Mapping
from typing import Any

from .enforceable import enforceable
from .grammars import SPACES


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_document(schema: Mapping[str, Any]) -> str:
    """A JSON document with finite white space (`grammars.SPACES`).

    Alternatives of `oneOf` that the library cannot distinguish are treated like `anyOf`. Raises
    SchemaFault.
    """
    options = {"whitespace_pattern": SPACES, "coerce_one_of": True}
    return f"%json {json.dumps({**enforceable(schema), 'x-guidance': options})}"


class Words:
    """Writes fixed text in Lark.

    Text that is a token of its own is allowed as that token, which text cannot always spell, and as
    text.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is mlx-lm's wrapper."""
        added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        self._added: dict[str, int] = {text: int(number) for text, number in added.items()}
        longest_first = sorted(map(re.escape, self._added), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(longest_first)})" if longest_first else "(?!)")

    def __call__(self, text: str) -> str:
        parts = [part for part in self._pattern.split(text) if part]
        return " ".join(self._part(part) for part in parts)

    def _part(self, part: str) -> str:
        number = self._added.get(part)
        return quoted(part) if number is None else f"(<[{number}]> | {quoted(part)})"
