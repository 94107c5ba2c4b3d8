"""Runs an engine's steps on this machine's device: prompts, logs and rounds."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

import mlx.core as mx

from ...mtp.batch_depth import BatchDepth
from ...mtp.batch_prompts import PromptTarget
from ...mtp.depth import AdaptiveDepth
from ...mtp.finite import NO_TOKEN, NotFinite
from ...mtp.rollback import can_roll_back
from ...mtp.seams import as_row
from ...mtp.types import FinishReason, Forward, Round
from .batch import Batch, IssuedRound
from .cache_set import can_count_on_device
from .drafter import PENDING_ROWS, RESTING_ROWS, DraftModel, read_rows
from .groups import Groups
from .outcome import Flight, Outcome, counted, counted_again, judged
from .prefix_store import PrefixStore
from .reading import Reading
from .request import Request
from .scheduler import Decode, Prefill
from .state import DraftState, State
from .targets import Target

REPORT_EVERY: Final = 16
"""Rounds of a log that are rebuilt at a time: other requests have their turn there."""


def computes_behind() -> bool:
    """Whether what is issued is computed while Python goes on: not on a CPU, where MLX returns from
    `async_eval` behind all but the last ten operations. What is issued first is waited for there.
    """
    return mx.default_device() != mx.Device(mx.cpu)


class Executor(Protocol):
    """Where an engine's work is done. All methods run on the compute thread."""

    overlaps: bool
    """Whether the next round is issued before the tokens of one are delivered."""

    def begin(self, request: Request) -> Flight | None:
        """Gives a request its caches: behind a prefix of its prompt, if one is kept. Where other
        nodes must be asked for that, the question."""
        ...

    def read(self, step: Prefill) -> Reading:
        """Begins a forward over prompts."""
        ...

    def end_read(self, reading: Reading, running: int) -> tuple[list[Outcome], Flight | None]:
        """The forward is computed here: rows count, and whose prompt is read has a first token, or
        has one when what was sent is back."""
        ...

    def keep_prefix(self, request: Request) -> None:
        """Keeps a copy of the state behind the rows of its prompt that were read."""
        ...

    def make_room(self, request: Request) -> None:
        """What is kept of prompts gives way to the next rows of an answer."""
        ...

    def replay(self, request: Request) -> tuple[FinishReason | None, Flight | None]:
        """Rebuilds the state behind the next rounds of a log: why the answer ended there, if so,
        and what was sent for it."""
        ...

    def issue(self, step: Decode, running: int) -> Flight | None:
        """Begins a round; None: one in flight must be read first."""
        ...

    def land(self, flight: Flight, running: int) -> list[Outcome]:
        """Reads what is in flight, and waits for it where it is not away."""
        ...

    def release(self, request: Request) -> None:
        """Frees what only this request held."""
        ...

    def forget(self, requests: Sequence[Request]) -> list[Request]:
        """Nobody knows what their caches hold any more; all that shared them."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of KV and of recurrent states of all requests on this node."""
        ...


class LocalExecutor:
    """The whole model in this process. All methods run on the compute thread."""

    def __init__(
        self,
        target: Target,
        make_caches: Callable[[], list[Any]],
        draft_model: DraftModel | None,
        clock: Callable[[], float],
        *,
        prefixes: PrefixStore | None = None,
        fixed_rows: int = 0,
        counts_on_device: bool = False,
        overlaps: bool = False,
    ) -> None:
        """`fixed_rows`: strict mode's rows of a forward, or 0. `counts_on_device`: see `Batch`.

        `overlaps`: whether the next round is issued before the tokens of one are delivered.
        """
        self._target = target
        self._make_caches = make_caches
        self._draft_model = draft_model
        self._clock = clock
        self._prefixes = prefixes
        caches = make_caches()
        # Padding goes by being taken back.
        self.fixed_rows = fixed_rows if can_roll_back(caches) else 0
        self.counts_on_device = counts_on_device and can_count_on_device(caches)
        self.overlaps = overlaps
        self.rebuild_rows = 0
        """A log is rebuilt by forwards of so many rows, of which it was measured that they give
        what single steps do; 0: by forwards of as many rows as it records."""
        self._depth = BatchDepth()
        self._groups = Groups[Request, Batch](
            self._new_batch, lambda request: request.phase in ("replay", "decode")
        )

    def begin(self, request: Request) -> None:
        """Gives a request its caches: behind a prefix of its prompt, if one is kept."""
        state = None
        if self._prefixes is not None:
            state = self._prefixes.find(request, self.bytes)
        if state is None:
            state = State(self._make_caches(), 0, DraftState() if request.k else None)
        request.rows = request.cached = state.rows
        request.phase = "prefill"
        self._groups.single[request] = state

    def read(self, step: Prefill) -> Reading:
        """Begins a forward over prompts."""
        states = {request: self._groups.single[request] for request in step.requests}
        together = cast("PromptTarget", self._target) if len(states) > 1 else None
        return Reading(self._target, together, states, step.ends, self._clock)

    def end_read(self, reading: Reading, running: int) -> tuple[list[Outcome], None]:
        """The forward is computed: rows count, and whose prompt is read has a first token."""
        patience = RESTING_ROWS if running > 1 and self._depth.rests(running) else PENDING_ROWS
        outcomes, goes_on = list[Outcome](), list[State]()
        for index, (request, state) in enumerate(reading.states.items()):
            if request.phase == "finished":
                continue
            state.rows = request.rows = reading.ends[index]
            waits = patience if isinstance(request.depth, AdaptiveDepth) else PENDING_ROWS
            self._show_head(reading, index, waits)
            if request.rows < len(request.prompt):
                goes_on.append(state)
            elif (outcome := self._first_token(reading, index)) is not None:
                outcomes.append(outcome)
        if goes_on:
            mx.eval([array for state in goes_on for array in state.arrays()])
            mx.clear_cache()
        return outcomes, None

    def _show_head(self, reading: Reading, index: int, patience: int) -> None:
        """Rows of a prompt wait for the head, which reads those of earlier forwards if they are
        `patience` or more, but none before the first token: that waits for the target alone."""
        request, begun = reading.requests[index], reading.begin(index)
        draft, hidden = reading.states[request].draft, reading.blocks[index].hidden
        if draft is None or self._draft_model is None:
            return
        assert hidden is not None
        if draft.unread_rows >= patience and request.rows < len(request.prompt):
            read_rows(self._draft_model, draft)
        known = as_row(request.prompt[begun + 1 : request.rows + 1])
        if known.shape[0]:
            draft.observe(hidden[:, : known.shape[0]], known)

    def keep_prefix(self, request: Request) -> None:
        """Keeps a copy of the state behind the rows of its prompt that were read."""
        if self._prefixes is not None and request.cached < request.rows < len(request.prompt):
            self._prefixes.keep(request, self._groups.single[request], self.bytes)

    def make_room(self, request: Request) -> None:
        """What is kept of prompts gives way to the next rows of an answer."""
        if self._prefixes is not None:
            self._prefixes.make_room(self._viewed(request), self.bytes)

    def replay(self, request: Request) -> tuple[FinishReason | None, None]:
        """Rebuilds the state behind the next rounds of a log; why the answer ended there, if so."""
        if request.replayed == 0:
            return self._replay_first(request), None
        batch = self._groups.of((request,))
        rounds = request.log[request.replayed : request.replayed + REPORT_EVERY]
        if self.rebuild_rows and not self.fixed_rows:
            self._replay_together(batch, request, rounds)
        else:
            self._replay_each(batch, request, rounds)
        reason = counted_again(request, rounds)
        request.rows += sum(len(recorded.tokens) for recorded in rounds)
        return reason, None

    def issue(self, step: Decode, running: int) -> IssuedRound | None:
        """Begins a round; None: one in flight must be read first."""
        return self._groups.of(step.requests).issue(running)

    def land(self, flight: Flight, running: int) -> list[Outcome]:
        """Reads a round: the only wait for the device while answers run."""
        assert isinstance(flight, IssuedRound)
        return flight.batch.land(flight, running)

    def release(self, request: Request) -> None:
        """Frees what only this request held; its rows in a batch go with the next change."""
        self._groups.release(request)

    def forget(self, requests: Sequence[Request]) -> list[Request]:
        """Nobody knows what their caches hold any more; all that shared them."""
        return self._groups.forget(requests)

    @property
    def bytes(self) -> int:
        """Bytes of KV, of recurrent states and of the head's part of all requests."""
        return self._groups.bytes

    def _new_batch(self, joins: dict[Request, State]) -> Batch:
        return Batch(
            self._target,
            self._draft_model,
            joins,
            self._depth,
            self._clock,
            fixed_rows=self.fixed_rows,
            counts_on_device=self.counts_on_device,
        )

    def _first_token(self, reading: Reading, index: int) -> Outcome | None:
        """The token behind the prompt; None where a log tells it."""
        request = reading.requests[index]
        state, block = reading.states[request], reading.blocks[index]
        start, end = reading.begin(index), request.rows
        if block.hidden is not None and state.draft is not None:
            state.draft.last = block.hidden[:, -1:]
        if request.log:
            request.phase = "replay"
            return None
        verdict = judged([request], block.logits[-1:][None], None, [0], [end - 1])
        ((_, ids, _),) = verdict.read()
        if NO_TOKEN in ids:
            return Outcome(request, fault=NotFinite(end))
        token = verdict.tokens[0]
        request.sampler.commit(token)
        if state.draft is not None:
            state.draft.complete(token)
        request.phase = "decode"
        return counted(request, verdict, 0, ids, Forward(start, end - start))

    def _replay_first(self, request: Request) -> FinishReason | None:
        first = request.log[0]
        if (draft := self._groups.single[request].draft) is not None:
            draft.complete(as_row(first.tokens))
        return counted_again(request, [first])

    def _replay_each(self, batch: Batch, request: Request, rounds: Sequence[Round]) -> None:
        """By forwards of as many rows as before, so that the same kernels run.

        What rejected rows held cannot matter: only their number chose the kernels.
        """
        before = request.token
        for recorded in rounds:
            kept = len(recorded.tokens)
            padding = [0] * (recorded.forward.rows - kept)
            batch.append([before, *recorded.tokens[:-1], *padding], recorded.tokens, kept)
            before = recorded.tokens[-1]

    def _replay_together(self, batch: Batch, request: Request, rounds: Sequence[Round]) -> None:
        """Without the rows that were rejected, and with no more forwards than needed."""
        after = [token for recorded in rounds for token in recorded.tokens]
        ids = [request.token, *after[:-1]]
        for begin in range(0, len(after), self.rebuild_rows):
            some = slice(begin, begin + self.rebuild_rows)
            batch.append(ids[some], after[some], len(after[some]))

    def _viewed(self, request: Request) -> State | None:
        """Its state, if its caches are its own now."""
        if request in self._groups.single:
            return self._groups.single[request]
        batch = next((b for b in self._groups.groups if b.requests == (request,)), None)
        return None if batch is None else State(batch.caches.views(), request.rows)
