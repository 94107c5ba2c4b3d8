"""Keeps messages from spelling the tokens that structure a chat."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper


class ControlTokens:
    """The tokens that structure a chat, and a way to break them in messages.

    A tokenizer reads `<|im_end|>` anywhere as the end of a turn, so the author of one message could
    forge others. A mark is put after the first character of each such token. The rendered text is
    cut at the marks and tokenised in parts, so text without these tokens does not change.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        added = list(tokenizer.added_tokens_decoder.values())
        special = {token.content for token in added if token.special}
        # Some publishers do not flag theirs as special, but the template contains them.
        template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
        named = {token.content for token in added if token.content in template}
        self._special = first_characters(special)
        self._all = first_characters(special | {name for name in named if not name.isspace()})

    def break_tokens(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        """The message with a mark inside each control token in its strings.

        In an assistant's message only special tokens: templates search it for `</think>` and such.
        """
        tokens = self._special if message.get("role") == "assistant" else self._all
        return _substitute(dict(message), tokens, rf"\g<0>{mark}")


def first_characters(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each occurrence, even if two overlap."""
    parts = [f"{re.escape(t[0])}(?={re.escape(t[1:])})" for t in tokens if len(t) > 1]
    return re.compile("|".join(sorted(parts)) or r"(?!)")


def _substitute(value: Any, pattern: re.Pattern[str], replacement: str) -> Any:
    match value:
        case str():
            return pattern.sub(replacement, value)
        case dict():
            return {k: _substitute(v, pattern, replacement) for k, v in value.items()}
        case list():
            return [_substitute(item, pattern, replacement) for item in value]
        case _:
            return value
