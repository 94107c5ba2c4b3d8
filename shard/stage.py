"""What a stage does with a frame: sessions, attempts, forwards, rollback. No gRPC, no threads.

Every method runs on the compute thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx

from ..mtp.rollback import cache_arrays, can_roll_back, rollback
from ..placement.errors import InvalidFrame, PeerLost
from ..proto import peer_pb2 as pb
from .frames import Expectation, HiddenBlock
from .stage_model import StageModel
from .trail import Trail
from .wire import from_bytes, to_bytes

MAX_WAITING = 16
"""Blocks that may wait for rows before them; a generator that asks for answers sends one."""
REMEMBERED_REQUESTS = 4096
"""Ended requests whose attempt is kept, so that frames that come late are refused."""


@dataclass(slots=True)
class Session:
    """One request's state on this stage."""

    attempt: int
    caches: list[Any]
    used: float
    position: int = 0
    last_rows: int = 0
    target: int = 0
    """Rows that are being rebuilt: blocks behind them wait."""
    waiting: list[HiddenBlock] = field(default_factory=list[HiddenBlock])
    trail: Trail = field(default_factory=Trail)


class StageWorker:
    """Runs the layers [first, end) for many requests, each at its own position."""

    def __init__(
        self, model: StageModel, expected: Expectation, clock: Callable[[], float]
    ) -> None:
        self._model = model
        self._expected = expected
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._expired: OrderedDict[str, int] = OrderedDict()

    @property
    def live_requests(self) -> int:
        return len(self._sessions)

    def cache_bytes(self) -> int:
        """Bytes of KV and recurrent state of all live requests."""
        own = (self._model.own_caches(s.caches) for s in self._sessions.values())
        return sum(array.nbytes for caches in own for array in cache_arrays(caches))

    def forward(self, block: HiddenBlock) -> list[HiddenBlock]:
        """Hidden in, the blocks that are to be sent on out.

        Nothing where the last stage has nothing to send back, and where the rows behind a block are
        still to be rebuilt. Raises InvalidFrame for an old attempt or a position that is not the
        session's.
        """
        session = self._session(block.request, block.attempt, opens=block.position == 0)
        if session.position < session.target <= block.position:
            if len(session.waiting) >= MAX_WAITING:
                raise InvalidFrame(
                    f"{MAX_WAITING} blocks wait already for rows that are being rebuilt",
                    param="hidden.position",
                )
            session.waiting.append(block)
            return []
        out = self._forward(session, block)
        if session.waiting and session.position == session.target:
            waiting, session.waiting = session.waiting, []
            for each in waiting:
                out += self._forward(session, each)
        return out

    def _forward(self, session: Session, block: HiddenBlock) -> list[HiddenBlock]:
        if block.position != session.position:
            raise InvalidFrame(
                f"hidden.position is {block.position} where {session.position} rows are committed",
                param="hidden.position",
            )
        e = self._expected
        entering = from_bytes(block.data, e.dtype, (1, block.rows, e.hidden_size))
        tokens = mx.array([block.tokens], dtype=mx.int32)
        schedule = block.schedule or (block.rows,)
        begun = self._model.meter.now()
        out = forwards(self._model, tokens, entering, session.caches, schedule)
        session.position += block.rows
        session.last_rows = schedule[-1]
        session.used = self._clock()
        leaving = self._outgoing(block, out, session)
        if leaving is not None and len(schedule) == 1:  # else not all of it was one forward
            self._model.meter.add(block.position, block.rows, begun)
        if self._model.end < self._model.num_layers:
            assert leaving is not None
            session.trail.add(leaving)
        if block.rebuilds:
            return session.trail.unsent(session.attempt)
        return [] if leaving is None else [leaving]

    def adopt(self, request: str, attempt: int, position: int) -> bool:
        """An attempt goes on behind `position` rows: whether what this stage holds fits it.

        Where it does not, the state begins anew, and blocks from `position` on wait until the rows
        before it were rebuilt.
        """
        held = self._sessions.get(request)
        if held is not None and held.attempt < attempt and self._fits(held, position):
            held.attempt, held.used = attempt, self._clock()
            held.target, held.waiting = 0, []
            self._remember(request, attempt)
            return True
        session = self._session(request, attempt, opens=True)
        session.target = position
        return False

    def missing(self, request: str, attempt: int, position: int) -> list[HiddenBlock]:
        """The stage behind lacks the rows before `position`: what is here of them to be sent.

        What is still to be rebuilt follows with the forwards that do so. Raises PeerLost where it
        was too much to keep.
        """
        session = self._session(request, attempt, opens=False)
        if not session.trail.whole:
            raise PeerLost(f"stage {self._expected.stage} no longer has all it sent of {request}")
        session.trail.want(position)
        return session.trail.unsent(attempt)

    def _fits(self, session: Session, position: int) -> bool:
        ahead = session.position - position
        own = self._model.own_caches(session.caches)
        if ahead == 0:
            return True
        if not 0 < ahead <= session.last_rows or not can_roll_back(own):
            return False
        self._drop(session, position)
        return True

    def rollback(self, request: str, attempt: int, position: int) -> None:
        """Drops the rows from `position` on, all of which the last forward wrote."""
        session = self._session(request, attempt, opens=False)
        rows = session.position - position
        own = self._model.own_caches(session.caches)
        if not 0 < rows <= session.last_rows or not can_roll_back(own):
            raise InvalidFrame(
                f"rollback.position {position} is not inside the last block, which ended at row "
                f"{session.position}",
                param="rollback.position",
            )
        self._drop(session, position)

    def _drop(self, session: Session, position: int) -> None:
        rollback(self._model.own_caches(session.caches), session.position - position)
        session.position, session.last_rows = position, 0
        session.trail.roll_back(position)
        session.used = self._clock()

    def release(self, request: str, attempt: int) -> None:
        """Frees the request's state; its attempt and earlier ones are refused from now on."""
        self._remember(request, attempt)
        session = self._sessions.get(request)
        if session is not None and session.attempt <= attempt:
            del self._sessions[request]
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
            self._expired[name] = attempt
            while len(self._expired) > REMEMBERED_REQUESTS:
                _ = self._expired.popitem(last=False)
        return ended

    def _session(self, request: str, attempt: int, *, opens: bool) -> Session:
        known = self._attempts.get(request, 0)
        session = self._sessions.get(request)
        if attempt == known and session is None and self._expired.get(request) == attempt:
            raise PeerLost(
                f"stage {self._expected.stage} freed request {request}: nothing of it came for "
                "the length of its lease"
            )
        if attempt < known or (attempt == known and session is None):
            raise InvalidFrame(
                f"attempt {attempt} of request {request} is over: attempt {known} was seen",
                param="attempt",
            )
        if session is not None and session.attempt == attempt:
            return session
        if not opens:
            # Not InvalidFrame: the answer can go on once its state is rebuilt.
            stage = self._expected.stage
            raise PeerLost(f"stage {stage} has no state of request {request} any more")
        session = Session(attempt, self._model.make_caches(), self._clock())
        self._sessions[request] = session
        self._remember(request, attempt)
        return session

    def _remember(self, request: str, attempt: int) -> None:
        self._attempts[request] = max(attempt, self._attempts.pop(request, 0))
        while len(self._attempts) > REMEMBERED_REQUESTS:
            oldest = next(iter(self._attempts))
            if oldest in self._sessions:
                self._attempts.move_to_end(oldest)
            else:
                del self._attempts[oldest]

    def _outgoing(self, block: HiddenBlock, out: mx.array, session: Session) -> HiddenBlock | None:
        last_stage = self._model.end == self._model.num_layers
        if last_stage and block.reply == pb.REPLY_NONE:
            mx.eval(cache_arrays(self._model.own_caches(session.caches)))
            return None
        if last_stage and block.reply == pb.REPLY_LAST:
            last = block.position + block.rows - 1
            data = to_bytes(out[:, -1:])
            return replace(block, position=last, rows=1, tokens=block.tokens[-1:], data=data)
        return replace(block, data=to_bytes(out))


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
