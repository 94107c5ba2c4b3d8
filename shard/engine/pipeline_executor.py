"""Runs an engine's steps over a pipeline: the first stage's layers here, the others elsewhere.

Each piece of work is computed by this stage's layers, sent through the others, and read when the
last stage has answered. The last token's row is written by the next forward, which carries its id,
so a group's next round is sent once the last one is back; other groups and chunks of prompts are
sent in between. Nothing is drafted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Literal

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
from ..pipeline.frames import BlockMember, HiddenBlock, Replayed
from ..pipeline.link import StageLink, Trip
from .executor import REPORT_EVERY
from .options import EngineOptions
from .prefill_forward import PrefillForward
from .prefixes.borders import Borders
from .prefixes.memory import is_worth_caching
from .prefixes.store import PrefixStore
from .request import Request
from .scheduler import Decode, Flight, Prefill
from .stage_rounds import StageRounds, replay_forwards
from .states.state import State
from .step_outcome import StepOutcome, count_replayed, count_round, verdict_of


@dataclass(slots=True, eq=False)
class RemoteWork(Flight):
    """Work in flight on the other stages."""

    kind: Literal["prefix_query", "chunk", "last_chunk", "log", "round"]
    """`last_chunk`: its last row gives the first token. `log`: rounds that are repeated."""
    trip: Trip
    own_faults: Mapping[Request, ExoNodeError] = field(default_factory=dict[Request, ExoNodeError])
    """Errors of requests on this stage; the rows of the other requests are sent nevertheless."""

    @property
    def is_away(self) -> bool:
        return True

    @property
    def is_back(self) -> bool:
        return self.trip.is_back

    @property
    def faults(self) -> Mapping[Request, ExoNodeError]:
        """Errors by request, once it is back; this stage's own take precedence."""
        remote = {r: self.trip.faults[r.key] for r in self.requests if r.key in self.trip.faults}
        return remote | dict(self.own_faults)

    @property
    def is_chunk(self) -> bool:
        return self.kind in ("chunk", "last_chunk", "log")


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
    ) -> None:
        """`prefixes`: this stage's prefix cache. `turn_ends`: the tokens that end a turn."""
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
        """Computes a row of each request here, and sends the rows to the next stage."""
        requests = step.requests
        tokens = [request.token for request in requests]
        data = self.rounds.row(requests, tokens, None, [r.delta for r in requests])
        size, faults = len(data) // len(requests), dict[Request, ExoNodeError]()
        for index, request in enumerate(requests):
            try:
                own = data[index * size : (index + 1) * size]
                self._require_finite(own, request.rows, 1)
            except NumericError as fault:  # of this request alone
                faults[request] = fault
        trip = self._send(requests, requests[0].rows, 1, tokens, data, pb.REPLY_ALL)
        for request in requests:
            request.pending_tokens = 1
        return RemoteWork(requests, "round", trip, own_faults=faults)

    def land(self, flight: Flight, running: int) -> list[StepOutcome]:
        """Reads work that the other stages have answered."""
        assert isinstance(flight, RemoteWork)
        live = [request for request in flight.requests if request.phase != "finished"]
        faults = flight.faults
        outcomes = [
            StepOutcome(request, fault=faults[request]) for request in live if request in faults
        ]
        sound = [request for request in live if request not in faults]
        if flight.kind == "prefix_query":
            return outcomes + [self._begin_behind(r, flight.trip.prefix_rows) for r in sound]
        if flight.kind in ("round", "last_chunk") and sound:
            return outcomes + self._read_tokens(flight, sound)
        for request in sound:
            if request.phase == "replay" and request.replay.is_done:
                request.phase = "decode"
        return outcomes

    def release(self, request: Request) -> None:
        """Frees a request's state, here and on every stage."""
        if request not in self._borders:
            return
        self.rounds.release(request)
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

    def _read_tokens(self, flight: RemoteWork, sound: Sequence[Request]) -> list[StepOutcome]:
        """Samples and reads the tokens of a round or of prompts' ends, in one synchronisation."""
        back, requests = flight.trip.block, flight.requests
        if back is None or back.rows != 1 or len(back.members) != len(requests):
            raise InvalidFrame(
                f"{0 if back is None else back.rows} rows of each of "
                f"{0 if back is None else len(back.members)} requests came back where 1 of each of "
                f"{len(requests)} were asked for",
                param="hidden.rows",
            )
        if back.near_tie:
            self.rounds.is_same = False
        if len(requests) > 1:
            self.batch_identity = "bitwise" if self.rounds.is_same else "near_tie"
        width = len(back.data) // len(requests) // ITEM_BYTES[self._dtype]
        hidden = from_bytes(back.data, self._dtype, (len(requests), 1, width))
        ids = mx.array([[token] for token in back.tokens], dtype=mx.int32)
        is_round = flight.kind == "round"
        starts = [r.rows - (0 if is_round else 1) for r in requests]
        verdict = verdict_of(
            requests, self._model.logits(ids, hidden), None, [0] * len(ids), starts
        )
        outcomes = list[StepOutcome]()
        for index, (request, (_, ids_of_row, _)) in enumerate(
            zip(requests, verdict.read(), strict=True)
        ):
            if request not in sound:
                continue
            begin = request.rows if is_round else self._last_begin(request)
            request.rows += is_round
            request.pending_tokens = 0
            request.phase = "decode"
            if NO_TOKEN in ids_of_row:
                outcomes.append(StepOutcome(request, fault=NotFinite(request.rows)))
                continue
            request.sampler.commit(verdict.tokens[index])
            forward = Forward(begin, request.rows - begin, len(requests))
            outcomes.append(count_round(request, verdict, index, ids_of_row, forward))
        return outcomes

    def _last_begin(self, request: Request) -> int:
        """The first row of the prompt's last chunk."""
        return max((end for end in request.ends[:-1]), default=0)

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
        members = [BlockMember(*request.key, request.rows, request.delta) for request in requests]
        places: tuple[int, ...] = ()
        if len(members) == 1:
            (request,), delta = requests, requests[0].delta
            if request.images is not None and position < len(request.prompt):
                delta, places = request.images.placing(position, position + rows)
            members = [BlockMember(*request.key, position, delta)]
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
