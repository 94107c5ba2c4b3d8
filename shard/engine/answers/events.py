"""One answer between engine and reader: its events, and a handle for the reader's thread."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....mtp.stats import StatsCollector
from ....mtp.types import FinishReason, GenerationStats, Prefilled, Rebuilt, Round, Step
from ..compute import ComputeThread, as_exception
from ..request import MAX_UNREAD_EVENTS, Parameters, Request

if TYPE_CHECKING:
    from ...text.codec import TextCodec
    from .text_engine import TextEngine


@dataclass(frozen=True, slots=True)
class Delta:
    """One round and the text that became certain with it."""

    round: Round
    text: str


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of an answer, with the text that was withheld until now."""

    reason: FinishReason
    text: str
    stats: GenerationStats
    identity: str
    batch_identity: str = "off"
    stopped_by: str = ""
    """The stop string that ended the answer, if one did."""


@dataclass(frozen=True, slots=True)
class RebuiltText:
    """Progress through the rounds of an earlier attempt, with the text that it delivered."""

    rounds: int
    total: int
    text: str


EngineEvent = Prefilled | RebuiltText | Delta | AnswerEnd
Deliver = Callable[[EngineEvent], None]
"""Takes the events of an answer."""
OnEnd = Callable[[BaseException | None], None]
"""Called once, after the last event: None after an `AnswerEnd`, else the error."""


class AnswerEvents:
    """Turns the steps of one answer into events with text, and counts them for its stats."""

    def __init__(self, request: Parameters, codec: "TextCodec", clock: Callable[[], float]) -> None:
        """`codec` makes text of the answer's tokens; `clock` gives seconds."""
        self.request = request
        self.text = codec.stream(
            request.stop_strings(),
            ignore_end=request.limits.ignore_eos,
            continues=request.output.continues,
            more_ends=codec.infill_ends if request.fills_gap else frozenset(),
        )
        self.stats = StatsCollector(clock, request.fetch_s)
        self.ids = list[int]()
        """The answer's tokens."""
        for round_ in request.replay:
            self.stats.add(round_, replayed=True)
            self.ids += round_.tokens

    def event(self, step: Step) -> EngineEvent:
        """The event of a step, with the text that became certain with it."""
        match step:
            case Round():
                self.stats.add(step)
                self.ids += step.tokens
                return Delta(step, self.text.take())
            case Rebuilt():
                return RebuiltText(step.rounds, step.total, self.text.take())
            case Prefilled():
                return step


class AnswerHandle:
    """The handle of an answer that the compute thread computes."""

    def __init__(self, engine: "TextEngine", compute: ComputeThread) -> None:
        self._engine = engine
        self._compute = compute
        self._request: Request | None = None
        self._is_cancelled = False

    def begin(self, parameters: Parameters, deliver: Deliver, on_end: OnEnd) -> None:
        """Compute thread: adds the request to the engine, unless it was cancelled before."""
        if self._is_cancelled:
            on_end(None)
            return
        try:
            self._request = self._engine.begin(parameters, deliver, on_end)
        except BaseException as fault:  # the edge of this thread: the reader gets it
            on_end(as_exception(fault))

    def acknowledge(self) -> None:
        """Any thread: the reader took an event. Wakes the engine if the request was paused."""
        if (request := self._request) is not None:
            request.events_read += 1
            if request.events_delivered - request.events_read == MAX_UNREAD_EVENTS - 1:
                self._compute.post(lambda: None)

    def cancel(self) -> None:
        """Any thread: ends the answer, unless it has ended."""
        self._compute.post(self._cancel)

    def _cancel(self) -> None:
        self._is_cancelled = True
        if self._request is not None:
            self._engine.cancel(self._request)
