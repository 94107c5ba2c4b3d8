"""Runs an engine's steps on this machine's device: prompts, logs and rounds."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import mlx.core as mx

from ...mtp.drafting.depth_reason import depth_reason
from ...mtp.drafting.round_policy import RoundPolicy
from ...mtp.families.taped_gated_delta import rows_with_room
from ...mtp.finite import NO_TOKEN, NotFinite
from ...mtp.seams import ForwardOutput, as_row
from ...mtp.targets import Target
from ...mtp.types import FinishReason, Forward, Round
from ..model.embedder import POOLINGS
from ..model.tensors import to_bytes
from .batch import Batch
from .drafter import PENDING_ROWS, RESTING_ROWS, DraftModel, read_rows
from .issued_round import IssuedRound
from .prefill_forward import PrefillForward
from .prefixes.store import PrefixStore
from .prompt_readings import PromptReadings, ReadFlight, settle
from .reading.views import LayerViews
from .request import Embedding, Request
from .round_forms import RoundForms
from .scheduler import Decode, Flight, Prefill
from .states.groups import Groups
from .states.state import DraftState, State
from .step_outcome import StepOutcome, count_replayed, count_round, scored, verdict_of
from .step_times import SHORT_ROWS, StepTimes

REPORT_EVERY: Final = 16
"""Rounds of a log that are rebuilt in one step, between steps of other requests."""


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
        policy: RoundPolicy | None = None,
        forms: RoundForms | None = None,
        views: LayerViews | None = None,
        row_bytes: int = 0,
    ) -> None:
        """`policy`: chooses the rounds of all requests. `views`: parts of the model, which readers
        need. `row_bytes`: see `row_state_bytes`."""
        self._target = target
        self._make_caches = make_caches
        self.draft_model = draft_model
        """The drafter of new batches. Another one over the same rows may replace it while there is
        no request."""
        self._clock = clock
        self._prefixes = prefixes or PrefixStore(0, make_caches)
        self._row_bytes = row_bytes
        self.forms = forms or RoundForms()
        self.overlaps = self.forms.overlaps
        self.policy = policy or RoundPolicy()
        self.step_times = StepTimes()
        self._groups = Groups[Request, Batch](self._new_batch, lambda request: request.is_decoding)
        self._readings = PromptReadings(
            views, self._prefixes, self._groups.single, clock, self._commit, lambda: self.bytes
        )

    def begin(self, request: Request) -> None:
        """Gives a request its caches, after a cached prefix of its prompt if there is one."""
        received = request.parameters.received
        self._prefixes.begin()
        if request.read is not None:
            request.rows, request.phase = request.read.state.rows, "prefill"
            self._groups.single[request] = request.read.state
            return
        state = None
        if request.uses_cache:
            counts = not request.reads_to
            state = self._prefixes.find(request.path, self.bytes, received, counts=counts)
        if state is None:
            state = State(self._make_caches(), 0, DraftState() if request.k else None)
        request.rows = request.cached_rows = state.rows
        request.cached_tier = state.tier
        request.phase = "prefill"
        self._groups.single[request] = state
        if request.parameters.readers is not None and not request.reads_to:
            self._readings.begin(request, state)

    def prefill(self, step: Prefill) -> PrefillForward:
        """Begins a forward over prompts."""
        (first, *_) = step.requests
        if first.read is not None:
            return PrefillForward(first.read, {first: first.read.state}, step.ends, self._clock)
        if (reading := self._readings.of(first)) is not None:
            lower = {first: reading.lower_state}
            return PrefillForward(reading.target, lower, step.ends, self._clock)
        states = {request: self._groups.single[request] for request in step.requests}
        return PrefillForward(self._target, states, step.ends, self._clock)

    def end_prefill(
        self, forward: PrefillForward, running: int
    ) -> tuple[list[StepOutcome], ReadFlight | None]:
        """Commits the rows of a computed forward. Returns first tokens of prompts that end, and
        what readers compute of it."""
        (first, *_) = forward.requests
        if first.read is not None and first.phase != "finished":
            first.read.commit(forward.outputs[0])
            first.rows = forward.ends[0]
            mx.clear_cache()
            return [], None
        if forward.states[first] is not self._groups.single.get(first):
            return [], self._readings.send(first, forward)
        outcomes, unfinished = list[StepOutcome](), list[State]()
        for index, (request, state) in enumerate(forward.states.items()):
            if request.phase == "finished":
                continue
            request.rows = forward.ends[index]
            output = forward.outputs[index]
            outcomes += self._commit(request, state, forward.begin(index), output, running)
            if request.rows < len(request.prompt):
                unfinished.append(state)
        settle(unfinished)
        return outcomes, None

    def _commit(
        self, request: Request, state: State, begin: int, output: ForwardOutput, running: int
    ) -> list[StepOutcome]:
        """Commits the rows from `begin` on of a forward, up to `request.rows`. Returns the first
        token of a prompt that ends."""
        rests = running > 1 and request.drafts.demand.may_rest and self.policy.is_resting(running)
        state.rows, outcomes = request.rows, list[StepOutcome]()
        self._feed_head(
            request, state, begin, output.hidden, RESTING_ROWS if rests else PENDING_ROWS
        )
        if request.parameters.output.prompt_logprobs:
            outcomes.append(scored(request, output.logits, begin))
        if request.rows < len(request.prompt):
            return outcomes
        if request.embedding is not None:
            return [*outcomes, _embed(request, request.embedding, output.hidden)]
        if output.hidden is not None and state.draft is not None:
            state.draft.last = output.hidden[:, -1:]
        return outcomes + self._first_token(request, output.logits[-1:], begin)

    def _feed_head(
        self,
        request: Request,
        state: State,
        start: int,
        hidden: mx.array | None,
        max_unread: int,
    ) -> None:
        """Queues a forward's rows for the draft head.

        The head reads the rows of earlier forwards once they are `max_unread`, but none at the end
        of the prompt: the first token waits for the target alone.
        """
        draft = state.draft
        if draft is None or self.draft_model is None:
            return
        assert hidden is not None
        if draft.unread_rows >= max_unread and request.rows < len(request.prompt):
            self._read_rows(request, draft)
        next_tokens = as_row(request.prompt[start + 1 : request.rows + 1])
        if next_tokens.shape[0]:
            draft.observe(hidden[:, : next_tokens.shape[0]], next_tokens)
        self._read_images(request, draft)

    def _read_rows(self, request: Request, draft: DraftState) -> None:
        """The head reads all rows of a prompt that it has not read; lazy."""
        assert self.draft_model is not None
        begin, end = draft.rows, draft.rows + draft.unread_rows
        positions, images = self._target.rope_positions, request.images
        if images is None or not images.touches(begin, end + 1):
            positions.set_deltas([0 if images is None else images.delta_at(begin)])
            read_rows(self.draft_model, draft)
            return
        positions.at(images.places(begin, end))
        read_rows(self.draft_model, draft, images.embeddings(begin + 1, end + 1))

    def _read_images(self, request: Request, draft: DraftState) -> None:
        """The head reads at once where rows or the tokens after them are images': what waits has
        neither their features nor their positions."""
        begin, images = draft.rows, request.images
        if images is not None and images.touches(begin, begin + draft.unread_rows + 1):
            self._read_rows(request, draft)

    def keep_prefix(self, request: Request) -> None:
        """Puts a copy of its state after the rows read so far into the prefix cache."""
        if self._readings.of(request) is not None or request.read is not None:
            return  # cached when it is back, or there where it is answered
        if request.uses_cache and request.cached_rows < request.rows < len(request.prompt):
            self._prefixes.keep(request.path, self._groups.single[request], self.bytes)

    def make_room(self, request: Request) -> None:
        """Shrinks the prefix cache as the next rows of an answer require."""
        self._prefixes.make_room(self._own_caches(request), self.bytes)

    def replay(self, request: Request) -> tuple[FinishReason | None, None]:
        """Rebuilds the state after rounds of a log. Returns why the answer ends, if so."""
        if request.replay.rebuilt == 0:
            return self._replay_first(request), None
        batch = self._groups.of((request,))
        rounds = request.replay.log[request.replay.rebuilt : request.replay.rebuilt + REPORT_EVERY]
        if request.replay.rows:
            self._replay_merged(batch, request, rounds)
        else:
            self._replay_each(batch, request, rounds)
        reason = count_replayed(request, rounds)
        request.rows += sum(len(round_.tokens) for round_ in rounds)
        return reason, None

    def issue(self, step: Decode, running: int) -> IssuedRound | None:
        """Issues a round, or None if one in flight must be read first."""
        batch = self._groups.of(step.requests)
        freed = self._prefixes.bytes + self._row_bytes * batch.state_rows
        self.policy.room_rows = rows_with_room(self._row_bytes, freed)
        return batch.issue(running)

    def land(self, flight: Flight, running: int) -> list[StepOutcome]:
        """Reads a round, and waits until the device has computed it."""
        if isinstance(flight, ReadFlight):
            return self._readings.land(flight, running)
        assert isinstance(flight, IssuedRound)
        outcomes = flight.batch.land(flight, running)
        request, is_alone = flight.requests[0], running == len(flight.requests) == 1
        is_plain = is_alone and flight.width == 1
        self.step_times.read(request, request.rows, self._clock(), is_plain=is_plain)
        return outcomes

    def release(self, request: Request) -> None:
        """Frees a request's state; its rows in a batch are freed by the next change of members."""
        self._readings.end(request)
        self._groups.release(request)
        demand = request.drafts.demand
        if demand.acceptance is not None and request.rows <= SHORT_ROWS:
            self.step_times.estimate(request, self.policy.plain_seconds(demand))
        self.step_times.end(request)

    def forget(self, requests: Sequence[Request]) -> list[Request]:
        """Drops caches that a failed forward left undefined. Returns all requests in them."""
        return self._groups.forget(requests)

    def depth_reason(self, request: Request) -> str:
        """Why the request's last round drafted as many tokens as it did, for a person."""
        demand = request.drafts.demand
        reason = depth_reason(self.policy, demand, request.drafts.choice)
        return "; ".join(filter(None, (reason, demand.limit_reason)))

    @property
    def bytes(self) -> int:
        """Bytes of the KV caches, recurrent states and draft states of all requests."""
        return self._groups.bytes

    def _new_batch(self, joins: dict[Request, State]) -> Batch:
        return Batch(
            self._target,
            self.draft_model,
            joins,
            self.policy,
            self._clock,
            counts_on_device=self.forms.counts_on_device,
        )

    def _first_token(self, request: Request, logits: mx.array, start: int) -> list[StepOutcome]:
        """The token after the prompt, whose last forward began at row `start` and gave `logits`
        (1, V); none if the log has it."""
        if request.replay.log:
            request.phase = "replay"
            return []
        end = request.rows
        verdict = verdict_of([request], logits[None], None, [0], [end - 1])
        ((_, ids, _),) = verdict.read()
        if NO_TOKEN in ids:
            return [StepOutcome(request, fault=NotFinite(end))]
        token = verdict.tokens[0]
        request.sampler.commit(token)
        if (draft := self._groups.single[request].draft) is not None:
            draft.complete(token)
        request.phase = "decode"
        return [count_round(request, verdict, 0, ids, Forward(start, end - start))]

    def _replay_first(self, request: Request) -> FinishReason | None:
        first = request.replay.log[0]
        if (draft := self._groups.single[request].draft) is not None:
            draft.complete(as_row(first.tokens))
        return count_replayed(request, [first])

    def _replay_each(self, batch: Batch, request: Request, rounds: Sequence[Round]) -> None:
        """Repeats each round by a forward of as many rows, so that the same kernels run.

        The ids of rejected rows do not matter: only their number chose the kernels.
        """
        before = request.token
        for round_ in rounds:
            count = len(round_.tokens)
            padding = [0] * (round_.forward.rows - count)
            batch.append([before, *round_.tokens[:-1], *padding], round_.tokens, count)
            before = round_.tokens[-1]

    def _replay_merged(self, batch: Batch, request: Request, rounds: Sequence[Round]) -> None:
        """Repeats rounds without their rejected rows, by as few forwards as possible."""
        following = [token for round_ in rounds for token in round_.tokens]
        ids = [request.token, *following[:-1]]
        for begin in range(0, len(following), request.replay.rows):
            rows = slice(begin, begin + request.replay.rows)
            batch.append(ids[rows], following[rows], len(following[rows]))

    def _own_caches(self, request: Request) -> Sequence[Any]:
        """A request's caches; none if it shares them with another request."""
        if request in self._groups.single:
            return self._groups.single[request].caches
        batch = next((b for b in self._groups.groups if b.requests == (request,)), None)
        return () if batch is None else batch.caches.views()


def _embed(request: Request, embedding: Embedding, hidden: mx.array | None) -> StepOutcome:
    """The end of a request for an embedding: pooled hidden states, cut and of length 1."""
    assert hidden is not None
    row = POOLINGS[embedding.pooling](hidden)[: embedding.dimensions]
    vector = row / mx.linalg.norm(row)
    if not mx.isfinite(vector).all().item():
        return StepOutcome(request, fault=NotFinite(request.rows))
    embedding.vector = to_bytes(vector)
    return StepOutcome(request, reason="stop")
