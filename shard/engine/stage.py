"""A stage after the first one: computes blocks and keeps the states of their requests.

It knows neither gRPC nor threads; every method runs on the compute thread.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final, NamedTuple

import mlx.core as mx

from ...mtp.caches.rollback import cache_arrays
from ...mtp.pieces import Pieces
from ...mtp.seams import FORWARD_FAULTS
from ...mtp.types import CacheTier
from ...placement.cluster import layer_range
from ...placement.errors import ExoNodeError, NumericError, PeerLost, StateLost
from ...proto import peer_pb2 as pb
from ..model.stage_limits import StageLimits
from ..model.stage_model import StageModel
from ..model.tensors import DTYPES, ITEM_BYTES, from_bytes, require_finite, to_bytes
from ..pipeline.copy_query import ExactCopies
from ..pipeline.frames import BlockMember, HiddenBlock
from ..pipeline.link import Key
from ..pipeline.seen_attempts import SeenAttempts
from .attempts import Attempts
from .compute import device_lost
from .measuring import Measuring
from .prefixes.borders import PrefillLog
from .prefixes.prompt_path import PromptPath
from .prefixes.store import PrefixStore
from .stage_copies import StageCopies
from .stage_request import StageRequest
from .stage_rounds import StageRounds, replay_forwards
from .states.state import State
from .step_outcome import SHARED
from .step_times import StepTimes

log = logging.getLogger(__name__)

MAKE_ROOM_EVERY: Final = 64
"""Rows of an answer after which the prefix cache makes room: a divisor of the steps by which caches
grow."""


class StageOutput(NamedTuple):
    """The result of a block on a stage."""

    block: HiddenBlock | None = None
    """The block for the next stage; without data if it only confirms that rows were computed."""
    faults: Sequence[tuple[Key, Exception]] = ()
    """Errors by member."""


class StageWorker:
    """Runs the layers [first, end) for many requests, each at its own position."""

    def __init__(
        self,
        model: StageModel,
        expected: StageLimits,
        clock: Callable[[], float],
        prefixes: PrefixStore | None = None,
        *,
        keeps_chunk: bool = True,
        lookup_off_reason: str = "",
    ) -> None:
        """`prefixes`: this stage's prefix cache, or None. `keeps_chunk`: see `device_lost`.
        `lookup_off_reason`: why it verifies no copied drafts; empty if it may."""
        self._keeps_chunk = keeps_chunk
        self._model = model
        self._expected = expected
        self._clock = clock
        self._prefixes = prefixes or PrefixStore(0, model.make_caches)
        self._rounds = StageRounds[StageRequest](
            model, DTYPES[expected.dtype], lambda request: not request.has_ended
        )
        self.copies = StageCopies(model, expected, lookup_off_reason)
        self._requests: dict[str, StageRequest] = {}
        self._attempts = SeenAttempts(expected.stage)
        self.measurement_attempts = Attempts()
        """Set it before `begin_measuring`."""
        self._measuring: Measuring | None = None

    @property
    def live_requests(self) -> int:
        """Number of requests with a state on this stage."""
        return len(self._requests)

    def cache_bytes(self) -> int:
        """Bytes of the KV caches and recurrent states of all live requests."""
        return self._rounds.groups.bytes

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of the prefix cache, which shrinks when requests need the room."""
        return self._prefixes.bytes

    @property
    def prefix_hits(self) -> Mapping[CacheTier, int]:
        """See `PrefixCache.hits`."""
        return self._prefixes.hits

    @property
    def step_times(self) -> StepTimes:
        """Seconds of this stage's layers alone."""
        return self._rounds.step_times

    def save_prefix(self) -> bool:
        """See `PrefixDisk.save_next`; does nothing while there is a request."""
        return not self._requests and self._prefixes.save_next()

    def begin_measuring(self, *, batches: bool = True) -> Measuring:
        """Shares no forwards and verifies no copies until `step` has measured whether they compute
        the same bits as single rows of single requests. `batches`: whether forwards are shared."""
        positions = self._model.rope_positions
        self._measuring = Measuring(
            lambda: self._pieces(batches=batches),
            self._clock,
            lambda: positions.set_deltas([0]),
            lambda size: self._prefixes.reserve(size, self.cache_bytes()),
        )
        return self._measuring

    def _pieces(self, *, batches: bool) -> Pieces[None]:
        e, guard = self._expected, self.measurement_attempts.guard
        if batches:
            probe = self._rounds.probe(e.hidden_size, e.vocabulary, e.context_length)
            yield from guard("batches", probe, self._rounds.refuse_sharing)
        yield from guard("copies", self.copies.probe(), self.copies.refuse)

    def step(self) -> bool:
        """Does a piece of the measurement; returns False if there is none to do now."""
        return self._measuring is not None and self._measuring.step(idle=not self._requests)

    def forward(self, block: HiddenBlock) -> StageOutput:
        """Computes a block.

        If one of several members is refused, it gets its own error and the others get StateLost. If
        the forward fails, all get StateLost; a single request's error is raised.
        """
        keys = [member.key for member in block.members]
        requests = list[StageRequest]()
        for member in block.members:
            try:
                requests.append(self._request_of(member, block))
            except ExoNodeError as fault:
                lost = StateLost(f"request {member.request}, of the same forward, was refused")
                faults = [(key, fault if key == member.key else lost) for key in keys]
                return StageOutput(None, faults)
        try:
            data = self._compute(block, requests)
        except FORWARD_FAULTS as fault:
            if (device_fault := device_lost(fault, keeps_chunk=self._keeps_chunk)) is not None:
                raise device_fault from fault
            lost = [r for r in self._rounds.groups.forget(requests) if not r.has_ended]
            for request in lost:
                self._drop(request.key[0])
            if len(lost) == 1:
                raise
            log.error("%s", SHARED, exc_info=fault)
            return StageOutput(None, [(request.key, StateLost(SHARED)) for request in lost])
        for request in requests:
            if not request.open_rows:
                request.rows += block.kept_rows
            request.used_at = self._clock()  # only now: it may take longer than a lease
        self._keep_prefix(block, requests)
        # Those of a round that copied may come of a draft that is rejected: the first stage sees.
        faults = [] if requests[0].open_rows else self._not_finite(block, data)
        if faults and len(keys) == 1:
            return StageOutput(None, faults)
        near_tie = len(keys) > 1 and not self._rounds.is_same and self._shares(requests)
        return StageOutput(self._output_block(block, data, near_tie=near_tie), faults)

    def _shares(self, requests: Sequence[StageRequest]) -> bool:
        """Whether one forward computes a row of each of them."""
        shares = all(request.shares for request in requests)
        return self._rounds.computes_together(requests, shares=shares)

    def _request_of(self, member: BlockMember, block: HiddenBlock) -> StageRequest:
        """The request of a member, ready to append rows.

        Raises InvalidFrame for an old attempt, or where a block does not match the state, and
        StateLost if it begins after a prefix that is no longer cached.
        """
        request = self._request(member.key, opens=member.position == 0)
        if member.position > request.rows == 0 and request.queried_prefix.ids:
            self._begin_behind(request, member.position)
        kept_rows = request.check(member, block)
        if request.open_rows:
            self._rounds.keep(request, request.open_rows, kept_rows)
            request.rows, request.open_rows = request.rows + kept_rows, 0
        return request

    def agree_on_copies(self, key: Key, copies: ExactCopies) -> ExactCopies:
        """The copies of a request that this stage computes exactly, too; its rounds may have these
        lengths from now on. Raises InvalidFrame for an old attempt, PeerLost without a state."""
        request, agreed = self._request(key, opens=False), copies.with_stage(self.copies.exact)
        request.copies = agreed.lengths
        return agreed

    def _compute(self, block: HiddenBlock, requests: Sequence[StageRequest]) -> bytes:
        """Runs this stage's layers over a block. Returns the hidden states of all rows."""
        e = self._expected
        shape = (len(requests), block.rows, e.hidden_size)
        entering = from_bytes(block.data, e.dtype, shape)
        deltas = [member.delta for member in block.members]
        if block.is_round and block.rows == 1:
            shares = self._shares(requests)
            return self._rounds.row(requests, block.tokens, entering, deltas, shares=shares)
        if block.is_round and requests[0].copies:
            requests[0].open_rows = block.rows
            return self._rounds.block(requests[0], block.tokens, entering, deltas[0])
        positions = self._model.rope_positions
        if block.places:
            positions.at(mx.array(block.places, dtype=mx.int32).reshape(3, -1))
        else:
            positions.set_deltas(deltas)
        positions.join(block.tokens)
        (request,) = requests
        state = self._rounds.groups.take(request)
        self._rounds.groups.single[request] = state
        ids = mx.array([block.tokens], dtype=mx.int32)
        if block.replayed:
            out = replay_forwards(self._model, ids, entering, state.caches, block.replayed)
        else:
            out = self._model.hidden(ids, entering, state.caches)
        state.rows += block.kept_rows
        if not self._is_last or block.is_round:
            return to_bytes(out)
        if block.reply == pb.REPLY_LAST:
            return to_bytes(out[:, -1:])
        mx.eval(cache_arrays(state.caches))
        return b""

    def _output_block(self, block: HiddenBlock, data: bytes, *, near_tie: bool) -> HiddenBlock:
        if not self._is_last or block.is_round:
            return replace(block, data=data, near_tie=block.near_tie or near_tie)
        if block.reply == pb.REPLY_LAST:
            return replace(block, rows=1, tokens=block.tokens[-1:], data=data, places=())
        return replace(block, tokens=(), data=b"", replayed=(), places=())

    def _not_finite(self, block: HiddenBlock, data: bytes) -> list[tuple[Key, Exception]]:
        """Errors of the members whose last rows have numbers that are not finite."""
        if not data:
            return []
        e, m = self._expected, self._model
        stage = f"stage {e.stage} ({layer_range(m.first, m.end)})"
        size, faults = len(data) // len(block.members), list[tuple[Key, Exception]]()
        rows = size // (e.hidden_size * ITEM_BYTES[e.dtype])
        for index, member in enumerate(block.members):
            own = data[index * size : (index + 1) * size]
            try:
                require_finite(own, e.dtype, member.position + block.rows - rows, rows, stage)
            except NumericError as fault:
                faults.append((member.key, fault))
        if faults:
            self._prefixes.clear()
        return faults

    def _keep_prefix(self, block: HiddenBlock, requests: Sequence[StageRequest]) -> None:
        """Caches the state after a chunk if the first stage asks for it, and makes room."""
        if block.is_round:
            if any(-member.position % MAKE_ROOM_EVERY < block.rows for member in block.members):
                self._shrink_prefixes()
            return
        (request,), (member,) = requests, block.members
        if not block.replayed:
            request.prefill_log.add(member.position, block.tokens, block.border)
        if block.border != pb.BORDER_UNSPECIFIED:
            state, read = self._rounds.groups.single[request], request.prefill_log
            live = self.cache_bytes()
            self._prefixes.keep_read(read.path, state, read.first_turn, live, block.rows)
        self._shrink_prefixes()

    def _shrink_prefixes(self) -> None:
        """Shrinks the prefix cache to the room that live requests leave."""
        if self._prefixes.bytes:
            self._prefixes.memory.evict(self.cache_bytes())

    def cached_ends(
        self, key: Key, tokens: Sequence[int], schedule: Sequence[int], ends: Sequence[int]
    ) -> list[int]:
        """The rows among `ends` after which this stage has cached the state, and the attempt may
        begin.

        They are row counts of `tokens`, which forwards of `schedule` rows each read. Raises
        InvalidFrame for an old attempt.
        """
        request = self._request(key, opens=True)
        request.queried_prefix = PromptPath(tokens, list(accumulate(schedule)))
        cached = self._prefixes.cached_ends(request.queried_prefix, self.cache_bytes())
        return [rows for rows in ends if rows in cached]

    def _begin_behind(self, request: StageRequest, rows: int) -> None:
        """Restores the state after `rows` rows of the queried prefix. Raises StateLost."""
        live = self.cache_bytes()
        self._prefixes.memory.evict(live)
        state = self._prefixes.restore(request.queried_prefix, rows, live)
        if state is None:
            raise StateLost(
                f"stage {self._expected.stage} has lost the state after the prompt's first "
                f"{rows} rows"
            )
        self._rounds.groups.single[request] = state
        request.prefill_log = PrefillLog.of(request.queried_prefix, state)
        request.rows = rows

    def release(self, key: Key) -> None:
        """Frees a request's state; its attempt and earlier ones are refused from now on."""
        name, attempt = key
        self._attempts.add(name, attempt, self._requests)
        request = self._requests.get(name)
        if request is not None and request.key[1] <= attempt:
            self._drop(name)
            mx.clear_cache()

    def renew(self, key: Key) -> None:
        """Renews a request's lease while no frames of it arrive, as when its reader is slow."""
        request = self._requests.get(key[0])
        if request is not None and request.key == key:
            request.used_at = self._clock()

    def expire(self, lease_s: float) -> list[str]:
        """Frees states that no frame has used for `lease_s` seconds. Returns their requests."""
        limit = self._clock() - lease_s
        ended = [request.key for request in self._requests.values() if request.used_at < limit]
        for key in ended:
            self.release(key)
            self._attempts.expire(*key)
        return [name for name, _ in ended]

    def _request(self, key: Key, *, opens: bool) -> StageRequest:
        name, attempt = key
        request = self._requests.get(name)
        self._attempts.check(name, attempt, live=request is not None)
        if request is not None and request.key == key:
            return request
        if not opens:
            # Not InvalidFrame: the answer can be resumed.
            stage = self._expected.stage
            raise PeerLost(f"stage {stage} has no state of request {name} any more")
        if request is not None:
            self._drop(name)
        request = StageRequest(key, self._clock(), shares=not self._rounds.batching_reason)
        self._prefixes.begin()
        self._requests[name] = request
        self._rounds.groups.single[request] = State(self._model.make_caches())
        self._attempts.add(name, attempt, self._requests)
        return request

    def _drop(self, name: str) -> None:
        """Frees a request's state."""
        if (request := self._requests.pop(name, None)) is not None:
            request.has_ended = True
            self._rounds.release(request)

    @property
    def _is_last(self) -> bool:
        return self._model.end == self._model.num_layers
