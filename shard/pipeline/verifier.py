"""The verifier of a placement of several stages, on its generator: its own layers, then theirs."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx

from ...mtp.rollback import cache_arrays
from ...mtp.seams import Block, Wait, Want, as_ids
from ...placement.cluster import layer_range
from ...placement.errors import InvalidFrame
from ...proto import peer_pb2 as pb
from ..model.numeric import require_finite
from ..model.stage_model import StageModel
from ..model.tensors import ITEM_BYTES, from_bytes, to_bytes
from .frames import HiddenBlock
from .meeting import Meeting
from .pacing import Pacing, Place
from .request_state import RequestState
from .stage import forwards

_REPLIES: dict[Want, "pb.Reply.ValueType"] = {
    "all": pb.REPLY_ALL,
    "last": pb.REPLY_LAST,
    "none": pb.REPLY_COMPUTED,
}


class Link(Protocol):
    """The way through the other stages and back. Called on the compute thread; never blocks."""

    def send(self, block: HiddenBlock) -> "Future[HiddenBlock] | None":
        """Sends a block on; the future of its answer, None where none was asked for.

        The future fails with PeerLost when a stage is gone or late, and with what a stage refused.
        A failure that belongs to no future is raised by the request's next `send`.
        """
        ...

    def send_chunk(self, block: HiddenBlock) -> "Future[None]":
        """As `send`, for a chunk before a prompt's end; done once all stages have computed it.

        And where they never will: what went wrong the request's next call raises.
        """
        ...

    def check(self, request: str, attempt: int) -> None:
        """Raises what went wrong with the request and no future has told."""
        ...

    def send_all(self, blocks: Sequence[HiddenBlock]) -> "list[Future[HiddenBlock]]":
        """Sends rows of several requests on, to be computed together; a future of each.

        As `send`, but what is wrong with one of them its future says.
        """
        ...

    def rollback(self, request: str, attempt: int, position: int) -> None:
        """Tells every stage to drop the rows from `position` on."""
        ...

    def held_by_all(
        self,
        request: str,
        attempt: int,
        ids: Sequence[int],
        schedule: Sequence[int],
        held: Sequence[int],
    ) -> "Future[list[int]]":
        """Which of `held` all stages keep the state behind: rows of `ids`, which forwards of
        `schedule` rows each read. The attempt may begin behind one of them. Raises PeerLost.
        """
        ...

    def release(self, request: str, attempt: int) -> None:
        """Tells every stage that the request is over."""
        ...


Border = Callable[[int, Sequence[Any]], "pb.Border.ValueType"]
"""What is kept of the state behind the first rows of the prompt, so many, with a stage's caches."""


class PipelineVerifier:
    """One request's caches of the generator's layers, and its way through the other stages."""

    overlaps = False  # the ids of a block travel with it, so they must be known
    takes_back = True  # never asked for: it overlaps nothing, and its answers draft nothing

    def __init__(
        self,
        model: StageModel,
        link: Link,
        request: str,
        attempt: int,
        dtype: str,
        state: RequestState | None = None,
        meeting: Meeting | None = None,
        pacing: Pacing | None = None,
        *,
        background: bool = False,
        border: Border | None = None,
    ) -> None:
        """`state`: a kept prefix; None: no rows yet.

        `meeting`: where its rows meet those of other requests; None: nowhere.
        `pacing`: how its prompt's chunks follow each other; None: at once. `background`: behind
        those of others. `border`: None where nothing is kept.
        """
        self._pacing = pacing
        self._background = background
        self._border = border
        self._meeting = meeting
        self._model = model
        self._link = link
        self._request = request
        self._attempt = attempt
        self._dtype = dtype
        self.state = RequestState(model.make_caches()) if state is None else state
        self.caches: list[Any] = self.state.caches
        self._own = model.own_caches(self.caches)

    @property
    def position(self) -> int:
        return self.state.position

    def forward(self, tokens: mx.array, *, want: Want) -> Generator[Wait, None, Block]:
        decodes = want == "all" and tokens.shape[0] == 1
        if want != "all" and self._pacing is not None:
            return (yield from self._paced(self._pacing, tokens, want))
        self._has_read()
        if self._meeting is not None and decodes:
            return (yield from self._meeting.forward(self, tokens))
        return (yield from self._forward(tokens, want))

    def _paced(self, pacing: Pacing, tokens: mx.array, want: Want) -> Generator[Wait, None, Block]:
        """A chunk of the prompt, when it may set out."""
        place = yield from pacing.place(self, background=self._background)
        try:
            self._link.check(self._request, self._attempt)
            block = yield from self._forward(tokens, want, place)
        finally:
            place.close()
            if want == "last":
                self._has_read()
        return block

    def _has_read(self) -> None:
        if self._pacing is not None:
            self._pacing.done(self)

    def forward_alone(self, token: mx.array) -> Generator[Wait, None, Block]:
        return (yield from self._forward(token, "all"))

    def outgoing(self, token: int, data: bytes) -> HiddenBlock:
        """The row that a merged forward has just appended."""
        position = self.position - 1
        self._require_finite(data, position, 1)
        return self._block(position, (token,), data, pb.REPLY_ALL, ())

    def leave(self) -> None:
        """The answer is over."""
        self._has_read()
        if self._meeting is not None:
            self._meeting.leave(self)

    def _require_finite(self, data: bytes, position: int, rows: int) -> None:
        stage = f"stage 0 ({layer_range(0, self._model.end)})"
        require_finite(data, self._dtype, position, rows, stage)

    def _forward(
        self, tokens: mx.array, want: Want, place: Place | None = None
    ) -> Generator[Wait, None, Block]:
        """`place`: the chunk's, which it keeps until all stages have computed it."""
        self.state.alone()
        ids, rows = tokens[None], tokens.shape[0]
        hidden = self._model.hidden(ids, None, self.caches)
        data = to_bytes(hidden)
        self._require_finite(data, self.position, rows)
        answer = self._send(tokens, data, _REPLIES[want], (), place)
        if answer is None:
            return Block(mx.zeros((0, 1)), None)
        return (yield from self._answered(answer, ids, rows if want == "all" else 1))

    def repeat(self, tokens: mx.array, schedule: Sequence[int]) -> None:
        self.state.alone()
        self._has_read()
        hidden = forwards(self._model, tokens[None], None, self.caches, schedule)
        _ = self._send(tokens, to_bytes(hidden), pb.REPLY_NONE, schedule)

    def _answered(
        self, answer: "Future[HiddenBlock]", ids: mx.array, rows: int
    ) -> Generator[Wait, None, Block]:
        yield Wait(answer)
        back = answer.result()
        if back.rows != rows:
            raise InvalidFrame(
                f"{back.rows} rows came back where {rows} were asked for", param="hidden.rows"
            )
        size = len(back.data) // rows // ITEM_BYTES[self._dtype]
        received = from_bytes(back.data, self._dtype, (1, rows, size))
        return Block(self._model.logits(ids[:, -rows:], received)[0], None)

    def _send(
        self,
        tokens: mx.array,
        data: bytes,
        reply: "pb.Reply.ValueType",
        schedule: Sequence[int],
        place: Place | None = None,
    ) -> "Future[HiddenBlock] | None":
        block = self._block(self.position, tuple(as_ids(tokens)), data, reply, schedule)
        self.state.wrote(schedule or (block.rows,))
        if reply != pb.REPLY_ALL and not schedule:
            if self._border is not None and reply == pb.REPLY_COMPUTED:
                block = replace(block, border=self._border(self.position, self._own))
            self.state.read.add(block.position, block.tokens, block.border)
        if block.reply == pb.REPLY_COMPUTED:
            computed = self._link.send_chunk(block)
            if place is not None:
                place.keep(computed)
            return None
        answer = self._link.send(block)
        if place is not None and answer is not None:
            place.keep(answer)
        return answer

    def _block(
        self,
        position: int,
        ids: tuple[int, ...],
        data: bytes,
        reply: "pb.Reply.ValueType",
        schedule: Sequence[int],
    ) -> HiddenBlock:
        return HiddenBlock(
            request=self._request,
            attempt=self._attempt,
            position=position,
            rows=len(ids),
            tokens=ids,
            reply=reply,
            data=data,
            schedule=tuple(schedule),
        )

    def rollback(self, rows: int) -> None:
        self.state.go_back(self._own, self.position - rows)
        self._link.rollback(self._request, self._attempt, self.position)

    def arrays(self) -> list[mx.array]:
        return cache_arrays(self._own)
