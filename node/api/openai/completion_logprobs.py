"""Log-probabilities in the form of OpenAI's completions: four lists, one entry a token in each.

The lists are iterators, which are to be encoded in order.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from ...chat.requests import TokenLogprob

LEAST_LOGPROB: Final = -9999.0
"""OpenAI's API reference has this for a token that is very unlikely; JSON has no infinity."""


class CompletionLogprobs:
    """The log-probabilities of one choice, whose tokens come in order."""

    def __init__(self, prompt: str | None) -> None:
        """`prompt`: the text that the choice begins with, which its first tokens spell, or None if
        it begins with the text of its tokens."""
        self._prompt = None if prompt is None else prompt.encode(errors="replace")
        self._prompt_characters = len(prompt or "")
        self._spelt = 0
        """Bytes of `prompt` that tokens have spelt."""
        self._characters = 0
        """Characters of the text in front of the next token."""
        self._is_first = True

    def of_prompt(self, entries: Sequence[TokenLogprob]) -> dict[str, Iterator[Any]]:
        """The lists for the next tokens of the prompt; its first one has no log-probability."""
        unscored = int(self._is_first and bool(entries))
        self._is_first = self._is_first and not entries
        return _lists(entries, self._offsets(entries, self._length_in_prompt), unscored)

    def of_answer(self, entries: Sequence[TokenLogprob]) -> dict[str, Iterator[Any]]:
        return _lists(entries, self._offsets_in_answer(entries))

    def _offsets_in_answer(self, entries: Sequence[TokenLogprob]) -> Iterator[int]:
        if self._prompt is not None:
            self._prompt, self._characters = None, self._prompt_characters
        yield from self._offsets(entries, _length)

    def _offsets(
        self, entries: Sequence[TokenLogprob], length: Callable[[bytes], int]
    ) -> Iterator[int]:
        for entry in entries:
            yield self._characters
            self._characters += length(entry.bytes)

    def _length_in_prompt(self, raw: bytes) -> int:
        """Characters that a token takes of the prompt's text. 0 for one that the text lacks, such
        as a BOS token."""
        if self._prompt is None:
            return _length(raw)
        if not self._spelt and not self._prompt.startswith(raw):
            raw = raw.removeprefix(b" ")  # SentencePiece begins a text with a space of its own
        if not self._prompt.startswith(raw, self._spelt):
            return 0
        self._spelt += len(raw)
        return _length(raw)


def _lists(
    entries: Sequence[TokenLogprob], offsets: Iterator[int], unscored: int = 0
) -> dict[str, Iterator[Any]]:
    """`unscored`: as many tokens at the beginning have no log-probability."""
    nothing, scored = [None] * unscored, entries[unscored:]
    tops = ({token_name(one): finite(one.logprob) for one in (*e.top, e)} for e in scored)
    return {
        "tokens": map(token_name, entries),
        "token_logprobs": chain(nothing, (finite(entry.logprob) for entry in scored)),
        "top_logprobs": chain(nothing, tops),
        "text_offset": offsets,
    }


def token_name(entry: TokenLogprob) -> str:
    """A token's text; OpenAI's `bytes:` form for a part of a character, and the id of a token that
    has no text, so that different tokens have different names."""
    if not entry.bytes:
        return f"token_id:{entry.id}"
    try:
        return entry.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.bytes)


def _length(raw: bytes) -> int:
    """The characters that begin in these bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def finite(logprob: float) -> float:
    """A number for JSON."""
    return max(LEAST_LOGPROB, logprob)  # NaN gives the least, in this order
