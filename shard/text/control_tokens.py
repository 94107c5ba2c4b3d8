"""The tokens that give a chat its structure, kept out of what its messages say."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper


class ControlTokens:
    """The tokens that give a chat its structure, and how to keep messages from spelling them.

    A tokenizer takes `<|im_end|>` for the end of a turn wherever it stands, so whoever may write
    one message could write others. A mark behind the first character of each, at which the rendered
    text is cut before it is tokenised, leaves text without these tokens exactly as it was.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        added = list(tokenizer.added_tokens_decoder.values())
        special = {token.content for token in added if token.special}
        # Some publishers do not flag theirs as special: then the template is what names them.
        template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
        named = {token.content for token in added if token.content in template}
        self._special = _beginnings(special)
        self._all = _beginnings(special | {name for name in named if not name.isspace()})

    def broken(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        """The message with a mark inside each control token that one of its strings spells.

        Of an answer, only the special ones: templates look for `</think>` and the like there.
        """
        tokens = self._special if message.get("role") == "assistant" else self._all
        return _substituted(dict(message), tokens, rf"\g<0>{mark}")


def _beginnings(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each occurrence, also where two overlap."""
    parts = [f"{re.escape(t[0])}(?={re.escape(t[1:])})" for t in tokens if len(t) > 1]
    return re.compile("|".join(sorted(parts)) or r"(?!)")


def _substituted(value: Any, pattern: re.Pattern[str], replacement: str) -> Any:
    match value:
        case str():
            return pattern.sub(replacement, value)
        case dict():
            return {k: _substituted(v, pattern, replacement) for k, v in value.items()}
        case list():
            return [_substituted(item, pattern, replacement) for item in value]
        case _:
            return value
