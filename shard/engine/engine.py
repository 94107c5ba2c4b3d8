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
from .flight import Flight
from .prefill_forward import PrefillForward
from .request import Request
from .scheduler import ContinuePrefill, Decode, Prefill, Replay, Scheduler
from .scheduler import Step as Work
from .step_outcome import SHARED, StepOutcome

log = logging.getLogger(__name__)

CLEAR_EVERY: Final = 256
"""Rounds between calls of `mx.clear_cache`, as in mlx-lm: buffers of many sizes pile up."""
MAKE_ROOM_EVERY: Final = 32
"""Tokens of an answer after which the prefix cache is asked again to make room."""


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
        self._prefill_forward: PrefillForward | None = None
        self._rounds = 0

    def add(self, request: Request) -> None:
        """Adds a waiting request, which begins when the scheduler admits it."""
        self._requests.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request without a call of its `finish`. Other requests are not affected."""
        if request.phase == "finished":
            return
        self._end(request)

    def cancel_reads(self) -> None:
        """Cancels the requests that have no answer: others wait for nothing but the part in
        progress."""
        for request in [request for request in self._requests if request.reads_to]:
            self._end(request)

    def step(self) -> bool:
        """Does the next piece of work. Returns False if there is none until a request is added or
        another stage answers."""
        began_at = self._clock()
        self._admit()
        self._end_read()
        is_prefill = False
        if (back := next((f for f in self._in_flight if f.is_back), None)) is not None:
            self._land(back)
        elif (work := self._plan()) is not None:
            is_prefill = not isinstance(work, Decode)
            self._run(work)
        elif (computed := next((f for f in self._in_flight if not f.is_away), None)) is not None:
            self._land(computed)
        else:
            return False
        self.scheduler.charge(self._clock() - began_at, for_prefill=is_prefill)
        return True

    def _plan(self) -> Work | None:
        in_prefill = self._prefill_forward is not None
        return self.scheduler.plan(self._requests, self._in_flight, in_prefill=in_prefill)

    def _run(self, step: Work) -> None:
        if isinstance(step, Replay):
            self._replay(step.request)
        elif not isinstance(step, Decode):
            self._prefill(step)
        elif not self._issue(step) and self._in_flight:
            self._land(self._in_flight[0])

    @property
    def _running(self) -> int:
        """Number of requests that have begun and are not paused."""
        return sum(r.phase != "waiting" and not r.is_paused for r in self._requests)

    @property
    def keys(self) -> set[tuple[str, int]]:
        """Names and attempts of its requests."""
        return {request.key for request in self._requests}

    @property
    def live_requests(self) -> int:
        """Number of requests with an answer that have begun and not ended."""
        return sum(r.phase != "waiting" and not r.reads_to for r in self._requests)

    @property
    def drafting_request(self) -> Request | None:
        """The newest request that is decoded with drafts; None if there is none."""
        drafting = (r for r in reversed(self._requests) if r.k and r.phase == "decode")
        return next(drafting, None)

    def _admit(self) -> None:
        if not any(request.phase == "waiting" for request in self._requests):
            return
        for request in self.scheduler.admit(self._requests):
            self._call_guarded(request, self._begin)

    def _end_read(self) -> None:
        """Ends requests that have no answer, once all stages have read their rows."""
        for request in [request for request in self._requests if request.is_read]:
            if not any(request in flight.requests for flight in self._in_flight):
                self._end(request)

    def _begin(self, request: Request) -> None:
        if (flight := self.executor.begin(request)) is not None:
            self._in_flight.append(flight)  # it begins when the other stages have answered
            return
        self._deliver(request, Prefilled(request.rows, len(request.prompt)))

    def _issue(self, step: Decode) -> bool:
        """Issues a round. Returns False if a round in flight must be read first."""
        with self._ending_on_fault(step.requests):
            flight = self.executor.issue(step, self._running)
            if flight is None:
                return False
            self._in_flight.append(flight)
        return True

    def _land(self, flight: Flight) -> None:
        """Reads work in flight and delivers its results.

        If the device computes asynchronously, the next round is issued before they are delivered.
        """
        self._in_flight.remove(flight)
        outcomes = list[StepOutcome]()
        with self._ending_on_fault(flight.requests):
            outcomes = self.executor.land(flight, self._running)
        for outcome in outcomes:
            if outcome.reason is not None or outcome.fault is not None:
                outcome.request.phase = "finished"
        if self.executor.overlaps:
            self._issue_next()
        self._rounds += 1
        if self._rounds % CLEAR_EVERY == 0:
            mx.clear_cache()
        self._deliver_all(outcomes)

    def _issue_next(self) -> None:
        """Issues the next round, if one may follow those in flight."""
        live = [request for request in self._requests if request.phase != "finished"]
        in_prefill = self._prefill_forward is not None
        step = self.scheduler.follow(live, self._in_flight, in_prefill=in_prefill)
        if step is not None:
            _ = self._issue(step)

    def _prefill(self, step: Prefill | ContinuePrefill) -> None:
        """Computes a part of a forward over prompts; after the last part, delivers its results."""
        if isinstance(step, Prefill):
            with self._ending_on_fault(step.requests):
                self._prefill_forward = self.executor.prefill(step)
        forward, self._prefill_forward = self._prefill_forward, None
        if forward is None:
            return  # it could not begin
        outcomes, remote_work = list[StepOutcome](), None
        with self._ending_on_fault(forward.requests):
            if not forward.advance():
                self._prefill_forward = forward
                return
            outcomes, remote_work = self.executor.end_prefill(forward, self._running)
        if remote_work is not None:
            self._in_flight.append(remote_work)
        for request in forward.requests:
            self._call_guarded(request, self.executor.keep_prefix)
            self._deliver(request, Prefilled(request.rows, len(request.prompt)))
        self._deliver_all(outcomes)

    def _replay(self, request: Request) -> None:
        reason, remote_work = None, None
        with self._ending_on_fault([request]):
            reason, remote_work = self.executor.replay(request)
        if remote_work is not None:
            self._in_flight.append(remote_work)
        self._deliver(request, Rebuilt(request.replay.rebuilt, len(request.replay.log)))
        if reason is not None:  # the log holds all of the answer
            self._end(request, reason)
        elif remote_work is None and request.phase == "replay" and request.replay.is_done:
            request.phase = "decode"

    def _deliver_all(self, outcomes: Sequence[StepOutcome]) -> None:
        for request, step, reason, fault, _ in outcomes:
            if request not in self._requests:
                continue
            if isinstance(step, Round):
                self._grow(request, len(step.tokens))
            if step is not None:
                self._deliver(request, step)
            if fault is not None or reason is not None:
                self._end(request, fault if fault is not None else reason)

    def _grow(self, request: Request, rows: int) -> None:
        """Every MAKE_ROOM_EVERY tokens, makes the prefix cache give way to an answer."""
        after, before = request.emitted_tokens, request.emitted_tokens - rows
        if after == 1 or after // MAKE_ROOM_EVERY > before // MAKE_ROOM_EVERY:
            self._call_guarded(request, self.executor.make_room)

    def _deliver(self, request: Request, step: Step) -> None:
        request.events_delivered += 1
        self._call_guarded(request, lambda request: request.deliver(step))

    def _call_guarded(self, request: Request, work: Callable[[Request], None]) -> None:
        """Calls `work`, whose errors end this request alone."""
        if request not in self._requests:
            return
        try:
            work(request)
        except BaseException as fault:  # its reader's, or SystemExit of a library
            self._end(request, fault)

    @contextmanager
    def _ending_on_fault(self, requests: Sequence[Request]) -> Generator[None]:
        """The edge of the compute thread: any error of a forward, SystemExit too, ends the requests
        that shared it, and no others."""
        try:
            yield
        except BaseException as fault:
            self._end_lost(requests, fault)

    def _end_lost(self, requests: Sequence[Request], fault: BaseException) -> None:
        """Ends the requests that shared a failed forward, since their caches are undefined.

        Their entry nodes have every round that was delivered, and start another attempt of each
        request, which shares no forward.
        """
        lost = self.executor.forget(requests)
        self._in_flight = deque(f for f in self._in_flight if set(lost).isdisjoint(f.requests))
        if len(lost) > 1:
            log.error("%s", SHARED, exc_info=fault)
        for request in lost:
            if request not in self._requests:
                continue
            own = fault
            if len(lost) > 1:  # an error each, since a traceback keeps its request alive
                own = StateLost(SHARED)
                own.__cause__ = fault
            self._end(request, own)

    def _end(self, request: Request, why: FinishReason | BaseException | None = None) -> None:
        """Frees a request's state and reports its end; `why` None: it was cancelled."""
        request.phase = "finished"
        if request in self._requests:
            self._requests.remove(request)
        if self._prefill_forward is not None and self._prefill_forward.requests == (request,):
            self._prefill_forward = None  # a forward over several prompts continues for the others
        self.executor.release(request)
        if why is not None:
            request.finish(why)
