"""The loop of a runner: plans work, issues it, reads the oldest in flight, delivers its tokens."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

import mlx.core as mx

from ...mtp.types import FinishReason, Prefilled, Rebuilt, Round, Step
from ...placement.errors import StateLost
from ...placement.gpu_faults import gpu_fault
from .compute import device_lost
from .executor import LocalExecutor
from .pipeline_executor import PipelineExecutor
from .prefill_forward import PrefillForward
from .request import Request
from .scheduler import ContinuePrefill, Decode, Flight, Prefill, Replay, Scheduler, Work
from .step_outcome import SHARED, StepOutcome

log = logging.getLogger(__name__)

CLEAR_EVERY: Final = 256
"""Rounds between calls of `mx.clear_cache`, as in mlx-lm: buffers of many sizes pile up."""
MAKE_ROOM_EVERY: Final = 32
"""Tokens of an answer after which the prefix cache is asked again to make room."""


class Engine:
    """Drives requests from their prompts to their ends. All methods run on the compute thread."""

    def __init__(
        self,
        executor: LocalExecutor | PipelineExecutor,
        scheduler: Scheduler,
        clock: Callable[[], float],
        *,
        keeps_chunk: bool = True,
    ) -> None:
        """`keeps_chunk`: see `device_lost`, which ends `step` and the compute thread."""
        self._keeps_chunk = keeps_chunk
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
        flight, work = self._plan()
        if flight is None and work is None:
            return False
        outcomes = list[StepOutcome]()
        if work is not None:
            outcomes, flight = self._issue(work)
        if flight is not None:
            outcomes = self._land(flight)
        self._deliver(outcomes)
        for_prefill = not (work is None or isinstance(work, Decode))
        self.scheduler.charge(self._clock() - began_at, for_prefill=for_prefill)
        return True

    def _plan(self) -> tuple[Flight | None, Work | None]:
        """Work to read or to do: what came back from other stages, the next work of the scheduler,
        or else what this device computes."""
        if (back := next((f for f in self._in_flight if f.is_back), None)) is not None:
            return back, None
        if (work := self._next(self._requests)) is not None:
            return None, work
        return next((f for f in self._in_flight if not f.is_away), None), None

    def _next(self, requests: Sequence[Request], *, rounds_only: bool = False) -> Work | None:
        in_prefill = self._prefill_forward is not None
        return self.scheduler.plan(
            requests, self._in_flight, in_prefill=in_prefill, rounds_only=rounds_only
        )

    def _issue(self, work: Work) -> tuple[list[StepOutcome], Flight | None]:
        """Does a piece of work. Returns what it gave at once, and the round that must be read
        before it."""
        if isinstance(work, Replay):
            return self._replay(work.request), None
        if not isinstance(work, Decode):
            return self._prefill(work), None
        is_issued = self._issue_round(work)
        return [], None if is_issued or not self._in_flight else self._in_flight[0]

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
        """Begins waiting requests. Ends those without an answer, once all stages have read their
        rows."""
        if any(request.phase == "waiting" for request in self._requests):
            for request in self.scheduler.admit(self._requests):
                self._call_guarded(request, self._begin)
        for request in [request for request in self._requests if request.is_read]:
            if not any(request in flight.requests for flight in self._in_flight):
                self._end(request)

    def _begin(self, request: Request) -> None:
        if (flight := self.executor.begin(request)) is not None:
            self._in_flight.append(flight)  # it begins when the other stages have answered
            return
        self._deliver_step(request, Prefilled(request.rows, len(request.prompt)))

    def _issue_round(self, step: Decode) -> bool:
        """Issues a round. Returns False if a round in flight must be read first."""
        with self._ending_on_fault(step.requests):
            flight = self.executor.issue(step, self._running)
            if flight is None:
                return False
            self._in_flight.append(flight)
        return True

    def _land(self, flight: Flight) -> list[StepOutcome]:
        """Reads work in flight.

        If the device computes asynchronously, the next round is issued before results are
        delivered.
        """
        self._in_flight.remove(flight)
        outcomes = list[StepOutcome]()
        with self._ending_on_fault(flight.requests):
            outcomes = self.executor.land(flight, self._running)
        for outcome in outcomes:
            if outcome.reason is not None or outcome.fault is not None:
                outcome.request.phase = "finished"
        if self.executor.overlaps:
            live = [request for request in self._requests if request.phase != "finished"]
            if isinstance(step := self._next(live, rounds_only=True), Decode):
                _ = self._issue_round(step)
        self._rounds += 1
        if self._rounds % CLEAR_EVERY == 0:
            mx.clear_cache()
        return outcomes

    def _prefill(self, step: Prefill | ContinuePrefill) -> list[StepOutcome]:
        """Computes a part of a forward over prompts. Returns its results after the last part."""
        if isinstance(step, Prefill):
            with self._ending_on_fault(step.requests):
                self._prefill_forward = self.executor.prefill(step)
        forward, self._prefill_forward = self._prefill_forward, None
        if forward is None:
            return []  # it could not begin
        outcomes, remote_work = list[StepOutcome](), None
        with self._ending_on_fault(forward.requests):
            if not forward.advance():
                self._prefill_forward = forward
                return []
            outcomes, remote_work = self.executor.end_prefill(forward, self._running)
        if remote_work is not None:
            self._in_flight.append(remote_work)
        for request in forward.requests:
            self._call_guarded(request, self.executor.keep_prefix)
        read = [StepOutcome(r, Prefilled(r.rows, len(r.prompt))) for r in forward.requests]
        return read + outcomes

    def _replay(self, request: Request) -> list[StepOutcome]:
        reason, remote_work = None, None
        with self._ending_on_fault([request]):
            reason, remote_work = self.executor.replay(request)
        if remote_work is not None:
            self._in_flight.append(remote_work)
        elif reason is None and request.phase == "replay" and request.replay.is_done:
            request.phase = "decode"
        # If the log holds all of the answer, there is a reason why it ends.
        return [
            StepOutcome(request, Rebuilt(request.replay.rebuilt, len(request.replay.log)), reason)
        ]

    def _deliver(self, outcomes: Sequence[StepOutcome]) -> None:
        for request, step, reason, fault, _ in outcomes:
            if request not in self._requests:
                continue
            if isinstance(step, Round):
                self._make_room(request, len(step.tokens))
            if step is not None:
                self._deliver_step(request, step)
            if fault is not None or reason is not None:
                self._end(request, fault if fault is not None else reason)

    def _make_room(self, request: Request, tokens: int) -> None:
        """Makes the prefix cache give way to an answer, at its first of `tokens` new ones and every
        MAKE_ROOM_EVERY."""
        after, before = request.emitted_tokens, request.emitted_tokens - tokens
        if after == 1 or after // MAKE_ROOM_EVERY > before // MAKE_ROOM_EVERY:
            self._call_guarded(request, self.executor.make_room)

    def _deliver_step(self, request: Request, step: Step) -> None:
        request.events_delivered += 1
        self._call_guarded(request, lambda request: request.deliver(step))

    def _call_guarded(self, request: Request, work: Callable[[Request], None]) -> None:
        """Calls `work`, whose errors end this request alone."""
        if request not in self._requests:
            return
        try:
            work(request)
        except BaseException as fault:  # its reader gets it, SystemExit of a library too
            self._require_device(fault, [request])
            self._end(request, fault)

    @contextmanager
    def _ending_on_fault(self, requests: Sequence[Request]) -> Generator[None]:
        """The edge of the compute thread: any error of a forward, SystemExit too, ends the requests
        whose caches it had, and no others."""
        try:
            yield
        except BaseException as fault:
            self._require_device(fault, requests)
            self._end_lost(requests, fault)

    def _require_device(self, fault: BaseException, requests: Sequence[Request]) -> None:
        """Raises DeviceLost where the process has to end: all answers resume on another one.

        Only one that has found no memory with a short chunk either ends with that error.
        """
        if (lost := device_lost(fault, keeps_chunk=self._keeps_chunk)) is None:
            return
        if self._keeps_chunk and gpu_fault(str(fault)) == "memory" and len(requests) == 1:
            self._end(requests[0], fault)
        raise lost from fault

    def _end_lost(self, requests: Sequence[Request], fault: BaseException) -> None:
        """Ends the requests that a failed forward shared caches with: those are undefined.

        A single request's answer ends with the error. Several get StateLost: their entry nodes have
        every round that was delivered, and start another attempt of each, which shares no forward.
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
        """Frees a request's state and reports its end, unless it was cancelled."""
        request.phase = "finished"
        if request in self._requests:
            self._requests.remove(request)
        if self._prefill_forward is not None and self._prefill_forward.requests == (request,):
            self._prefill_forward = None  # a forward over several prompts continues for the others
        self.executor.release(request)
        if why is not None:
            request.finish(why)
