"""Bounds the digits of JSON numbers, which a schema alone leaves without end."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLTokenizer

WHOLE_DIGITS: Final = 19
"""Digits before the point: those of 64 bits."""
DECIMALS: Final = 16
EXPONENT_DIGITS: Final = 3
_RUN: Final = re.compile(rb"(?:(\.)|([eE][+-]?))?([0-9]+)\Z")
_LEADING: Final = re.compile(rb"[0-9]+")
_OF_NUMBERS: Final = frozenset(b"%c" % byte for byte in b"0123456789.eE+-")
_OF_TEXTS: Final = frozenset((b'"', b"x"))
_TAIL: Final = WHOLE_DIGITS + 3
"""The last bytes of a text that matter."""


class NumberBound:
    """Masks the tokens that would give a number too many digits. For one vocabulary.

    Digits of strings are not counted: where a quote or a letter may follow, there is no number.
    """

    def __init__(self, tokenizer: "LLTokenizer") -> None:
        self._tokenizer = tokenizer
        self._longer: list[int] = []
        """At index n the set of tokens that begin with more than n digits."""
        self._of_numbers = self._of_texts = 0
        """The tokens that may continue a number; those that show that this is none."""

    def tail(self, tail: bytes, token: int) -> bytes:
        """The text's last bytes after one more token."""
        return (tail + self._tokenizer.decode_bytes([token]))[-_TAIL:]

    def bounded(self, mask: bytes, tail: bytes) -> bytes:
        """The mask without tokens that give the number at the text's end too many digits.

        Unchanged where nothing but the number could follow.
        """
        if (run := _RUN.search(tail)) is None:
            return mask
        most = DECIMALS if run[1] else EXPONENT_DIGITS if run[2] else WHOLE_DIGITS
        room = max(0, most - len(run[3]))
        self._read_vocabulary()
        if room >= len(self._longer):
            return mask
        allowed = int.from_bytes(mask, "little")
        if allowed & self._of_texts or not allowed & ~self._of_numbers:
            return mask
        return (allowed & ~self._longer[room]).to_bytes(len(mask), "little")

    def _read_vocabulary(self) -> None:
        if self._longer:
            return
        size = self._tokenizer.vocab_size
        texts = [self._tokenizer.decode_bytes([token]) for token in range(size)]
        digits = [len(match[0]) if (match := _LEADING.match(text)) else 0 for text in texts]
        self._of_numbers = _set_of(text[:1] in _OF_NUMBERS for text in texts)
        self._of_texts = _set_of(text[:1] in _OF_TEXTS for text in texts)
        most = min(max(1, *digits), WHOLE_DIGITS + 1)
        self._longer = [_set_of(count > few for count in digits) for few in range(most)]


def _set_of(members: Iterable[bool]) -> int:
    """The set, as bits, of the tokens that are members."""
    return int("".join("01"[each] for each in members)[::-1], 2)
