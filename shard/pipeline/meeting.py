"""Where requests to a pipeline meet, on its generator: rows that are wanted at the same time go
through all stages as one forward.

As many groups as there are stages keep every stage busy, as single requests do, and a forward for
a group costs a stage less than one for each of its requests: so no group has more requests than
that takes. Below two requests for each stage none are merged.
"""

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Protocol

import mlx.core as mx

from ...mtp.seams import Block, Wait, as_ids
from ...placement.errors import ExoNodeError, InvalidFrame, StateLost
from ..model.stage_model import StageModel
from ..model.tensors import ITEM_BYTES, from_bytes
from .frames import MAX_TOGETHER, HiddenBlock
from .merged import SHARED, Merged
from .request_state import RequestState

PATIENCE: Final = 2
"""Turns that the first of a group gives those of the last one to ask as well."""


class Traveller(Protocol):
    """What a meeting needs of a request: a `PipelineVerifier` is one."""

    state: RequestState

    def forward_alone(self, token: mx.array) -> Generator[Wait, None, Block]: ...

    def outgoing(self, token: int, data: bytes) -> HiddenBlock:
        """Raises NumericError."""
        ...


class Sender(Protocol):
    """`Link.send_all`."""

    def send_all(self, blocks: Sequence[HiddenBlock]) -> "list[Future[HiddenBlock]]": ...


@dataclass(slots=True, eq=False)
class _Ask:
    traveller: Traveller
    token: mx.array
    came: "Future[None]" = field(default_factory=lambda: Future[None]())
    trip: "_Trip | None" = None


@dataclass(slots=True, eq=False)
class _Trip:
    """A group on its way."""

    futures: "dict[int, Future[HiddenBlock]]"
    """By `id` of the ask; they fail one by one."""
    tokens: dict[int, int]
    back: "Future[None]" = field(default_factory=lambda: Future[None]())
    logits: dict[int, mx.array] = field(default_factory=dict[int, mx.array])

    def follow(self) -> None:
        """`back` is done once all of them are."""
        left = set(self.futures)

        def one(key: int) -> None:
            left.discard(key)
            if not left and not self.back.done():
                self.back.set_result(None)

        for key, future in self.futures.items():
            future.add_done_callback(lambda _, key=key: one(key))


class Meeting:
    """All methods run on the compute thread."""

    def __init__(
        self, model: StageModel, merged: Merged, link: Sender, stages: int, dtype: str
    ) -> None:
        self._model = model
        self._merged = merged
        self._link = link
        self._stages = stages
        self._dtype = dtype
        self._present: dict[int, Traveller] = {}
        self._asks: list[_Ask] = []

    @property
    def same(self) -> bool:
        """Whether rows were computed, bit for bit, as alone, wherever they were."""
        return self._merged.same

    @property
    def refused(self) -> str:
        return self._merged.refused

    def probe(self, vocabulary: int, context_length: int) -> None:
        """See `Merged.probe`."""
        self._merged.probe(0, vocabulary, context_length)

    def arrays(self) -> list[mx.array]:
        return self._merged.arrays()

    def leave(self, traveller: Traveller) -> None:
        """It asks no more, and nothing goes on with what it holds."""
        _ = self._present.pop(id(traveller), None)
        self._merged.drop(traveller.state)

    def forward(self, traveller: Traveller, token: mx.array) -> Generator[Wait, None, Block]:
        """As `PipelineVerifier.forward` of one row."""
        self._present[id(traveller)] = traveller
        if self._most < 2 or not self._merged.takes(traveller.state):
            return (yield from traveller.forward_alone(token))
        ask = _Ask(traveller, token)
        self._asks.append(ask)
        try:
            if self._asks[0] is not ask:
                yield Wait(ask.came, goes_on=True)  # to set out, if nobody took it along
            for _ in range(PATIENCE):
                if ask.trip is not None or self._complete(ask):
                    break
                yield Wait.a_turn()
            if ask.trip is None:
                self._set_out(ask)
        finally:
            if ask in self._asks:
                self._asks.remove(ask)
            self._promote()
        if ask.trip is None:
            return (yield from traveller.forward_alone(token))
        return (yield from self._back(ask, ask.trip))

    @property
    def _most(self) -> int:
        return min(MAX_TOGETHER, -(-len(self._present) // self._stages))

    def _complete(self, first: _Ask) -> bool:
        """Whether those that it was computed with ask as well, or as many as there may be."""
        asking = {id(ask.traveller.state) for ask in self._asks}
        group = first.traveller.state.group
        return len(asking) >= self._most and (
            group is None or all(id(state) in asking for state in group.live)
        )

    def _set_out(self, first: _Ask) -> None:
        """Computes this stage's rows of a group and sends them on."""
        group = self._group(first)
        self._asks = [ask for ask in self._asks if ask not in group]
        if len(group) == 1:
            return
        tokens = {id(ask): as_ids(ask.token)[0] for ask in group}
        trip = _Trip({id(ask): Future() for ask in group}, tokens)
        try:
            rows = self._merged.rows(
                [ask.traveller.state for ask in group], [tokens[id(ask)] for ask in group], None
            )
            self._send(trip, group, rows)
        except StateLost:  # told once; an error each, whose traceback holds on to its request
            for future in trip.futures.values():
                future.set_exception(StateLost(SHARED))
        trip.follow()
        for ask in group:
            ask.trip = trip
            if ask is not first:
                ask.came.set_result(None)

    def _send(self, trip: _Trip, group: Sequence[_Ask], rows: Sequence[bytes]) -> None:
        going = list[tuple[_Ask, HiddenBlock]]()
        for ask, row in zip(group, rows, strict=True):
            try:
                going.append((ask, ask.traveller.outgoing(trip.tokens[id(ask)], row)))
            except ExoNodeError as fault:  # its own: the others go on
                trip.futures[id(ask)].set_exception(fault)
        sent = self._link.send_all([block for _, block in going])
        for (ask, _), future in zip(going, sent, strict=True):
            trip.futures[id(ask)] = future

    def _group(self, first: _Ask) -> list[_Ask]:
        """Those that shared the last forward before others, and always in the same order."""
        group = first.traveller.state.group
        others = [ask for ask in self._asks if ask is not first]
        others.sort(key=lambda ask: group is None or ask.traveller.state.group is not group)
        order = list(self._present)
        chosen = [first, *others][: self._most]
        return sorted(chosen, key=lambda ask: order.index(id(ask.traveller)))

    def _promote(self) -> None:
        if self._asks and not self._asks[0].came.done():
            self._asks[0].came.set_result(None)

    def _back(self, ask: _Ask, trip: _Trip) -> Generator[Wait, None, Block]:
        yield Wait(trip.back)
        back = trip.futures[id(ask)].result()
        if back.rows != 1:
            raise InvalidFrame(
                f"{back.rows} rows came back where 1 was asked for", param="hidden.rows"
            )
        if back.near_tie:
            self._merged.same = False
        if not trip.logits:
            self._judge(trip)
        return Block(trip.logits[id(ask)], None, len(trip.futures))

    def _judge(self, trip: _Trip) -> None:
        """The logits of all that came back, by one pass of the norm and lm_head."""
        blocks = {
            key: future.result()
            for key, future in trip.futures.items()
            if not future.cancelled() and future.exception() is None
        }
        blocks = {key: block for key, block in blocks.items() if block.rows == 1}
        data = b"".join(block.data for block in blocks.values())
        size = len(data) // len(blocks) // ITEM_BYTES[self._dtype]
        received = from_bytes(data, self._dtype, (len(blocks), 1, size))
        ids = mx.array([[trip.tokens[key]] for key in blocks], dtype=mx.int32)
        logits = self._model.logits(ids, received)
        trip.logits = {key: logits[i] for i, key in enumerate(blocks)}
