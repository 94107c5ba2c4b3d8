"""The prompts that readers help this runner to read: begun, sent on, taken back, or read alone."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ...mtp.seams import ForwardOutput
from ...mtp.types import Prefilled
from ...placement.errors import ExoNodeError
from ...placement.gpu_faults import is_failed_command
from ...placement.reading import MIN_FORWARDS
from .prefill_forward import PrefillForward
from .prefixes.encoding import CONTENT_FAULTS
from .prefixes.store import PrefixStore
from .reading.shared_reading import SentForward, SharedReading, reading_fault
from .reading.views import VIEW_FAULTS, LayerViews
from .request import Request
from .scheduler import Flight
from .states.state import State
from .step_outcome import StepOutcome

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ReadFlight(Flight):
    """A forward over a prompt of which readers compute the upper layers."""

    reading: SharedReading
    forward: SentForward

    @property
    def is_away(self) -> bool:
        return True

    @property
    def is_back(self) -> bool:
        return self.forward.trip.is_back or self.reading.is_closed

    @property
    def is_chunk(self) -> bool:
        return True


Commit = Callable[[Request, State, int, ForwardOutput, int], list[StepOutcome]]
"""Commits the rows of a forward from a row up to `Request.rows`; last the number of requests."""


class PromptReadings:
    """All methods run on the compute thread."""

    def __init__(
        self,
        views: LayerViews | None,
        prefixes: PrefixStore,
        states: dict[Request, State],
        clock: Callable[[], float],
        commit: Commit,
        live_bytes: Callable[[], int],
    ) -> None:
        """`states`: of requests that are in no batch. `live_bytes`: of all requests."""
        self._views = views
        self._prefixes = prefixes
        self._states = states
        self._clock = clock
        self._commit = commit
        self._live_bytes = live_bytes
        self._readings: dict[Request, SharedReading] = {}
        self._flights: dict[SharedReading, list[ReadFlight]] = {}

    def of(self, request: Request) -> SharedReading | None:
        """How a prompt is read with others now; None if it is not."""
        return self._readings.get(request)

    def begin(self, request: Request, state: State) -> None:
        """Begins to read a prompt with its readers, if that can be."""
        readers, images = request.parameters.readers, request.images
        assert readers is not None
        try:
            forwards = sum(end > state.rows for end in request.ends)
            if forwards < MIN_FORWARDS or request.parameters.output.prompt_logprobs:
                raise ValueError(f"{forwards} forwards over the rest of it are too few")
            if images is not None and images.deep_layers > readers.layers[0].first:
                raise ValueError("layers of readers need the images")
            assert self._views is not None, "the service drops readers otherwise"
            if self._views.drafts_from_layers and state.draft is not None:
                raise ValueError("a block drafter needs the outputs of the readers' inner layers")
            borders = self._prefixes.borders(request.path, state.rows)
            reading = SharedReading(
                self._views, readers, state, request.prompt, request.ends, borders, request.key
            )
        except VIEW_FAULTS as fault:
            readers.outcome.reason = f"read alone: {reading_fault(fault)}"
            readers.close()
            return
        request.batches_prompt = False
        readers.outcome.seconds = -self._clock()
        self._readings[request], self._flights[reading] = reading, []

    def send(self, request: Request, forward: PrefillForward) -> ReadFlight | None:
        """Sends a forward of the lower layers to the readers; None if they read no more."""
        reading = self._readings.get(request)
        if reading is None or request.phase == "finished":
            return None
        begin, end = forward.begin(0), forward.ends[0]
        hidden = forward.outputs[0].hidden
        assert hidden is not None
        placing = (0, ()) if request.images is None else request.images.placing(begin, end)
        flight = ReadFlight((request,), reading, reading.send(begin, end, hidden, *placing))
        mx.clear_cache()
        request.rows = end
        self._flights[reading].append(flight)
        self._let_follow(request, reading)
        return flight

    def _let_follow(self, request: Request, reading: SharedReading) -> None:
        for flight in self._flights[reading]:
            flight.may_be_followed = reading.has_room and request.rows < len(request.prompt)

    def land(self, flight: ReadFlight, running: int) -> list[StepOutcome]:
        """Takes what the readers returned of a forward; without them the prompt is read alone."""
        (request,), reading = flight.requests, flight.reading
        if self._readings.get(request) is not reading:
            return []  # it has ended
        self._flights[reading].remove(flight)
        try:
            landed = reading.land(flight.forward)
        except (ExoNodeError, *CONTENT_FAULTS) as fault:
            if not isinstance(fault, ExoNodeError) and is_failed_command(str(fault)):
                raise
            return self._read_alone(request, reading, reading_fault(fault))
        sent_rows, request.rows = request.rows, landed.end
        outcomes = list[StepOutcome]()
        if landed.output is not None:
            outcomes = self._commit(request, reading.state, landed.begin, landed.output, running)
        if landed.end == len(request.prompt):
            self.end(request)
            return outcomes
        if reading.state.draft is not None:
            mx.async_eval(reading.state.draft.arrays())
        state = reading.mark(flight.forward)
        if state is not None and request.uses_cache:
            self._prefixes.keep(request.path, state, self._live_bytes())
        request.rows = sent_rows
        self._let_follow(request, reading)
        return outcomes

    def _read_alone(self, request: Request, reading: SharedReading, why: str) -> list[StepOutcome]:
        """Continues after the last rows of which all is here."""
        self.end(request)
        self._states[request] = state = reading.alone()
        request.rows = state.rows
        rows = len(request.prompt) - state.rows
        readers = request.parameters.readers
        assert readers is not None
        readers.outcome.reason = f"the last {rows} rows alone: {why}"
        log.warning("%s reads the last %d rows of a prompt alone: %s", request.key[0], rows, why)
        return [StepOutcome(request, Prefilled(state.rows, len(request.prompt)))]

    def end(self, request: Request) -> None:
        if (reading := self._readings.pop(request, None)) is not None:
            readers = request.parameters.readers
            assert readers is not None
            readers.outcome.seconds += self._clock()
            del self._flights[reading]
            reading.close()


def settle(unfinished: Sequence[State]) -> None:
    """Computes what forwards have left lazy."""
    if unfinished:
        mx.eval([array for state in unfinished for array in state.arrays()])
        mx.clear_cache()
