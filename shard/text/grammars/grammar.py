"""Masks of the tokens that a compiled grammar allows, and the part of an answer under it."""

import os
import re
import resource
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import psutil

from ..tools.channels import AnswerFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GRAMMAR_BYTES: Final = 100 << 20
"""Memory for compiling a grammar, and as much again for the masks of one answer."""
_BYTES_PER_S: Final = 1 << 29
"""An upper bound of a matcher's allocations in a second of CPU time; measured: about 2^27."""
_STATM: Final = (
    os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    if os.path.exists("/proc/self/statm")
    else -1
)
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


class Gate(NamedTuple):
    """The start of a grammar in an answer: after the ids `opens`, at once if they are ().

    `entry`: an id with which an answer may begin instead; `opens` must follow later then.
    `call`: an id that begins a tool call, which may replace the grammar's text.
    `may_end`: whether an answer may end before `opens`, with a call.
    """

    opens: tuple[int, ...] = ()
    entry: int | None = None
    call: int | None = None
    may_end: bool = False


def gate_of(
    form: AnswerFormat, prompt: Sequence[int], *, calls: bool, insists: bool = False
) -> Gate | None:
    """The gate of a grammar, which lets reasoning and headers pass.

    None if their end is not known. `calls`: the model may call a tool instead. `insists`: the
    grammar is that of a call, which in formats with headers begins with the first header.
    """
    begins = form.begins_in(prompt)
    headed = form.route is not None
    if headed and insists:
        return Gate() if begins == "header" else None
    if begins == "call" or (calls and len(form.calls) > 1):
        return None
    call = form.calls[0] if calls and form.calls else None
    if begins != "content":
        return Gate(form.opens, None, call, calls and headed) if form.opens else None
    entry = form.entry(prompt)
    return Gate((), None, call) if entry is None else Gate(form.opens, entry, call)


class _Place(NamedTuple):
    phase: Literal["first", "free", "begin", "bound", "ended"]
    """`begin`: bound, before the first token; `first`: the same, and reasoning may come before."""
    last: tuple[int, ...] = ()
    """The last ids, which may begin `opens`."""
    tail: bytes = b""
    """The last bytes of the grammar's text, where numbers are bounded."""


class MemoryGrowth:
    """Estimates the memory that some calls have added to this process.

    Other threads allocate at the same time, so a call counts at most what its CPU time allows.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._before = (0, 0.0)

    def __enter__(self) -> None:
        self._before = _resident(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        resident, cpu_s = self._before
        most = int((time.thread_time() - cpu_s) * _BYTES_PER_S)
        self.bytes += max(0, min(_resident() - resident, most))


def _resident() -> int:
    """Resident bytes of this process; psutil would take longer than most masks."""
    if _STATM < 0:
        return int(psutil.Process().memory_info().rss)
    return int(os.pread(_STATM, 128, 0).split()[1]) * resource.getpagesize()


class TokenGrammar:
    """The grammar of one answer; implements `mtp.grammar.Grammar`."""

    def __init__(
        self,
        matcher: "LLMatcher",
        ends: frozenset[int],
        vocabulary: int,
        gate: Gate,
        field: str = "the grammar",
        numbers: NumberBound | None = None,
    ) -> None:
        """`ends` end an answer; ids below `vocabulary` are allowed outside of the grammar.

        `field` is the request's field of the grammar, for errors. `numbers`: a bound for the digits
        of its numbers.
        """
        self._matcher = matcher
        self._ends = ends
        self._gate = gate
        self._field = field
        self._numbers = numbers
        first = "first" if gate.entry is not None else "free" if gate.opens else "begin"
        self._place = _Place(first)
        self._free_mask = None if gate.may_end else _all_but(ends, vocabulary)
        self._current_mask: bytes | None = None
        """The mask after the committed tokens, once it is computed."""
        self._growth = MemoryGrowth()
        self.failed = ""

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token < 0:  # no token: the answer ends with it
                self._place = _Place("ended")
            self._current_mask = None
            if self._is_bound(self._place, token) and not self._matcher.consume_token(token):
                self._fail()
            self._place = self._place_after(self._place, token)

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        with self._growth:
            return self._masks(drafts)

    def _masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        if self._current_mask is None:
            self._current_mask = self._mask(self._place)
        rows, place, consumed = [self._current_mask], self._place, 0
        for token in drafts:
            mask = rows[-1]
            if mask is not None and not _has(mask, token):
                break
            if self._is_bound(place, token):
                _ = self._matcher.consume_token(token)
                consumed += 1
            place = self._place_after(place, token)
            rows.append(self._mask(place))
        if consumed:
            _ = self._matcher.rollback(consumed)
        return [*rows, *[None] * (len(drafts) + 1 - len(rows))]

    def _is_bound(self, place: _Place, token: int) -> bool:
        """Whether the matcher must consume `token` at `place`."""
        if place.phase in ("free", "ended") or token in self._ends:
            return False
        return token not in self._exceptions(place)

    def _exceptions(self, place: _Place) -> list[int]:
        """Ids that are allowed at `place` without being part of the grammar's text."""
        entry = [self._gate.entry] if place.phase == "first" else []
        call = [self._gate.call] if place.phase in ("first", "begin") else []
        return [token for token in (*entry, *call) if token is not None]

    def _place_after(self, place: _Place, token: int) -> _Place:
        if place.phase == "ended" or token in self._ends:
            return _Place("ended")
        if place.phase == "free" or (place.phase == "first" and token == self._gate.entry):
            last = (*place.last, token)[-len(self._gate.opens) :]
            return _Place("begin") if last == self._gate.opens else _Place("free", last)
        if token in self._exceptions(place):
            return _Place("ended")
        tail = b"" if self._numbers is None else self._numbers.tail(place.tail, token)
        return _Place("bound", tail=tail)

    def _mask(self, place: _Place) -> bytes | None:
        match place.phase:
            case "ended":
                return None
            case "free":
                return self._free_mask
            case "first" | "begin" | "bound":
                mask = self._matcher.compute_bitmask()
                if self._growth.bytes > GRAMMAR_BYTES:
                    self._fail(f"its states take more than {GRAMMAR_BYTES // 10**6} MB")
                    return bytes(len(mask))
                if self._matcher.is_error() or not any(mask):
                    self._fail()
                    return bytes(len(mask))
                if self._numbers is not None:
                    mask = self._numbers.bounded(mask, place.tail)
                return _with(mask, self._exceptions(place))

    def _fail(self, why: str = "") -> None:
        why = why or self._matcher.get_error() or "nothing may follow"
        message = f"the answer cannot be kept to '{self._field}' any longer: {why[:300]}"
        self.failed = self.failed or message


def _has(mask: bytes, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def _with(mask: bytes, tokens: Sequence[int]) -> bytes:
    if not tokens:
        return mask
    changed = bytearray(mask)
    for token in tokens:
        changed[token // 8] |= 1 << token % 8
    return bytes(changed)


def _all_but(tokens: frozenset[int], vocabulary: int) -> bytes:
    mask = bytearray(b"\xff" * -(-vocabulary // 8))
    for token in tokens:
        mask[token // 8] &= ~(1 << token % 8) & 0xFF
    return bytes(mask)
