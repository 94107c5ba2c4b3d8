"""Splits an answer's text into content, reasoning and tool calls.

Models mark them in the text. The end of a call is found by its own syntax. Pure: the segments do
not depend on the text's division into deltas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from .call_formats import BARE_MARKS, scanner_for
from .call_scanners import Declared, Scan, Scanner, declared_names
from .object_calls import ObjectScanner

State = Literal["content", "reasoning", "call", "header"]
"""`header`: text between markers that decides the next state and is no output itself."""

Edge = tuple[str, State]

_CLOSED_WITHIN: Final = 8


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model marks the parts of its answers.

    `edges`: for each state but calls the markers that end it, and the next state. `route` gives
    the state after a header's text. The others are sequences of ids: if `starts` is later in the
    prompt than `ends`, the answer begins in `within`, else in `initial`. Content begins after
    `opens`, a call after `calls`.
    """

    edges: Mapping[State, Sequence[Edge]] = field(default_factory=dict[State, Sequence[Edge]])
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    opens: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()
    thought: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """The ids that begin and end reasoning."""
    call_format: str = ""
    """The name of the call format; see `answer_format.call_format`."""
    within: State = "reasoning"
    initial: State = "content"
    route: Callable[[str, Declared], State] | None = None
    unmarked: bool = False
    """Whether a call has no markers, so that the marker before it does not belong to it."""
    declared: Declared = field(default_factory=dict[str, frozenset[str]])
    """The request's tools."""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "AnswerFormat":
        """The format for a request with tools."""
        declared = declared_names(tools)
        edges = dict(self.edges)
        bare: Edge = (BARE_MARKS.get(self.call_format, ""), "call")
        if bare[0] and "content" in edges and bare not in edges["content"]:
            edges["content"] = [*edges["content"], bare]
        return replace(self, declared=declared, edges=edges)

    def without_calls(self) -> "AnswerFormat":
        """The format for a request without tools: text that looks like a call is content."""
        edges = {
            state: [edge for edge in state_edges if edge[1] != "call"]
            for state, state_edges in self.edges.items()
        }
        return replace(self, edges=edges, declared={})

    def entry(self, prompt: Sequence[int]) -> int | None:
        """The id that begins reasoning, if an answer may begin with it.

        None if the prompt opens reasoning, or if its last ids close it: templates turn it off so.
        """
        one = self.initial == "content" and len(self.starts) == 1
        if not one or not self.opens or self.begins_in(prompt) != "content":
            return None
        closed = _last(prompt[-_CLOSED_WITHIN:], self.opens) >= 0
        return None if closed else self.starts[0]

    def whole_content(self) -> "AnswerFormat":
        """The format for an answer under a grammar, whose content has no markers."""
        return replace(self, edges={**self.edges, "content": ()})

    def unmarked_call(self) -> "AnswerFormat":
        """The format for an answer that is one call without markers after its reasoning."""

        def renamed(state: State) -> State:
            return "call" if state == "content" else state

        edges: dict[State, Sequence[Edge]] = {
            state: [(marker, renamed(follows)) for marker, follows in state_edges]
            for state, state_edges in self.edges.items()
            if state not in ("content", "call")
        }
        states = {"within": renamed(self.within), "initial": renamed(self.initial)}
        return replace(self, edges=edges, unmarked=True, call_format="", **states)

    @property
    def plain(self) -> bool:
        """Whether answers in this format have content only."""
        return not self.unmarked and not self.declared and not any(self.edges.values())

    def begins_in(self, prompt: Sequence[int]) -> State:
        """The state in which the answer to `prompt` begins: templates may open the reasoning."""
        if not self.starts:
            return self.initial
        start, end = _last(prompt, self.starts), _last(prompt, self.ends)
        return self.within if start > end else self.initial


class ReasoningCount:
    """Counts the tokens of one answer's reasoning, including its markers."""

    def __init__(self, format: AnswerFormat, prompt: Sequence[int]) -> None:
        self._starts, self._ends = format.thought
        self._within = format.begins_in(prompt) == "reasoning"
        self._last: tuple[int, ...] = ()
        self.tokens = 0

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            marker = self._ends if self._within else self._starts
            self._last = (*self._last, token)[-len(marker) :] if marker else ()
            self.tokens += self._within
            if marker and self._last == marker:
                self.tokens += 0 if self._within else len(marker)
                self._within, self._last = not self._within, ()


def _last(ids: Sequence[int], marker: tuple[int, ...]) -> int:
    """The last index of `marker` in `ids`; -1 if there is none."""
    if not marker:
        return -1
    for start in range(len(ids) - len(marker), -1, -1):
        if ids[start] == marker[0] and tuple(ids[start : start + len(marker)]) == marker:
            return start
    return -1


@dataclass(frozen=True, slots=True)
class Segment:
    """Text of one state; `opened`: the marker or header before it, `closed`: the marker after it.

    Either is empty if the state continues from the segment before, or into the next one. A call's
    text has its markers; `scans` are those of this part of it. `ends`: it is the last part.
    `is_whole`: the section's text so far is calls, up to its end.
    """

    state: State
    text: str
    opened: str = ""
    closed: str = ""
    scans: tuple[Scan, ...] = ()
    ends: bool = False
    is_whole: bool = False


class AnswerChannels:
    """Splits one answer as it grows."""

    def __init__(self, format: AnswerFormat, state: State) -> None:
        self._format = format
        self._state: State = state
        self._pending = ""
        self._opened = ""
        self._scanner: Scanner | None = None
        """The scanner of the call that has begun, or that content without a mark may be."""
        self._origin: State = "content"
        """The state before the call."""
        self._scans: list[Scan] = []
        """Scans of the call's text that is held back."""
        self._is_held = False
        """Whether what the scanner reads is held back: other text may show that it is no call."""
        self._may_be_call = bool(format.declared) and not format.unmarked
        """Whether content that now begins may be a call as a whole."""
        if state == "call":
            self._scanner = scanner_for(format.call_format, format.declared)

    def feed(self, text: str) -> list[Segment]:
        """The segments that became certain with `text`."""
        segments: list[Segment] = []
        while text:
            if self._scanner is None:
                text = self._feed_text(text, segments)
            else:
                text = self._feed_call(text, self._scanner, segments)
        return segments

    def finish(self, *, stopped: bool = True) -> list[Segment]:
        """The rest at the end of the answer, with a call or a header that was not closed.

        `stopped`: the answer was not cut, so its end may be that of a call.
        """
        segments: list[Segment] = []
        if self._scanner is not None:
            text = self._finish_call(self._scanner, segments, stopped=stopped)
            if not text:
                return segments
            segments += self.feed(text)
            return segments + self.finish(stopped=stopped)
        rest, self._pending = self._pending, ""
        if not rest and not (self._state == "header" and self._opened):
            return []
        return [Segment(self._state, rest, self._opened)]

    def _feed_text(self, text: str, segments: list[Segment]) -> str:
        """Adds the segments that are no calls; the text that is left is a call's."""
        start = max(0, len(self._pending) - self._longest())
        self._pending += text
        while not (begins := self._begins_call()) and (match := self._match(start)) is not None:
            at, marker, follows = match
            before, rest = self._pending[:at], self._pending[at + len(marker) :]
            opened = marker
            if self._state == "header" and self._format.route is not None:
                opened, follows = before + marker, self._format.route(before, self._format.declared)
            if begins := follows == "call" and not self._format.unmarked:
                if self._state != "header" and before:
                    segments.append(Segment(self._state, before, self._opened))
                before, rest = "", opened + rest
            else:
                segments.append(Segment(self._state, before, self._opened, marker))
            self._origin, self._state = self._state, follows
            self._opened, self._pending = opened, rest
            if begins or follows == "call":
                begins = True
                break
            start = 0
        if begins:
            self._is_held = self._state != "call"
            name = "" if self._is_held else self._format.call_format
            self._scanner = scanner_for(name, self._format.declared)
            text, self._pending = self._pending, ""
            return text
        if self._state != "header" and (length := len(self._pending) - self._marker_start()):
            segments.append(Segment(self._state, self._pending[:length], self._opened))
            self._pending, self._opened = self._pending[length:], ""
        return ""

    def _begins_call(self) -> bool:
        """Whether content begins that may be a call without a mark: JSON, perhaps in a fence."""
        if self._state != "content" or not self._may_be_call or not self._pending.strip():
            return False
        self._may_be_call = False
        return self._pending.lstrip()[0] in "{`"

    def _feed_call(self, text: str, scanner: Scanner, segments: list[Segment]) -> str:
        """Adds the segments of a call; the text that is left comes after it, or is none."""
        self._pending += text
        self._scans += scanner.feed(text)
        if scanner.is_over and (self._is_held or not scanner.has_calls):
            return self._retry(scanner) or self._reject(segments)
        if self._is_held or not scanner.has_calls:
            return ""
        length = len(self._pending) - len(scanner.rest)
        if length or self._scans or scanner.is_over:
            segments.append(self._segment(length, scanner, ends=scanner.is_over))
        return self._leave() if scanner.is_over else ""

    def _finish_call(self, scanner: Scanner, segments: list[Segment], *, stopped: bool) -> str:
        if stopped:
            self._scans += scanner.finish()
        has_rest = bool(scanner.rest.strip())
        whole = scanner.is_whole and not has_rest if self._is_held else scanner.has_calls
        if stopped and not whole:
            return self._reject(segments)
        ends = scanner.is_over and has_rest and not self._is_held
        length = len(self._pending) - len(scanner.rest) if ends else len(self._pending)
        segments.append(self._segment(length, scanner, ends=ends))
        return self._leave()

    def _segment(self, length: int, scanner: Scanner, *, ends: bool) -> Segment:
        text, self._pending = self._pending[:length], self._pending[length:]
        scans, self._scans = () if self._is_held else tuple(self._scans), []
        return Segment("call", text, scans=scans, ends=ends, is_whole=scanner.is_whole)

    def _retry(self, scanner: Scanner) -> str:
        """The call's text, if it is to be read as JSON, which models write between other marks."""
        inner = self._pending.removeprefix(self._opened).lstrip()
        if self._is_held or not inner.startswith("{") or isinstance(scanner, ObjectScanner):
            return ""
        self._scanner = scanner_for("json_tools", self._format.declared)
        text, self._pending, self._scans = self._pending, "", []
        return text

    def _reject(self, segments: list[Segment]) -> str:
        """Leaves what is no call: its mark is text of the state before it."""
        mark = "" if self._is_held or self._format.unmarked else self._opened
        origin: State = "content" if self._origin == "header" else self._origin
        if mark:
            segments.append(Segment(origin, mark))
        self._pending, self._scans = self._pending[len(mark) :], []
        text = self._leave()
        self._state = "content" if self._format.unmarked else origin
        return text

    def _leave(self) -> str:
        """Leaves the call; the text after it."""
        text, self._pending, self._opened = self._pending, "", ""
        self._scanner, self._is_held, self._may_be_call = None, False, False
        self._state = self._origin = "content"
        return text

    def _edges(self) -> Sequence[Edge]:
        return self._format.edges.get(self._state, ())

    def _longest(self) -> int:
        return max((len(marker) for marker, _ in self._edges()), default=0)

    def _match(self, start: int) -> tuple[int, str, State] | None:
        """The first marker of the state; of two at the same place, the longer one."""
        best: tuple[int, str, State] | None = None
        for marker, to in self._edges():
            at = self._pending.find(marker, start)
            if at >= 0 and (best is None or (at, -len(marker)) < (best[0], -len(best[1]))):
                best = (at, marker, to)
        return best

    def _marker_start(self) -> int:
        """The length of the end of the pending text that may begin a marker."""
        return max((overlap(self._pending, marker) for marker, _ in self._edges()), default=0)


def overlap(text: str, marker: str) -> int:
    """The length of the longest suffix of `text` that is a true prefix of `marker`."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if marker.startswith(text[-length:])), 0)
