"""Masks of the tokens that a compiled grammar allows, and the part of an answer under it."""

import os
import resource
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import psutil

from ..tools.channels import AnswerFormat
from .number_bound import NumberBound

if TYPE_CHECKING:
    from llguidance import LLMatcher

GRAMMAR_BYTES: Final = 100 << 20
"""Memory for compiling a grammar, and as much again for the masks of one answer."""
_BYTES_PER_S: Final = 1 << 29
"""An upper bound of a matcher's allocations in a second of CPU time; measured: about 2^27."""
_STATM: Final = (
    os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    if os.path.exists("/proc/self/statm")
    else -1
)


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
