"""What a stage does with a frame: sessions, attempts, forwards, rollback. No gRPC, no threads.

Every method runs on the compute thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final

import mlx.core as mx

from ...mtp.rollback import cache_arrays
from ...placement.cluster import layer_range
from ...placement.errors import ExoNodeError, InvalidFrame, NumericError, PeerLost, StateLost
from ...proto import peer_pb2 as pb
from ..model.numeric import require_finite
from ..model.stage_limits import StageLimits
from ..model.stage_model import StageModel
from ..model.tensors import DTYPES, from_bytes, to_bytes
from .frames import HiddenBlock
from .merged import SHARED, Merged
from .prefixes import Prefixes, PromptRead
from .request_state import RequestState
from .seen_attempts import SeenAttempts

GROWS: Final = 64
"""Rows of an answer behind which prefixes give way: a divisor of the steps by which caches grow."""


@dataclass(slots=True)
class Session:
    """One request's state on this stage."""

    attempt: int
    state: RequestState
    used: float
    prefix: PromptRead = field(default_factory=PromptRead)
    """The rows of the prompt behind which the generator may begin."""


Outcome = list[HiddenBlock] | Exception
"""Of a block: what is to be sent on, or why it was not computed."""


class StageWorker:
    """Runs the layers [first, end) for many requests, each at its own position."""

    def __init__(
        self,
        model: StageModel,
        expected: StageLimits,
        clock: Callable[[], float],
        prefixes: Prefixes | None = None,
    ) -> None:
        """`prefixes`: what is kept of prompts here; None: nothing."""
        self._model = model
        self._expected = expected
        self._clock = clock
        self._prefixes = prefixes
        self._merged = Merged(model, DTYPES[expected.dtype])
        self._sessions: dict[str, Session] = {}
        self._attempts = SeenAttempts(expected.stage)

    @property
    def live_requests(self) -> int:
        return len(self._sessions)

    def cache_bytes(self) -> int:
        """Bytes of KV and recurrent state of all live requests."""
        own = (self._own(s.state) for s in self._sessions.values())
        held = sum(array.nbytes for caches in own for array in cache_arrays(caches))
        return held + sum(array.nbytes for array in self._merged.arrays())

    @property
    def prefix_cache_bytes(self) -> int:
        """Kept of prompts; they go where requests need the room."""
        return self._prefixes.bytes if self._prefixes else 0

    def probe(self) -> None:
        """Measures whether merged forwards compute what those of single requests do."""
        e = self._expected
        self._merged.probe(e.hidden_size, e.vocabulary, e.context_length)

    def forward_all(self, blocks: Sequence[HiddenBlock]) -> list[Outcome]:
        """Rows of several requests, by one forward as far as their states allow it."""
        shared = [block for block in blocks if self._shares(block)]
        told = dict[str, Outcome]()
        if len(shared) > 1:
            told = dict(zip((b.request for b in shared), self._forward_merged(shared), strict=True))
        return [told.get(block.request) or self._outcome(block) for block in blocks]

    def _shares(self, block: HiddenBlock) -> bool:
        session = self._sessions.get(block.request)
        return (
            session is not None
            and session.attempt == block.attempt
            and session.state.position == block.position >= 1
            and block.rows == 1
            and block.reply == pb.REPLY_ALL
            and self._merged.takes(session.state)
        )

    def _outcome(self, block: HiddenBlock) -> Outcome:
        try:
            return self.forward(block)
        except (
            ExoNodeError,
            RuntimeError,
        ) as fault:  # its own; the others go on
            return fault

    def _forward_merged(self, blocks: Sequence[HiddenBlock]) -> list[Outcome]:
        e, sessions = self._expected, [self._sessions[block.request] for block in blocks]
        data = b"".join(block.data for block in blocks)
        entering = from_bytes(data, e.dtype, (len(blocks), 1, e.hidden_size))
        states = [session.state for session in sessions]
        try:
            rows = self._merged.rows(states, [b.tokens[0] for b in blocks], entering)
        except StateLost:
            for block in blocks:
                self._drop(block.request)
            return [StateLost(SHARED) for _ in blocks]
        made = zip(blocks, sessions, rows, strict=True)
        return [self._leaving(block, session, row) for block, session, row in made]

    def _leaving(self, block: HiddenBlock, session: Session, row: bytes) -> Outcome:
        session.used = self._clock()
        self._give_way(block.position)
        try:
            data = self._checked(row, block.position, 1)
        except NumericError as fault:
            return fault
        near_tie = block.near_tie or not self._merged.same
        return [replace(block, data=data, near_tie=near_tie)]

    def forward(self, block: HiddenBlock) -> list[HiddenBlock]:
        """Hidden in, what is to be sent on out: one block, or none.

        None where the last stage has nothing to send back; without data where it only tells that
        the block was computed. Raises InvalidFrame for an old attempt or a position that is not the
        session's, StateLost where it begins behind a prefix that is not here any more.
        """
        session = self._session(block.request, block.attempt, opens=block.position == 0)
        if block.position > session.state.position == 0 and session.prefix.ids:
            session.state = self._behind_prefix(session.prefix, block.position)
        state = session.state
        if block.position != state.position:
            raise InvalidFrame(
                f"hidden.position is {block.position} where {state.position} rows are committed",
                param="hidden.position",
            )
        e = self._expected
        entering = from_bytes(block.data, e.dtype, (1, block.rows, e.hidden_size))
        state.alone()
        tokens = mx.array([block.tokens], dtype=mx.int32)
        schedule = block.schedule or (block.rows,)
        out = forwards(self._model, tokens, entering, state.caches, schedule)
        state.wrote(schedule)
        leaving = self._outgoing(block, out, state)
        session.used = self._clock()  # only now it was computed, which may take longer than a lease
        if block.reply != pb.REPLY_ALL and not block.schedule:
            state.read.add(block.position, block.tokens, block.border)
        self._keep_prefix(block, state)
        return [] if leaving is None else [leaving]

    def _keep_prefix(self, block: HiddenBlock, state: RequestState) -> None:
        """What others may go on from, where the generator says so."""
        if block.reply == pb.REPLY_ALL:
            self._give_way(block.position)
        if self._prefixes is None or block.reply == pb.REPLY_ALL:
            return
        if block.border != pb.BORDER_UNSPECIFIED:
            self._prefixes.keep(state, self.cache_bytes())
        if self._prefixes.bytes:
            self._prefixes.shrink(self.cache_bytes())

    def _give_way(self, position: int) -> None:
        """What is kept makes room for an answer, whose caches grow now and then."""
        if self._prefixes is not None and self._prefixes.bytes and position % GROWS == 0:
            self._prefixes.shrink(self.cache_bytes())

    def held(
        self,
        request: str,
        attempt: int,
        tokens: Sequence[int],
        schedule: Sequence[int],
        held: Sequence[int],
    ) -> list[int]:
        """Those of `held` behind which this stage keeps the state, and the attempt may begin.

        They are rows of `tokens`, which forwards of `schedule` rows each read. Raises InvalidFrame
        for an old attempt.
        """
        session = self._session(request, attempt, opens=True)
        session.prefix = PromptRead(list(tokens), list(accumulate(schedule)))
        if self._prefixes is None:
            return []
        kept = self._prefixes.held(tokens, session.prefix.ends)
        return [rows for rows in held if rows in kept]

    def _behind_prefix(self, prefix: PromptRead, rows: int) -> RequestState:
        """Raises StateLost."""
        state = None
        if self._prefixes is not None:
            live = self.cache_bytes()
            self._prefixes.shrink(live)
            ends = [end for end in prefix.ends if end <= rows]
            state = self._prefixes.behind(prefix.ids[:rows], ends, live)
        if state is None:
            raise StateLost(
                f"stage {self._expected.stage} has lost the state behind the prompt's first "
                f"{rows} rows"
            )
        return state

    def rollback(self, request: str, attempt: int, position: int) -> None:
        """Drops the rows from `position` on, all of which the last forward wrote."""
        session = self._session(request, attempt, opens=False)
        state, own = session.state, self._own(session.state)
        if not state.can_go_back(own, position):
            raise InvalidFrame(
                f"rollback.position {position} is not inside the last block, which ended at row "
                f"{state.position}",
                param="rollback.position",
            )
        state.go_back(own, position)
        session.used = self._clock()

    def release(self, request: str, attempt: int) -> None:
        """Frees the request's state; its attempt and earlier ones are refused from now on."""
        self._attempts.add(request, attempt, self._sessions)
        session = self._sessions.get(request)
        if session is not None and session.attempt <= attempt:
            self._drop(request)
            mx.clear_cache()

    def renew(self, request: str, attempt: int) -> None:
        """The request lives though no frame of it moves, as where its reader is slow."""
        session = self._sessions.get(request)
        if session is not None and session.attempt == attempt:
            session.used = self._clock()

    def expire(self, lease_s: float) -> list[str]:
        """Frees what no frame has touched for `lease_s` seconds; returns those requests."""
        limit = self._clock() - lease_s
        ended = [name for name, session in self._sessions.items() if session.used < limit]
        for name in ended:
            attempt = self._sessions[name].attempt
            self.release(name, attempt)
            self._attempts.expire(name, attempt)
        return ended

    def _session(self, request: str, attempt: int, *, opens: bool) -> Session:
        session = self._sessions.get(request)
        self._attempts.check(request, attempt, live=session is not None)
        if session is not None and session.attempt == attempt:
            return session
        if not opens:
            # Not InvalidFrame: the answer can go on once its state is rebuilt.
            stage = self._expected.stage
            raise PeerLost(f"stage {stage} has no state of request {request} any more")
        if session is not None:
            self._drop(request)
        session = Session(attempt, RequestState(self._model.make_caches()), self._clock())
        self._sessions[request] = session
        self._attempts.add(request, attempt, self._sessions)
        return session

    def _drop(self, request: str) -> None:
        """Its state is over."""
        self._merged.drop(self._sessions.pop(request).state)

    @property
    def _is_last(self) -> bool:
        return self._model.end == self._model.num_layers

    def _own(self, state: RequestState) -> list[Any]:
        return self._model.own_caches(state.caches)

    def _outgoing(
        self, block: HiddenBlock, out: mx.array, state: RequestState
    ) -> HiddenBlock | None:
        if self._is_last and block.reply in (pb.REPLY_NONE, pb.REPLY_COMPUTED):
            mx.eval(cache_arrays(self._own(state)))
            told = block.reply == pb.REPLY_COMPUTED
            return replace(block, tokens=(), data=b"", schedule=()) if told else None
        if self._is_last and block.reply == pb.REPLY_LAST:
            last = block.position + block.rows - 1
            data = self._checked(to_bytes(out[:, -1:]), last, 1)
            ids = block.tokens[-1:]
            return replace(block, position=last, rows=1, tokens=ids, data=data, schedule=())
        return replace(block, data=self._checked(to_bytes(out), block.position, block.rows))

    def _checked(self, data: bytes, position: int, rows: int) -> bytes:
        e, m = self._expected, self._model
        try:
            require_finite(
                data, e.dtype, position, rows, f"stage {e.stage} ({layer_range(m.first, m.end)})"
            )
        except NumericError:
            if self._prefixes is not None:
                self._prefixes.clear()
            raise
        return data


def forwards(
    model: StageModel,
    tokens: mx.array,
    entering: mx.array | None,
    caches: list[Any],
    schedule: Sequence[int],
) -> mx.array:
    """The hidden (1, rows, hidden_size) behind this stage, by forwards of so many rows each.

    The number of rows chooses kernels, and so the numbers: repeating it repeats them.
    """
    if len(schedule) == 1:
        return model.hidden(tokens, entering, caches)
    leaving: list[mx.array] = []
    for end, rows in zip(accumulate(schedule), schedule, strict=True):
        part = slice(end - rows, end)
        incoming = None if entering is None else entering[:, part]
        leaving.append(model.hidden(tokens[:, part], incoming, caches))
        mx.async_eval(leaving[-1])  # while the next one's graph is built
    return mx.concatenate(leaving, axis=1)
