"""Splits an answer's text into content, reasoning and tool calls.

Models mark them in the text. Pure: the segments do not depend on the text's division into deltas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

State = Literal["content", "reasoning", "call", "header"]
"""`header`: text between markers that decides the next state and is no output itself."""

Edge = tuple[str, State]

_CLOSED_WITHIN: Final = 8


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model marks the parts of its answers.

    `edges`: for each state the markers that end it, and the next state. `route` gives the state
    after a header's text. The others are sequences of ids: if `starts` is later in the prompt than
    `ends`, the answer begins in `within`, else in `initial`. Content begins after `opens`, a call
    after `calls`.
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
    route: Callable[[str], State] | None = None
    unmarked: bool = False
    """Whether a call has no markers, so that the marker before it does not belong to it."""

    def without_calls(self) -> "AnswerFormat":
        """The format for a request without tools: text that looks like a call is content."""
        edges = {
            state: [edge for edge in state_edges if edge[1] != "call"]
            for state, state_edges in self.edges.items()
        }
        return replace(self, edges=edges, route=_no_calls(self.route))

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
        spelling = "json_tools"  # what Hermes has between its markers
        return replace(self, edges=edges, unmarked=True, call_format=spelling, **states)

    @property
    def plain(self) -> bool:
        """Whether answers in this format have content only."""
        return not self.unmarked and not any(self.edges.values())

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


def _no_calls(route: Callable[[str], State] | None) -> Callable[[str], State] | None:
    if route is None:
        return None

    def without(header: str) -> State:
        state = route(header)
        return "content" if state == "call" else state

    return without


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

    Either is empty if the state continues from the segment before, or into the next one.
    """

    state: State
    text: str
    opened: str = ""
    closed: str = ""


class AnswerChannels:
    """Splits one answer as it grows."""

    def __init__(self, format: AnswerFormat, state: State) -> None:
        self._format = format
        self._state: State = state
        self._pending = ""
        self._opened = ""

    def feed(self, text: str) -> list[Segment]:
        """The segments that became certain with `text`."""
        segments: list[Segment] = []
        start = max(0, len(self._pending) - self._longest())
        self._pending += text
        while (match := self._match(start)) is not None:
            at, marker, follows = match
            before, self._pending = self._pending[:at], self._pending[at + len(marker) :]
            segments.append(Segment(self._state, before, self._opened, marker))
            self._enter(follows, before, marker)
            start = 0
        if self._state != "header" and (length := len(self._pending) - self._marker_start()):
            segments.append(Segment(self._state, self._pending[:length], self._opened))
            self._pending, self._opened = self._pending[length:], ""
        return segments

    def finish(self) -> list[Segment]:
        """The rest at the end of the answer, with a call or a header that was not closed."""
        rest, self._pending = self._pending, ""
        if not rest and self._state != "call" and not (self._state == "header" and self._opened):
            return []
        return [Segment(self._state, rest, self._opened)]

    def _enter(self, follows: State, before: str, marker: str) -> None:
        if self._state == "header" and self._format.route is not None:
            self._opened, follows = before + marker, self._format.route(before)
        else:
            self._opened = marker
        self._state = follows

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
