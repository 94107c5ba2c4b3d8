"""The engine of a runner: plans a step, issues it, reads the oldest one, delivers its tokens."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

import mlx.core as mx

from ...mtp.steps import Prefilled, Rebuilt, Step
from ...mtp.types import FinishReason, Round
from ...placement.errors import StateLost
from .executor import Executor
from .outcome import SHARED, Flight, Outcome
from .reading import Reading
from .request import Request
from .scheduler import Decode, GoOn, Prefill, Replay, Scheduler
from .scheduler import Step as Work

log = logging.getLogger(__name__)

CLEAR_EVERY: Final = 256
"""Rounds between calls of `mx.clear_cache`, as in mlx-lm: buffers of many sizes pile up."""
GROWS: Final = 32
"""Rows of an answer between two looks at what is kept of prompts."""


class Engine:
    """Drives requests from their prompts to their ends. All methods run on the compute thread."""

    def __init__(
        self, executor: Executor, scheduler: Scheduler, clock: Callable[[], float]
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self._clock = clock
        self._requests: list[Request] = []
        self._in_flight: deque[Flight] = deque()
        self._reading: Reading | None = None
        self._rounds = 0

    def add(self, request: Request) -> None:
        """The request begins when it has room."""
        self._requests.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request without another word. The others lose nothing."""
        if request.phase == "finished":
            return
        self._end(request)

    def step(self) -> bool:
        """Does the next piece of work; False: there is none here, until a request comes or what is
        away is back."""
        begun = self._clock()
        self._admit()
        is_reading = False
        if (back := next((f for f in self._in_flight if f.is_back), None)) is not None:
            self._land(back)
        elif (step := self._plan()) is not None:
            is_reading = not isinstance(step, Decode)
            self._do(step)
        elif (here := next((f for f in self._in_flight if not f.is_away), None)) is not None:
            self._land(here)
        else:
            return False
        self.scheduler.took(self._clock() - begun, reading=is_reading)
        return True

    def _plan(self) -> Work | None:
        reading = self._reading is not None
        return self.scheduler.plan(self._requests, self._in_flight, reading=reading)

    def _do(self, step: Work) -> None:
        if not isinstance(step, Decode):
            self._read(step)
        elif not self._issue(step) and self._in_flight:
            self._land(self._in_flight[0])

    @property
    def _running(self) -> int:
        """Answers in progress, of readers that take what they are given."""
        return sum(r.phase != "waiting" and not r.paused for r in self._requests)

    @property
    def live_requests(self) -> int:
        """Requests that have begun and are not over."""
        return sum(request.phase != "waiting" for request in self._requests)

    def _admit(self) -> None:
        if not any(request.phase == "waiting" for request in self._requests):
            return
        for request in self.scheduler.admit(self._requests):
            self._guarded(request, self._begin)

    def _begin(self, request: Request) -> None:
        if (flight := self.executor.begin(request)) is not None:
            self._in_flight.append(flight)  # it begins when that is back
            return
        self._deliver(request, Prefilled(request.rows, len(request.prompt)))

    def _issue(self, step: Decode) -> bool:
        """Whether the step is done with; else a round in flight must be read first."""
        with self._losing(step.requests):
            flight = self.executor.issue(step, self._running)
            if flight is None:
                return False
            self._in_flight.append(flight)
        return True

    def _land(self, flight: Flight) -> None:
        """Reads a round and hands out its tokens; where the device computes meanwhile, behind the
        next round's issue."""
        self._in_flight.remove(flight)
        outcomes = list[Outcome]()
        with self._losing(flight.requests):
            outcomes = self.executor.land(flight, self._running)
        for outcome in outcomes:
            if outcome.reason is not None or outcome.fault is not None:
                outcome.request.phase = "finished"
        if self.executor.overlaps:
            self._issue_next()
        self._rounds += 1
        if self._rounds % CLEAR_EVERY == 0:
            mx.clear_cache()
        self._hand_out(outcomes)

    def _issue_next(self) -> None:
        """Issues the next round, if one may follow those in flight."""
        live = [request for request in self._requests if request.phase != "finished"]
        step = self.scheduler.follow(live, self._in_flight, reading=self._reading is not None)
        if step is not None:
            _ = self._issue(step)

    def _read(self, step: Prefill | GoOn | Replay) -> None:
        if isinstance(step, Replay):
            self._replay(step.request)
            return
        if isinstance(step, Prefill):
            with self._losing(step.requests):
                self._reading = self.executor.read(step)
        reading, self._reading = self._reading, None
        if reading is None:
            return  # it could not begin
        outcomes, sent = list[Outcome](), None
        with self._losing(reading.requests):
            if not reading.go_on():
                self._reading = reading
                return
            outcomes, sent = self.executor.end_read(reading, self._running)
        if sent is not None:
            self._in_flight.append(sent)
        for request in reading.requests:
            self._guarded(request, self.executor.keep_prefix)
            self._deliver(request, Prefilled(request.rows, len(request.prompt)))
        self._hand_out(outcomes)

    def _replay(self, request: Request) -> None:
        reason, sent = None, None
        with self._losing([request]):
            reason, sent = self.executor.replay(request)
        if sent is not None:
            self._in_flight.append(sent)
        self._deliver(request, Rebuilt(request.replayed, len(request.log)))
        if reason is not None:  # the log holds all of the answer
            self._end(request, reason)
        elif sent is None and request.replayed == len(request.log) and request.phase == "replay":
            request.phase = "decode"

    def _hand_out(self, outcomes: Sequence[Outcome]) -> None:
        for request, made, reason, fault, _ in outcomes:
            if request not in self._requests:
                continue
            if isinstance(made, Round):
                self._grow(request, len(made.tokens))
            if made is not None:
                self._deliver(request, made)
            if fault is not None or reason is not None:
                self._end(request, fault if fault is not None else reason)

    def _grow(self, request: Request, rows: int) -> None:
        """Now and then what is kept of prompts makes room for an answer."""
        if request.emitted // GROWS > (request.emitted - rows) // GROWS or request.emitted == 1:
            self._guarded(request, self.executor.make_room)

    def _deliver(self, request: Request, step: Step) -> None:
        request.delivered += 1
        self._guarded(request, lambda request: request.deliver(step))

    def _guarded(self, request: Request, work: Callable[[Request], None]) -> None:
        """What goes wrong with one request's delivery ends that request alone."""
        if request not in self._requests:
            return
        try:
            work(request)
        except BaseException as fault:  # its reader's, or SystemExit of a library
            self._end(request, fault)

    @contextmanager
    def _losing(self, requests: Sequence[Request]) -> Generator[None]:
        """The edge of the compute thread: whatever a forward met, SystemExit too, ends the requests
        that shared it, and the others go on."""
        try:
            yield
        except BaseException as fault:
            self._lost(requests, fault)

    def _lost(self, requests: Sequence[Request], fault: BaseException) -> None:
        """A forward failed: nobody knows what the caches of those that shared it hold.

        Their entry nodes have all that they were told: the next attempt of each shares no forward.
        """
        lost = self.executor.forget(requests)
        self._in_flight = deque(f for f in self._in_flight if set(lost).isdisjoint(f.requests))
        if len(lost) > 1:
            log.error("%s", SHARED, exc_info=fault)
        for request in lost:
            if request not in self._requests:
                continue
            own = fault
            if len(lost) > 1:  # an error each, whose traceback holds on to its request
                own = StateLost(SHARED)
                own.__cause__ = fault
            self._end(request, own)

    def _end(self, request: Request, why: FinishReason | BaseException | None = None) -> None:
        """`why` None: nobody listens any more."""
        request.phase = "finished"
        if request in self._requests:
            self._requests.remove(request)
        if self._reading is not None and self._reading.requests == (request,):
            self._reading = None  # of several prompts the others' rows are wanted
        self.executor.release(request)
        if why is not None:
            request.finish(why)
