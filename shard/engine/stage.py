"""What a stage does with a block: sessions, attempts, forwards. No gRPC, no threads.

Every method runs on the compute thread.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final, NamedTuple

import mlx.core as mx

from ...mtp.rollback import cache_arrays
from ...mtp.seams import FORWARD_FAULTS
from ...placement.cluster import layer_range
from ...placement.errors import ExoNodeError, InvalidFrame, NumericError, PeerLost, StateLost
from ...proto import peer_pb2 as pb
from ..model.numeric import require_finite
from ..model.stage_limits import StageLimits
from ..model.stage_model import StageModel
from ..model.tensors import DTYPES, ITEM_BYTES, from_bytes, to_bytes
from ..pipeline.frames import HiddenBlock, Member
from ..pipeline.link import Key
from ..pipeline.seen_attempts import SeenAttempts
from .outcome import SHARED
from .stage_prefixes import PromptRead, StagePrefixes
from .stage_rounds import StageRounds, repeated
from .state import State

log = logging.getLogger(__name__)

GROWS: Final = 64
"""Rows of an answer behind which prefixes give way: a divisor of the steps by which caches grow."""


@dataclass(slots=True, eq=False)
class Session:
    """One request's life on this stage."""

    key: Key
    used: float
    """When a frame of it was last computed."""
    rows: int = 0
    """Committed rows."""
    is_over: bool = False
    read: PromptRead = field(default_factory=PromptRead)
    """The prompt, as far as forwards here read it."""
    prefix: PromptRead = field(default_factory=PromptRead)
    """The rows of the prompt behind which the generator may begin."""


class Passed(NamedTuple):
    """What a stage made of a block."""

    leaving: HiddenBlock | None = None
    """What is to be sent on; without data where it only tells that the block was computed."""
    faults: Sequence[tuple[Key, Exception]] = ()
    """What went wrong, by member."""


class StageWorker:
    """Runs the layers [first, end) for many requests, each at its own position."""

    def __init__(
        self,
        model: StageModel,
        expected: StageLimits,
        clock: Callable[[], float],
        prefixes: StagePrefixes | None = None,
    ) -> None:
        """`prefixes`: what is kept of prompts here; None: nothing."""
        self._model = model
        self._expected = expected
        self._clock = clock
        self._prefixes = prefixes
        self._rounds = StageRounds[Session](
            model, DTYPES[expected.dtype], lambda session: not session.is_over
        )
        self._sessions: dict[str, Session] = {}
        self._attempts = SeenAttempts(expected.stage)

    @property
    def live_requests(self) -> int:
        """Requests whose state is here."""
        return len(self._sessions)

    def cache_bytes(self) -> int:
        """Bytes of KV and recurrent state of all live requests."""
        return self._rounds.groups.bytes

    @property
    def prefix_cache_bytes(self) -> int:
        """Kept of prompts; they go where requests need the room."""
        return self._prefixes.bytes if self._prefixes else 0

    def probe(self) -> None:
        """Measures whether shared forwards compute what those of single requests do."""
        e = self._expected
        self._rounds.probe(e.hidden_size, e.vocabulary, e.context_length)

    def forward(self, block: HiddenBlock) -> Passed:
        """Computes a block.

        Of several requests one that is refused has its own fault, and the others have lost the
        forward. Raises what else a forward of one request raises.
        """
        keys = [member.key for member in block.members]
        sessions = list[Session]()
        for member in block.members:
            try:
                sessions.append(self._session_of(member))
            except ExoNodeError as fault:
                lost = StateLost(f"request {member.request}, of the same forward, was refused")
                return Passed(None, [(key, fault if key == member.key else lost) for key in keys])
        try:
            data = self._computed(block, sessions)
        except FORWARD_FAULTS as fault:
            lost = [s for s in self._rounds.groups.forget(sessions) if not s.is_over]
            for session in lost:
                self._drop(session.key[0])
            if len(lost) == 1:
                raise
            log.error("%s", SHARED, exc_info=fault)
            return Passed(None, [(session.key, StateLost(SHARED)) for session in lost])
        for session in sessions:
            session.rows += block.kept
            session.used = self._clock()  # only now: it may take longer than a lease
        self._keep_prefix(block, sessions)
        faults = self._not_finite(block, data)
        if faults and len(keys) == 1:
            return Passed(None, faults)
        shared = len(keys) > 1 and not self._rounds.is_same
        return Passed(self._leaving(block, data, near_tie=shared), faults)

    def _session_of(self, member: Member) -> Session:
        """Raises InvalidFrame for an old attempt or a position that is not the session's, StateLost
        where it begins behind a prefix that is not here any more."""
        session = self._session(member.key, opens=member.position == 0)
        if member.position > session.rows == 0 and session.prefix.ids:
            self._begin_behind(session, member.position)
        if member.position != session.rows:
            raise InvalidFrame(
                f"hidden.members.position is {member.position} where {session.rows} rows are "
                "committed",
                param="hidden.members.position",
            )
        return session

    def _computed(self, block: HiddenBlock, sessions: Sequence[Session]) -> bytes:
        """What leaves this stage's layers, of all rows."""
        e = self._expected
        shape = (len(sessions), block.rows, e.hidden_size)
        entering = from_bytes(block.data, e.dtype, shape)
        if block.is_round and block.rows == 1:
            return self._rounds.row(sessions, block.tokens, entering)
        (session,) = sessions
        state = self._rounds.groups.take(session)
        self._rounds.groups.single[session] = state
        ids = mx.array([block.tokens], dtype=mx.int32)
        if block.replayed:
            out = repeated(self._model, ids, entering, state.caches, block.replayed)
        else:
            out = self._model.hidden(ids, entering, state.caches)
        state.rows += block.kept
        if not self._is_last or block.is_round:
            return to_bytes(out)
        if block.reply == pb.REPLY_LAST:
            return to_bytes(out[:, -1:])
        mx.eval(cache_arrays(state.caches))
        return b""

    def _leaving(self, block: HiddenBlock, data: bytes, *, near_tie: bool) -> HiddenBlock:
        if not self._is_last or block.is_round:
            return replace(block, data=data, near_tie=block.near_tie or near_tie)
        if block.reply == pb.REPLY_LAST:
            return replace(block, rows=1, tokens=block.tokens[-1:], data=data)
        return replace(block, tokens=(), data=b"", replayed=())

    def _not_finite(self, block: HiddenBlock, data: bytes) -> list[tuple[Key, Exception]]:
        """The members whose last row has numbers that are not finite."""
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
        if faults and self._prefixes is not None:
            self._prefixes.clear()
        return faults

    def _keep_prefix(self, block: HiddenBlock, sessions: Sequence[Session]) -> None:
        """What others may go on from, where the generator says so."""
        if block.is_round:
            if any(member.position % GROWS == 0 for member in block.members):
                self._give_way()
            return
        (session,), (member,) = sessions, block.members
        if not block.replayed:
            session.read.add(member.position, block.tokens, block.border)
        if self._prefixes is not None and block.border != pb.BORDER_UNSPECIFIED:
            state = self._rounds.groups.single[session]
            self._prefixes.keep(state, session.read, self.cache_bytes(), block.rows)
        self._give_way()

    def _give_way(self) -> None:
        """What is kept makes room for requests, whose caches grow now and then."""
        if self._prefixes is not None and self._prefixes.bytes:
            self._prefixes.shrink(self.cache_bytes())

    def held(
        self, key: Key, tokens: Sequence[int], schedule: Sequence[int], held: Sequence[int]
    ) -> list[int]:
        """Those of `held` behind which this stage keeps the state, and the attempt may begin.

        They are rows of `tokens`, which forwards of `schedule` rows each read. Raises InvalidFrame
        for an old attempt.
        """
        session = self._session(key, opens=True)
        session.prefix = PromptRead(list(tokens), list(accumulate(schedule)))
        if self._prefixes is None:
            return []
        kept = self._prefixes.held(tokens, session.prefix.ends)
        return [rows for rows in held if rows in kept]

    def _begin_behind(self, session: Session, rows: int) -> None:
        """Raises StateLost."""
        found, prefix = None, session.prefix
        if self._prefixes is not None:
            live = self.cache_bytes()
            self._prefixes.shrink(live)
            ends = [end for end in prefix.ends if end <= rows]
            found = self._prefixes.behind(prefix.ids[:rows], ends, live)
        if found is None:
            raise StateLost(
                f"stage {self._expected.stage} has lost the state behind the prompt's first "
                f"{rows} rows"
            )
        self._rounds.groups.single[session], session.read = found
        session.rows = rows

    def release(self, key: Key) -> None:
        """Frees the request's state; its attempt and earlier ones are refused from now on."""
        request, attempt = key
        self._attempts.add(request, attempt, self._sessions)
        session = self._sessions.get(request)
        if session is not None and session.key[1] <= attempt:
            self._drop(request)
            mx.clear_cache()

    def renew(self, key: Key) -> None:
        """The request lives though no frame of it moves, as where its reader is slow."""
        session = self._sessions.get(key[0])
        if session is not None and session.key == key:
            session.used = self._clock()

    def expire(self, lease_s: float) -> list[str]:
        """Frees what no frame has touched for `lease_s` seconds; returns those requests."""
        limit = self._clock() - lease_s
        ended = [session.key for session in self._sessions.values() if session.used < limit]
        for key in ended:
            self.release(key)
            self._attempts.expire(*key)
        return [request for request, _ in ended]

    def _session(self, key: Key, *, opens: bool) -> Session:
        request, attempt = key
        session = self._sessions.get(request)
        self._attempts.check(request, attempt, live=session is not None)
        if session is not None and session.key == key:
            return session
        if not opens:
            # Not InvalidFrame: the answer can go on once its state is rebuilt.
            stage = self._expected.stage
            raise PeerLost(f"stage {stage} has no state of request {request} any more")
        if session is not None:
            self._drop(request)
        session = Session(key, self._clock())
        self._sessions[request] = session
        self._rounds.groups.single[session] = State(self._model.make_caches())
        self._attempts.add(request, attempt, self._sessions)
        return session

    def _drop(self, request: str) -> None:
        """Its state is over."""
        if (session := self._sessions.pop(request, None)) is not None:
            session.is_over = True
            self._rounds.groups.release(session)

    @property
    def _is_last(self) -> bool:
        return self._model.end == self._model.num_layers
