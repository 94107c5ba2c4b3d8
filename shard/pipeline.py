"""The verifier of a placement of several stages, on its generator: its own layers, then theirs."""

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import mlx.core as mx

from ..mtp.rollback import cache_arrays, can_roll_back, rollback
from ..mtp.seams import Block, Wait, Want, as_ids
from ..placement.errors import InvalidFrame
from ..proto import peer_pb2 as pb
from .frames import HiddenBlock
from .stage import forwards
from .stage_model import StageModel
from .trail import Trail
from .wire import from_bytes, to_bytes

_REPLIES: dict[Want, "pb.Reply.ValueType"] = {
    "all": pb.REPLY_ALL,
    "last": pb.REPLY_LAST,
    "none": pb.REPLY_NONE,
}


class Link(Protocol):
    """The way through the other stages and back. Called on the compute thread; never blocks."""

    def send(self, block: HiddenBlock) -> "Future[HiddenBlock] | None":
        """Sends a block on; the future of its answer, None where none was asked for.

        The future fails with PeerLost when a stage is gone or late, and with what a stage refused.
        A failure that belongs to no future is raised by the request's next `send`.
        """
        ...

    def rollback(self, request: str, attempt: int, position: int) -> None:
        """Tells every stage to drop the rows from `position` on."""
        ...

    def adopt(self, request: str, attempt: int, position: int, trail: Trail) -> None:
        """Tells every stage that an attempt goes on behind `position` rows with what they hold.

        A next stage that holds nothing is sent the trail, as far as it is, and then by `relay`.
        """
        ...

    def relay(self, request: str, attempt: int) -> None:
        """Sends what was added to the trail since, where the next stage is being rebuilt."""
        ...

    def park(self, request: str, attempt: int) -> None:
        """Forgets an attempt without a word to the stages: another one follows."""
        ...

    def release(self, request: str, attempt: int) -> None:
        """Tells every stage that the request is over."""
        ...


class PipelineVerifier:
    """One request's caches of the generator's layers, and its way through the other stages."""

    overlaps = False  # the ids of a block travel with it, so they must be known
    remote = True

    def __init__(
        self, model: StageModel, link: Link, request: str, attempt: int, dtype: str
    ) -> None:
        self._model = model
        self._link = link
        self._request = request
        self._attempt = attempt
        self._dtype = dtype
        self.caches: list[Any] = model.make_caches()
        self._own = model.own_caches(self.caches)
        self._rows = 0
        self._last_rows = 0
        self._rebuilt_to = 0
        self._trail = Trail()

    @property
    def position(self) -> int:
        return self._rows

    def begin_rebuild(self, rows: int) -> None:
        """The other stages keep what they hold of an earlier attempt: `rows` committed ones.

        Forwards up to there run here only, for a stage that lacks their rows.
        """
        self._rebuilt_to = rows
        self._link.adopt(self._request, self._attempt, rows, self._trail)

    def take_up(self, attempt: int, rows: int) -> bool:
        """Another attempt begins behind `rows` committed rows: whether this state fits it."""
        ahead = self._rows - rows
        if ahead and not (0 < ahead <= self._last_rows and can_roll_back(self._own)):
            return False
        if ahead:
            rollback(self._own, ahead)
            self._rows, self._last_rows = rows, 0
            self._trail.roll_back(rows)
        self._attempt = attempt
        return True

    def forward(self, tokens: mx.array, *, want: Want) -> Generator[Wait, None, Block]:
        ids, rows = tokens[None], tokens.shape[0]
        begun = self._model.meter.now()
        hidden = self._model.hidden(ids, None, self.caches)
        data = to_bytes(hidden)
        self._model.meter.add(self._rows, rows, begun)
        answer = self._send(tokens, data, _REPLIES[want], ())
        if answer is None:
            return Block(mx.zeros((0, 1)), None)
        yield Wait(answer)
        back = answer.result()
        expected = rows if want == "all" else 1
        if back.rows != expected:
            raise InvalidFrame(
                f"{back.rows} rows came back where {expected} were asked for", param="hidden.rows"
            )
        received = from_bytes(back.data, self._dtype, (1, expected, hidden.shape[-1]))
        return Block(self._model.logits(ids[:, -expected:], received)[0], None)

    def repeat(self, tokens: mx.array, schedule: Sequence[int]) -> None:
        hidden = forwards(self._model, tokens[None], None, self.caches, schedule)
        _ = self._send(tokens, to_bytes(hidden), pb.REPLY_NONE, schedule)

    def _send(
        self,
        tokens: mx.array,
        data: bytes,
        reply: "pb.Reply.ValueType",
        schedule: Sequence[int],
    ) -> "Future[HiddenBlock] | None":
        block = HiddenBlock(
            request=self._request,
            attempt=self._attempt,
            position=self._rows,
            rows=tokens.shape[0],
            tokens=tuple(as_ids(tokens)),
            reply=reply,
            data=data,
            schedule=tuple(schedule),
        )
        self._rows += block.rows
        self._last_rows = schedule[-1] if schedule else block.rows
        self._trail.add(block)
        if self._rows > self._rebuilt_to:
            return self._link.send(block)
        self._link.relay(self._request, self._attempt)
        return None

    def rollback(self, rows: int) -> None:
        assert can_roll_back(self._own)
        rollback(self._own, rows)
        self._rows -= rows
        self._last_rows = 0
        self._trail.roll_back(self._rows)
        self._link.rollback(self._request, self._attempt, self._rows)

    def arrays(self) -> list[mx.array]:
        return cache_arrays(self._own)
