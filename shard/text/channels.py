"""An answer's text told apart: what is content, what reasoning, what a call of a tool.

A model says which by markers in its text. Pure: text in, segments out, at any division of the text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

State = Literal["content", "reasoning", "call", "header"]
"""`header`: words between markers that decide what follows, and belong to nothing."""

Edge = tuple[str, State]

_CLOSED_WITHIN: Final = 8


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model marks the parts of its answers.

    `edges`: by state the markers that end it, and what follows. `route` decides by a header's text
    what follows it. The others are sequences of ids: a prompt in which `starts` is later than
    `ends` leaves the answer in `within`, any other one in `initial`; behind `opens` content begins,
    behind `calls` a call.
    """

    edges: Mapping[State, Sequence[Edge]] = field(default_factory=dict[State, Sequence[Edge]])
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    opens: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()
    thought: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """What begins and what ends reasoning."""
    call_format: str = ""
    """The name of the spelling of calls; see `answer_format.call_format`."""
    within: State = "reasoning"
    initial: State = "content"
    route: Callable[[str], State] | None = None
    unmarked: bool = False
    """Whether a call stands without markers: what leads to it is none of it."""

    def without_calls(self) -> "AnswerFormat":
        """For a request that declares no tools: what looks like a call is text."""
        edges = {
            state: [edge for edge in found if edge[1] != "call"]
            for state, found in self.edges.items()
        }
        return replace(self, edges=edges, route=_no_calls(self.route))

    def entry(self, prompt: Sequence[int]) -> int | None:
        """The id by which an answer may begin with reasoning that the prompt did not open.

        A prompt whose last ids end some wants none: templates write it that way.
        """
        one = self.initial == "content" and len(self.starts) == 1
        if not one or not self.opens or self.begins_in(prompt) != "content":
            return None
        closed = _last(prompt[-_CLOSED_WITHIN:], self.opens) >= 0
        return None if closed else self.starts[0]

    def whole_content(self) -> "AnswerFormat":
        """For a content that is all text once it has begun: a grammar's."""
        return replace(self, edges={**self.edges, "content": ()})

    def unmarked_call(self) -> "AnswerFormat":
        """For an answer that is one call without markers behind its reasoning."""

        def changed(state: State) -> State:
            return "call" if state == "content" else state

        edges: dict[State, Sequence[Edge]] = {
            state: [(marker, changed(follows)) for marker, follows in found]
            for state, found in self.edges.items()
            if state not in ("content", "call")
        }
        states = {"within": changed(self.within), "initial": changed(self.initial)}
        spelling = "json_tools"  # what Hermes has between its markers
        return replace(self, edges=edges, unmarked=True, call_format=spelling, **states)

    @property
    def plain(self) -> bool:
        """Whether all that this format can say is content."""
        return not self.unmarked and not any(self.edges.values())

    def begins_in(self, prompt: Sequence[int]) -> State:
        """The state that the prompt leaves its answer in: templates may open the reasoning."""
        if not self.starts:
            return self.initial
        start, end = _last(prompt, self.starts), _last(prompt, self.ends)
        return self.within if start > end else self.initial


class ReasoningCount:
    """Tokens of one answer's reasoning, with the markers round it."""

    def __init__(self, format: AnswerFormat, prompt: Sequence[int]) -> None:
        self._starts, self._ends = format.thought
        self._within = format.begins_in(prompt) == "reasoning"
        self._last: tuple[int, ...] = ()
        self.tokens = 0

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            wanted = self._ends if self._within else self._starts
            self._last = (*self._last, token)[-len(wanted) :] if wanted else ()
            self.tokens += self._within
            if wanted and self._last == wanted:
                self.tokens += 0 if self._within else len(wanted)
                self._within, self._last = not self._within, ()


def _no_calls(route: Callable[[str], State] | None) -> Callable[[str], State] | None:
    if route is None:
        return None

    def without(header: str) -> State:
        found = route(header)
        return "content" if found == "call" else found

    return without


def _last(ids: Sequence[int], wanted: tuple[int, ...]) -> int:
    """Where `wanted` begins for the last time; -1 where it is nowhere."""
    if not wanted:
        return -1
    for at in range(len(ids) - len(wanted), -1, -1):
        if ids[at] == wanted[0] and tuple(ids[at : at + len(wanted)]) == wanted:
            return at
    return -1


@dataclass(frozen=True, slots=True)
class Segment:
    """Text of one state. `opened` is what led to it, `closed` the marker that ended it.

    Both are empty where the text goes on from the segment before, or into the next one.
    """

    state: State
    text: str
    opened: str = ""
    closed: str = ""


class Channels:
    """One answer, as it grows."""

    def __init__(self, format: AnswerFormat, state: State) -> None:
        self._format = format
        self._state: State = state
        self._held = ""
        self._opened = ""

    def feed(self, text: str) -> list[Segment]:
        """What became certain with `text`."""
        found: list[Segment] = []
        start = max(0, len(self._held) - self._longest())
        self._held += text
        while (match := self._match(start)) is not None:
            at, marker, follows = match
            before, self._held = self._held[:at], self._held[at + len(marker) :]
            found.append(Segment(self._state, before, self._opened, marker))
            self._enter(follows, before, marker)
            start = 0
        if self._state != "header" and (sure := len(self._held) - self._pending()):
            found.append(Segment(self._state, self._held[:sure], self._opened))
            self._held, self._opened = self._held[sure:], ""
        return found

    def finish(self) -> list[Segment]:
        """The rest, when the answer is over; a call or a header that was not closed among it."""
        rest, self._held = self._held, ""
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
        """The first marker of the state; of two that begin there, the longer one."""
        found: tuple[int, str, State] | None = None
        for marker, to in self._edges():
            at = self._held.find(marker, start)
            if at >= 0 and (found is None or (at, -len(marker)) < (found[0], -len(found[1]))):
                found = (at, marker, to)
        return found

    def _pending(self) -> int:
        """The length of the end that may be the beginning of a marker."""
        held, edges = self._held, self._edges()
        for length in range(min(len(held), self._longest() - 1), 0, -1):
            if any(marker.startswith(held[-length:]) for marker, _ in edges):
                return length
        return 0
