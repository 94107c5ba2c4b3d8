"""Runs an engine's steps over several stages: its own layers here, the others on other nodes.

Each piece of work is computed by this stage's layers, sent round the others, and read when it is
back. The last token's row is written by the next forward, whose id travels with it, so a round of a
group sets out when its last one is back; other groups, and chunks of prompts, go on meanwhile.
Nothing is drafted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import mlx.core as mx

from ...mtp.finite import NO_TOKEN, NotFinite
from ...mtp.rollback import cache_arrays
from ...mtp.seams import Block, Want, as_row
from ...mtp.steps import Prefilled
from ...mtp.types import FinishReason, Forward
from ...placement.cluster import layer_range
from ...placement.errors import ExoNodeError, InvalidFrame, NumericError
from ...proto import peer_pb2 as pb
from ..model.numeric import require_finite
from ..model.stage_model import StageModel
from ..model.tensors import DTYPES, ITEM_BYTES, from_bytes, to_bytes
from ..pipeline.frames import HiddenBlock, Member, Replayed
from ..pipeline.link import Link, Trip
from .executor import REPORT_EVERY
from .options import EngineOptions
from .outcome import Flight, Outcome, counted, counted_again, judged
from .prefix_store import MORE
from .reading import Reading
from .request import Request
from .scheduler import Decode, Prefill
from .spans import growth_of
from .stage_prefixes import Borders, PromptRead, StagePrefixes
from .stage_rounds import StageRounds, repeated
from .state import State


@dataclass(slots=True, eq=False)
class Sent:
    """Work that is on its way round the stages."""

    kind: Literal["question", "chunk", "end", "log", "round"]
    """`end`: the prompt's last chunk, whose row gives the first token. `log`: a part of one."""
    requests: tuple[Request, ...]
    trip: Trip
    may_be_followed: bool = False
    own_faults: Mapping[Request, ExoNodeError] = field(default_factory=dict[Request, ExoNodeError])
    """What this stage found wrong with some of them; the others' rows set out all the same."""
    is_away: bool = True

    @property
    def is_back(self) -> bool:
        return self.trip.is_back

    @property
    def faults(self) -> Mapping[Request, ExoNodeError]:
        """What went wrong, once it is back; what this stage found comes first."""
        theirs = {r: self.trip.faults[r.key] for r in self.requests if r.key in self.trip.faults}
        return theirs | dict(self.own_faults)

    @property
    def is_chunk(self) -> bool:
        return self.kind in ("chunk", "end", "log")


class StageTarget:
    """The generator's layers, as `Reading` computes them: hidden states, no logits."""

    def __init__(self, model: StageModel) -> None:
        self._model = model

    def forward(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block:
        """Ids (rows,) appended to the caches; lazy."""
        return Block(mx.zeros((0, 1)), self._model.hidden(tokens[None], None, caches))


class PipelineExecutor:
    """The generator of a model that is split over stages. Runs on the compute thread."""

    overlaps = False

    def __init__(
        self,
        model: StageModel,
        link: Link,
        options: EngineOptions,
        prefixes: StagePrefixes | None,
        turn_ends: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        """`prefixes`: what is kept of prompts here; None: nothing. `turn_ends`: the tokens that end
        a turn."""
        self._model = model
        self._link = link
        self._dtype = options.dtype
        self._chunk = options.prefill_chunk
        self._clock = clock
        self._prefixes = prefixes
        self._turn_ends = turn_ends
        self.rounds = StageRounds[Request](
            model, DTYPES[options.dtype], lambda request: request.phase in ("replay", "decode")
        )
        self._states = self.rounds.groups.single
        self._reads: dict[Request, PromptRead] = {}
        """The prompt, as far as it was read, of those that go on reading it."""
        self._borders: dict[Request, Borders] = {}
        self._kept: dict[Request, int] = {}
        """The last row behind which all stages keep the state."""

    def begin(self, request: Request) -> Sent | None:
        """Gives a request its caches; asks the other stages first, where a prefix is kept here."""
        request.phase = "prefill"
        self._states[request] = State(self._model.make_caches())
        self._reads[request] = PromptRead()
        self._borders[request] = Borders(request.prompt, request.ends, self._turn_ends, 0)
        if self._prefixes is None or request.after_fault:
            return None
        ends = request.ends[:-1]  # the last one's logits are wanted
        held = self._prefixes.held(request.prompt, ends, request.cache_salt)
        if not held:
            return None
        schedule = [end - begin for begin, end in pairwise((0, *ends)) if end <= held[-1]]
        ids = request.prompt[: held[-1]]
        trip = self._link.ask_prefixes(request.key, ids, schedule, held)
        return Sent("question", (request,), trip)

    def read(self, step: Prefill) -> Reading:
        """Begins this stage's part of a forward over a prompt."""
        states = {request: self._states[request] for request in step.requests}
        return Reading(StageTarget(self._model), None, states, step.ends, self._clock)

    def end_read(self, reading: Reading, running: int) -> tuple[list[Outcome], Sent | None]:
        """Sends the rows on. Raises NumericError."""
        (request,), (block,) = reading.requests, reading.blocks
        if request.phase == "finished":
            return [], None
        assert block.hidden is not None
        begin, state = request.rows, self._states[request]
        state.rows = request.rows = end = reading.ends[0]
        ids, read = request.prompt[begin:end], self._reads[request]
        is_last = end == len(request.prompt)
        reply = pb.REPLY_LAST if is_last and not request.log else pb.REPLY_COMPUTED
        border = self._border(request, state) if not is_last else pb.BORDER_UNSPECIFIED
        read.add(begin, ids, border)
        if is_last:
            del self._reads[request]
        data = to_bytes(block.hidden)
        mx.clear_cache()
        self._require_finite(data, begin, end - begin)
        trip = self._send([request], begin, end - begin, ids, data, reply, border=border)
        if is_last and request.log:
            request.phase = "replay"
        if not is_last or request.log:
            return [], Sent("chunk", (request,), trip, may_be_followed=not is_last)
        return [], Sent("end", (request,), trip)

    def keep_prefix(self, request: Request) -> None:
        """Keeps a copy of the state behind the rows of its prompt that were read, where all stages
        do."""
        if self._prefixes is None or self._kept.get(request) != request.rows:
            return
        rest = len(request.prompt) - request.rows
        state, read = self._states[request], self._reads[request]
        self._prefixes.keep(state, read, self.bytes, rest, request.cache_salt)
        self._prefixes.shrink(self.bytes)

    def make_room(self, request: Request) -> None:
        """What is kept of prompts gives way to the next rows of an answer."""
        if self._prefixes is None or not self._prefixes.bytes:
            return
        group = next((g for g in self.rounds.groups.groups if g.requests == (request,)), None)
        caches = () if group is None else group.caches.views()
        self._prefixes.shrink(self.bytes + growth_of(caches, MORE))

    def replay(self, request: Request) -> tuple[FinishReason | None, Sent | None]:
        """Rebuilds the state behind the next rounds of a log, by the same forwards."""
        if request.replayed == 0:
            return counted_again(request, request.log[:1]), None
        rounds, rows = list[Replayed](), 0
        for made in request.log[request.replayed :][:REPORT_EVERY]:
            if rounds and rows + made.forward.rows > self._chunk:
                break
            rounds.append(Replayed(made.forward.rows, len(made.tokens)))
            rows += made.forward.rows
        logged = request.log[request.replayed : request.replayed + len(rounds)]
        ids, before = list[int](), request.token
        for made in logged:
            padding = [0] * (made.forward.rows - len(made.tokens))
            ids += [before, *made.tokens[:-1], *padding]
            before = made.tokens[-1]
        state = self._states[request]
        out = repeated(self._model, as_row(ids)[None], None, state.caches, rounds)
        data = to_bytes(out)
        mx.eval(cache_arrays(state.caches))
        self._require_finite(data, request.rows, rows)
        trip = self._send(
            [request], request.rows, rows, ids, data, pb.REPLY_COMPUTED, replayed=rounds
        )
        reason = counted_again(request, logged)
        request.rows += sum(forward.kept for forward in rounds)
        state.rows = request.rows
        # A round must not set out before all stages have computed what is before it.
        is_last = request.replayed == len(request.log)
        return reason, Sent("log", (request,), trip, may_be_followed=not is_last)

    def issue(self, step: Decode, running: int) -> Sent:
        """Appends a row to each request here, and sends them on."""
        requests = step.requests
        tokens = [request.token for request in requests]
        data = self.rounds.row(requests, tokens, None)
        size, faults = len(data) // len(requests), dict[Request, ExoNodeError]()
        for index, request in enumerate(requests):
            try:
                own = data[index * size : (index + 1) * size]
                self._require_finite(own, request.rows, 1)
            except NumericError as fault:  # its own: the others go on
                faults[request] = fault
        trip = self._send(requests, requests[0].rows, 1, tokens, data, pb.REPLY_ALL)
        for request in requests:
            request.pending = 1
        return Sent("round", requests, trip, own_faults=faults)

    def land(self, flight: Flight, running: int) -> list[Outcome]:
        """Reads what came back."""
        assert isinstance(flight, Sent)
        live = [request for request in flight.requests if request.phase != "finished"]
        faults = flight.faults
        outcomes = [
            Outcome(request, fault=faults[request]) for request in live if request in faults
        ]
        sound = [request for request in live if request not in faults]
        if flight.kind == "question":
            return outcomes + [self._begun(request, flight.trip.held) for request in sound]
        if flight.kind in ("round", "end") and sound:
            return outcomes + self._emitted(flight, sound)
        for request in sound:
            if request.phase == "replay" and request.replayed == len(request.log):
                request.phase = "decode"
        return outcomes

    def release(self, request: Request) -> None:
        """Frees what only this request held, here and on every stage."""
        if request not in self._borders:
            return
        self.rounds.groups.release(request)
        for known in (self._reads, self._borders, self._kept):
            _ = known.pop(request, None)
        self._link.release(request.key)

    def forget(self, requests: Sequence[Request]) -> list[Request]:
        """Nobody knows what their caches hold any more; all that shared them."""
        return self.rounds.groups.forget(requests)

    def _begun(self, request: Request, held: Sequence[int]) -> Outcome:
        """Behind the most rows that all stages keep the state of; behind none where it has no room
        here."""
        assert self._prefixes is not None
        self._prefixes.shrink(self.bytes)
        common = max(held, default=0)
        ends = [end for end in request.ends if end <= common]
        ids, salt = request.prompt[:common], request.cache_salt
        found = self._prefixes.behind(ids, ends, self.bytes, salt) if common else None
        if found is not None:
            self._states[request], self._reads[request] = found
            request.rows = request.cached = common
            borders = Borders(request.prompt, request.ends, self._turn_ends, common)
            self._borders[request] = borders
        return Outcome(request, Prefilled(request.rows, len(request.prompt)))

    def _border(self, request: Request, state: State) -> "pb.Border.ValueType":
        """What all stages keep of the state behind a chunk."""
        if self._prefixes is None:
            return pb.BORDER_UNSPECIFIED
        border = self._borders[request].at(state.rows, state.caches)
        if border != pb.BORDER_UNSPECIFIED:
            self._kept[request] = state.rows
        return border

    def _emitted(self, flight: Sent, sound: Sequence[Request]) -> list[Outcome]:
        """The tokens that a round or the end of a prompt gave, read by one synchronisation."""
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
        width = len(back.data) // len(requests) // ITEM_BYTES[self._dtype]
        hidden = from_bytes(back.data, self._dtype, (len(requests), 1, width))
        ids = mx.array([[token] for token in back.tokens], dtype=mx.int32)
        is_round = flight.kind == "round"
        starts = [r.rows - (0 if is_round else 1) for r in requests]
        verdict = judged(requests, self._model.logits(ids, hidden), None, [0] * len(ids), starts)
        outcomes = list[Outcome]()
        for index, (request, (_, given, _)) in enumerate(
            zip(requests, verdict.read(), strict=True)
        ):
            if request not in sound:
                continue
            begun = request.rows if is_round else self._last_begin(request)
            request.rows += is_round
            request.pending = 0
            request.phase = "decode"
            if NO_TOKEN in given:
                outcomes.append(Outcome(request, fault=NotFinite(request.rows)))
                continue
            request.sampler.commit(verdict.tokens[index])
            forward = Forward(begun, request.rows - begun, len(requests))
            outcomes.append(counted(request, verdict, index, given, forward))
        return outcomes

    def _last_begin(self, request: Request) -> int:
        """The row that the prompt's last chunk began at."""
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
        members = [Member(*request.key, request.rows) for request in requests]
        if len(members) == 1:
            members = [Member(*requests[0].key, position)]
        return self._link.send(
            HiddenBlock(
                members=tuple(members),
                rows=rows,
                tokens=tuple(ids),
                reply=reply,
                data=data,
                replayed=tuple(replayed),
                border=border,
            )
        )

    @property
    def bytes(self) -> int:
        """Bytes of KV and of recurrent states of all requests on this stage."""
        return self.rounds.groups.bytes
