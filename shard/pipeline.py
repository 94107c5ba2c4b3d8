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

    @property
    def position(self) -> int:
        return self._rows

    def forward(self, tokens: mx.array, *, want: Want) -> Generator[Wait, None, Block]:
        ids, rows = tokens[None], tokens.shape[0]
        hidden = self._model.hidden(ids, None, self.caches)
        block = HiddenBlock(
            request=self._request,
            attempt=self._attempt,
            position=self._rows,
            rows=rows,
            tokens=tuple(as_ids(tokens)),
            reply=_REPLIES[want],
            data=to_bytes(hidden),
        )
        self._rows += rows
        answer = self._link.send(block)
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
        rows = tokens.shape[0]
        hidden = forwards(self._model, tokens[None], None, self.caches, schedule)
        block = HiddenBlock(
            request=self._request,
            attempt=self._attempt,
            position=self._rows,
            rows=rows,
            tokens=tuple(as_ids(tokens)),
            reply=pb.REPLY_NONE,
            data=to_bytes(hidden),
            schedule=tuple(schedule),
        )
        self._rows += rows
        _ = self._link.send(block)

    def rollback(self, rows: int) -> None:
        assert can_roll_back(self._own)
        rollback(self._own, rows)
        self._rows -= rows
        self._link.rollback(self._request, self._attempt, self._rows)

    def arrays(self) -> list[mx.array]:
        return cache_arrays(self._own)
