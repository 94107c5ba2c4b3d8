"""Runs an engine's steps over a pipeline: the first stage's layers here, the others elsewhere.

Each piece of work is computed by this stage's layers, sent through the others, and read when the
last stage has answered. The last token's row is written by the next forward, which carries its id,
so a group's next round is sent once the last one is back; other groups and chunks of prompts are
sent in between. The model's head drafts nothing here. An answer that is alone may copy drafts from
its own tokens; the next block says how many rows of that round stay, and each stage takes the
others back.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import mlx.core as mx

from ...mtp.caches.rollback import cache_arrays
from ...mtp.finite import NO_TOKEN, NotFinite
from ...mtp.seams import ForwardOutput, Want, as_row
from ...mtp.types import FinishReason, Forward, Prefilled
from ...placement.cluster import layer_range
from ...placement.errors import ExoNodeError, InvalidFrame, NumericError
from ...proto import peer_pb2 as pb
from ..model.stage_model import StageModel
from ..model.tensors import DTYPES, ITEM_BYTES, from_bytes, require_finite, to_bytes
from ..pipeline.copy_query import ExactCopies
from ..pipeline.frames import BlockMember, HiddenBlock, Replayed
from ..pipeline.link import StageLink, Trip
from .executor import REPORT_EVERY
from .issued_round import JudgedRound, kept_rows_of, outcome_of
from .options import EngineOptions
from .prefill_forward import PrefillForward
from .prefixes.borders import Borders
from .prefixes.memory import is_worth_caching
from .prefixes.store import PrefixStore
from .remote_work import RemoteWork
from .request import Request
from .scheduler import Decode, Flight, Prefill
from .split_copies import SplitCopies
from .stage_rounds import StageRounds, replay_forwards
from .states.state import State
from .step_outcome import StepOutcome, count_replayed, count_round, verdict_of


class StageTarget:
    """The first stage's layers, as `PrefillForward` computes them: hidden states, no logits."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self.rope_positions = model.rope_positions

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[object],
        *,
        want: Want,
        embeddings: mx.array | None = None,
    ) -> ForwardOutput:
        """Appends ids (rows,) of one request to its caches; lazy."""
        hidden = self._model.hidden(tokens[None], None, caches, embeddings, is_lazy=True)
        return ForwardOutput(mx.zeros((0, 1)), hidden)


class PipelineExecutor:
    """The first stage of a model that is split over stages. Runs on the compute thread."""

    overlaps = False

    def __init__(
        self,
        model: StageModel,
        link: StageLink,
        options: EngineOptions,
        prefixes: PrefixStore,
        turn_ends: frozenset[int],
        clock: Callable[[], float],
        copies: Callable[[], ExactCopies] = ExactCopies,
    ) -> None:
        """`prefixes`: this stage's prefix cache. `turn_ends`: the tokens that end a turn. `copies`:
        those that this stage computes exactly, by what is measured now."""
        self._model = model
        self._link = link
        self._dtype = options.dtype
        self._chunk = options.prefill_chunk
        self._clock = clock
        self._prefixes = prefixes
        self._turn_ends = turn_ends
        self.rounds = StageRounds[Request](
            model, DTYPES[options.dtype], lambda request: request.is_decoding
        )
        self.batch_identity = "off"
        """The stages' own, reported with shared rounds; "off" before the first."""
        self.step_times = self.rounds.step_times
        self._states = self.rounds.groups.single
        self._borders: dict[Request, Borders] = {}
        self._copies = SplitCopies(copies)
        self._kept_rows: dict[Request, int] = {}
        """Rows of a request's last round that stay, if it copied; its next block says so."""

    def begin(self, request: Request) -> RemoteWork | None:
        """Gives a request its caches; queries the other stages if a prefix is cached here."""
        request.phase = "prefill"
        self._states[request] = State(self._model.make_caches())
        self._borders[request] = Borders(request.path, self._turn_ends, 0)
        self._prefixes.begin()
        if request.alone or not request.uses_cache:
            return None
        cached_ends = self._prefixes.cached_ends(request.path.inner, self.bytes)
        if not cached_ends:
            return None
        ends = request.path.up_to(cached_ends[-1]).ends
        schedule = [end - begin for begin, end in pairwise((0, *ends))]
        ids = request.prompt[: cached_ends[-1]]
        trip = self._link.ask_prefixes(request.key, ids, schedule, cached_ends)
        return RemoteWork((request,), "prefix_query", trip)

    def prefill(self, step: Prefill) -> PrefillForward:
        """Begins this stage's part of a forward over a prompt."""
        states = {request: self._states[request] for request in step.requests}
        return PrefillForward(StageTarget(self._model), states, step.ends, self._clock)

    def end_prefill(
        self, forward: PrefillForward, running: int
    ) -> tuple[list[StepOutcome], RemoteWork | None]:
        """Sends the rows to the next stage. Raises NumericError."""
        (request,), (output,) = forward.requests, forward.outputs
        if request.phase == "finished":
            return [], None
        assert output.hidden is not None
        begin, state = request.rows, self._states[request]
        state.rows = request.rows = end = forward.ends[0]
        ids = request.prompt[begin:end]
        is_last = end == len(request.prompt)
        reply = pb.REPLY_LAST if is_last and not request.replay.log else pb.REPLY_COMPUTED
        border = self._border(request, state) if not is_last else pb.BORDER_UNSPECIFIED
        data = to_bytes(output.hidden)
        mx.clear_cache()
        self._require_finite(data, begin, end - begin)
        trip = self._send([request], begin, end - begin, ids, data, reply, border=border)
        if is_last and request.replay.log:
            request.phase = "replay"
        if not is_last or request.replay.log:
            return [], RemoteWork((request,), "chunk", trip, may_be_followed=not is_last)
        return [], RemoteWork((request,), "last_chunk", trip)

    def keep_prefix(self, request: Request) -> None:
        """Puts a copy of its state after the rows read so far into the prefix cache, if all stages
        do."""
        borders, rows = self._borders[request], request.rows
        if borders.last == rows:
            path, following = request.path.up_to(rows), len(request.prompt) - rows
            state = self._states[request]
            self._prefixes.keep_read(path, state, borders.first_turn, self.bytes, following)

    def make_room(self, request: Request) -> None:
        """Shrinks the prefix cache as the next rows of an answer require."""
        group = next((g for g in self.rounds.groups.groups if g.requests == (request,)), None)
        caches = () if group is None else group.caches.views()
        self._prefixes.make_room(caches, self.bytes)

    def replay(self, request: Request) -> tuple[FinishReason | None, RemoteWork | None]:
        """Rebuilds the state after the next rounds of a log, by the same forwards."""
        first = request.replay.rebuilt
        if first == 0:
            return count_replayed(request, request.replay.log[:1]), None
        forwards, rows = list[Replayed](), 0
        for round_ in request.replay.log[first:][:REPORT_EVERY]:
            if forwards and rows + round_.forward.rows > self._chunk:
                break
            forwards.append(Replayed(round_.forward.rows, len(round_.tokens)))
            rows += round_.forward.rows
        rounds = request.replay.log[first : first + len(forwards)]
        ids, last_token = list[int](), request.token
        for round_ in rounds:
            padding = [0] * (round_.forward.rows - len(round_.tokens))
            ids += [last_token, *round_.tokens[:-1], *padding]
            last_token = round_.tokens[-1]
        state = self._states[request]
        self._model.rope_positions.set_deltas([request.delta])
        out = replay_forwards(self._model, as_row(ids)[None], None, state.caches, forwards)
        data = to_bytes(out)
        mx.eval(cache_arrays(state.caches))
        self._require_finite(data, request.rows, rows)
        trip = self._send(
            [request], request.rows, rows, ids, data, pb.REPLY_COMPUTED, replayed=forwards
        )
        reason = count_replayed(request, rounds)
        request.rows += sum(forward.kept_rows for forward in forwards)
        state.rows = request.rows
        # No round may be sent before all stages have computed the rows before it.
        may_be_followed = not request.replay.is_done
        return reason, RemoteWork((request,), "log", trip, may_be_followed=may_be_followed)

    def issue(self, step: Decode, running: int) -> RemoteWork:
        """Computes the rows of a round here, and sends them to the next stage; or asks the other
        stages first which copies they compute exactly."""
        requests, issued_at, is_alone = step.requests, self._clock(), running == 1
        if is_alone and self._copies.should_ask(requests[0]):
            trip = self._link.ask_copies(requests[0].key, self._copies.own())
            return RemoteWork(requests, "copy_query", trip, issued_at=issued_at)
        plan = self._copies.plan(requests, is_alone=is_alone)
        ids, faults = [request.token for request in requests], dict[Request, ExoNodeError]()
        if plan.width:
            ids += plan.copies[0]
            data = self.rounds.block(requests[0], ids, None, requests[0].delta)
        else:
            data = self.rounds.row(requests, ids, None, [r.delta for r in requests])
            faults = self._faults(requests, data)
        trip = self._send(requests, requests[0].rows, plan.width + 1, ids, data, pb.REPLY_ALL)
        drafts = plan.drafts(requests, None)  # while other stages compute, as is what follows
        self._copies.learn()
        for request in requests:
            request.pending_tokens = plan.width + 1
            if request.drafts.lookup is not None:
                _ = request.drafts.lookup.read()
        return RemoteWork(
            requests, "round", trip, plan, drafts, issued_at if is_alone else 0.0, faults
        )

    def _faults(self, requests: Sequence[Request], data: bytes) -> dict[Request, ExoNodeError]:
        """The requests whose row of a round is not finite on this stage, and their errors."""
        size, faults = len(data) // len(requests), dict[Request, ExoNodeError]()
        for index, request in enumerate(requests):
            try:
                own = data[index * size : (index + 1) * size]
                self._require_finite(own, request.rows, 1)
            except NumericError as fault:  # of this request alone
                faults[request] = fault
        return faults

    def land(self, flight: Flight, running: int) -> list[StepOutcome]:
        """Reads work that the other stages have answered."""
        assert isinstance(flight, RemoteWork)
        live = [request for request in flight.requests if request.phase != "finished"]
        if flight.kind == "copy_query":
            return [outcome for request in live for outcome in self._agree(flight, request)]
        faults = flight.faults
        outcomes = [
            StepOutcome(request, fault=faults[request]) for request in live if request in faults
        ]
        sound = [request for request in live if request not in faults]
        if flight.kind == "prefix_query":
            return outcomes + [self._begin_behind(r, flight.trip.prefix_rows) for r in sound]
        if flight.kind == "last_chunk" and sound:
            return outcomes + self._first_token(flight, sound[0])
        if flight.kind == "round" and sound:
            return outcomes + self._read_round(flight, sound, running)
        for request in sound:
            if request.phase == "replay" and request.replay.is_done:
                request.phase = "decode"
        return outcomes

    def release(self, request: Request) -> None:
        """Frees a request's state, here and on every stage."""
        if request not in self._borders:
            return
        self.rounds.release(request)
        self._copies.release(request)
        _ = self._kept_rows.pop(request, None)
        del self._borders[request]
        self._link.release(request.key)

    def forget(self, requests: Sequence[Request]) -> list[Request]:
        """Drops caches that a failed forward left undefined. Returns all requests in them."""
        return self.rounds.groups.forget(requests)

    def _begin_behind(self, request: Request, prefix_rows: Sequence[int]) -> StepOutcome:
        """Begins after the longest prefix that all stages have cached, if it has room here."""
        self._prefixes.memory.evict(self.bytes)
        common = max(prefix_rows, default=0)
        state = self._prefixes.restore(request.path, common, self.bytes)
        if state is not None:
            self._states[request] = state
            request.rows = request.cached_rows = common
            request.cached_tier = state.tier
            self._borders[request] = Borders(request.path, self._turn_ends, common)
        return StepOutcome(request, Prefilled(request.rows, len(request.prompt)))

    def _border(self, request: Request, state: State) -> "pb.Border.ValueType":
        """Whether all stages cache the state after a chunk."""
        if not self._prefixes.enabled or not request.uses_cache:
            return pb.BORDER_UNSPECIFIED
        return self._borders[request].at(state.rows, partial(is_worth_caching, state.caches))

    def _agree(self, flight: RemoteWork, request: Request) -> list[StepOutcome]:
        seconds = self._clock() - flight.issued_at
        fault = self._copies.agree(request, flight.trip, seconds)
        return [] if fault is None else [StepOutcome(request, fault=fault)]

    def _first_token(self, flight: RemoteWork, request: Request) -> list[StepOutcome]:
        """Samples and reads the token after a prompt."""
        end, begin = request.rows, max((end for end in request.ends[:-1]), default=0)
        verdict = verdict_of([request], self._logits(flight, 1), None, [0], [end - 1])
        ((_, ids, _),) = verdict.read()
        request.phase = "decode"
        if NO_TOKEN in ids:
            return [StepOutcome(request, fault=NotFinite(end))]
        request.sampler.commit(verdict.tokens[0])
        return [count_round(request, verdict, 0, ids, Forward(begin, end - begin))]

    def _read_round(
        self, flight: RemoteWork, sound: Sequence[Request], running: int
    ) -> list[StepOutcome]:
        """Samples and reads the tokens of a round, in one synchronisation."""
        requests, plan = flight.requests, flight.plan
        assert plan is not None
        logits, limits = self._logits(flight, plan.width + 1), plan.limits(requests)
        starts = [request.rows for request in requests]
        verdict = verdict_of(requests, logits, flight.drafts, limits, starts)
        judged, outcomes = JudgedRound(requests, plan, limits, verdict), list[StepOutcome]()
        for index, (request, read) in enumerate(zip(requests, verdict.read(), strict=True)):
            if request not in sound:
                continue
            outcome = outcome_of(judged, index, *read)
            kept_rows = kept_rows_of(outcome, read[0])
            outcomes.append(outcome)
            if kept_rows:
                request.sampler.commit(verdict.tokens[index, :kept_rows])
            if plan.width:
                self.rounds.keep(request, plan.width + 1, kept_rows)
                self._kept_rows[request] = kept_rows
        if flight.issued_at and running == 1:
            seconds = self._clock() - flight.issued_at
            self._copies.timed(requests[0], starts[0], plan.width, seconds)
        return outcomes

    def _logits(self, flight: RemoteWork, rows: int) -> mx.array:
        """The logits (requests, rows, V) of what came back. Raises InvalidFrame."""
        back, size = flight.trip.block, len(flight.requests)
        if back is None or back.rows != rows or len(back.members) != size:
            raise InvalidFrame(
                f"{0 if back is None else back.rows} rows of each of "
                f"{0 if back is None else len(back.members)} requests came back where {rows} of "
                f"each of {size} were asked for",
                param="hidden.rows",
            )
        if back.near_tie:
            self.rounds.is_same = False
        if size > 1:
            self.batch_identity = "bitwise" if self.rounds.is_same else "near_tie"
        width = len(back.data) // (size * rows) // ITEM_BYTES[self._dtype]
        hidden = from_bytes(back.data, self._dtype, (size, rows, width))
        return self._model.logits(mx.array(back.tokens).reshape(size, rows), hidden)

    def _require_finite(self, data: bytes, position: int, rows: int) -> None:
        stage = f"stage 0 ({layer_range(0, self._model.end)})"
        require_finite(data, self._dtype, position, rows, stage)

    def _send(
        self,
        requests: Sequence[Request],
        position: int,
        rows: int,
        ids: Sequence[int],
        data: bytes,
        reply: "pb.Reply.ValueType",
        *,
        replayed: Sequence[Replayed] = (),
        border: "pb.Border.ValueType" = pb.BORDER_UNSPECIFIED,
    ) -> Trip:
        kept_rows = [self._kept_rows.pop(request, None) for request in requests]
        members = [
            BlockMember(*request.key, request.rows, request.delta, count)
            for request, count in zip(requests, kept_rows, strict=True)
        ]
        places: tuple[int, ...] = ()
        if len(members) == 1:
            (request,), delta = requests, requests[0].delta
            if request.images is not None and position < len(request.prompt):
                delta, places = request.images.placing(position, position + rows)
            members = [BlockMember(*request.key, position, delta, kept_rows[0])]
        return self._link.send(
            HiddenBlock(
                members=tuple(members),
                rows=rows,
                tokens=tuple(ids),
                reply=reply,
                data=data,
                replayed=tuple(replayed),
                places=places,
                border=border,
            )
        )

    @property
    def bytes(self) -> int:
        """Bytes of the KV caches and recurrent states of all requests on this stage."""
        return self.rounds.groups.bytes
