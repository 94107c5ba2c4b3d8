"""Slots of a batch's arrays: a request that leaves frees a slot, one that joins takes one.

An array is (slots, heads, room, size). Its first slots are the requests', in their order; further
slots are spare and never read. A change copies only the slots that move. MLX writes a slice in
place if there is no other reference to the array, so changes keep no views of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .positions import Positions

ROOM: Final = KVCache.step
"""Step, in rows, by which the room grows."""
SOON: Final = ROOM // 4
"""Minimum of free rows for the longest request whenever the room is chosen."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a batch's members."""

    order: Sequence[int]
    """The old place of each request that stays, by new place; see `order_of`."""
    rows: Sequence[int]
    """Rows of each new member: those that stay, then those that join."""

    @property
    def moves(self) -> list[tuple[int, int]]:
        """(from, to) of requests that change their place; no target is another one's source."""
        return [(old, new) for new, old in enumerate(self.order) if old != new]

    def slots(self, slots: int) -> int:
        """The number of slots, given the present one. Growing adds a quarter as spare slots;
        shrinking waits until half as many more than members are free."""
        size = len(self.rows)
        if size > slots:
            return size + size // 4
        return slots if slots - size <= max(1, size // 2) else size

    def room(self, room: int) -> int:
        """The room, given the present one. It shrinks by more than one step only, since requests
        grow."""
        most = max(self.rows)
        ideal = room_for(most + SOON)
        return room if room_for(most + 1) <= room <= ideal + ROOM else ideal


def order_of(stays: Sequence[int]) -> list[int]:
    """The order of requests that stay, given their places `stays`, ascending: the last ones take
    the places of those that leave."""
    stay_set, last_ones = set(stays), [place for place in stays if place >= len(stays)]
    return [place if place in stay_set else last_ones.pop() for place in range(len(stays))]


def copy_moving(array: mx.array, change: Change) -> list[mx.array]:
    """Copies of the slots that move, to be evaluated before `place_rows` or `reorder`."""
    return [mx.contiguous(array[old : old + 1]) for old, _ in change.moves]


def place_rows(
    array: mx.array, change: Change, moving: Sequence[mx.array], joins: Sequence[mx.array]
) -> mx.array:
    """Applies a change to (slots, heads, room, size). `joins`: (1, heads, rows, size) of each.

    A slot is written in full: rows of its last request could be NaN, which no mask hides.
    """
    _move(array, change, moving)
    slots, room = change.slots(array.shape[0]), change.room(array.shape[2])
    stay = len(change.order)
    if (slots, room) != (array.shape[0], array.shape[2]):
        part = mx.contiguous(array[:stay, :, :room])
        array = mx.pad(part, [(0, slots - stay), (0, 0), (0, room - part.shape[2]), (0, 0)])
    for place, rows in enumerate(joins, stay):
        array[place : place + 1] = pad_rows(rows[..., : change.rows[place], :], room)
    return array


def reorder(
    array: mx.array, change: Change, moving: Sequence[mx.array], joins: Sequence[mx.array]
) -> mx.array:
    """Applies a change to (B, …), without spare slots: for arrays that each forward replaces."""
    _move(array, change, moving)
    staying = array[: len(change.order)]
    return mx.concatenate([staying, *joins]) if joins else staying


def _move(array: mx.array, change: Change, moving: Sequence[mx.array]) -> None:
    for (_, new), rows in zip(change.moves, moving, strict=True):
        array[new : new + 1] = rows


def moved_forward(array: mx.array, moves: Sequence[int]) -> mx.array:
    """(slots, heads, room, size): each request's rows, without the first `moves` of them."""
    slots, _, room, _ = array.shape
    at = mx.arange(room)[None] + mx.array([*moves, *[0] * (slots - len(moves))])[:, None]
    at = mx.minimum(at, room - 1)[:, None, :, None]
    return mx.take_along_axis(array, mx.broadcast_to(at, array.shape), axis=2)


def append_rows(array: mx.array, rows: mx.array, positions: Positions) -> mx.array:
    """Writes each request's `rows` (B, …) after its own, into (slots, heads, room, size)."""
    count = rows.shape[2]
    extent = positions.extent(count)
    if extent > array.shape[2]:
        array = pad_rows(array, room_for(extent))
    if spare := array.shape[0] - rows.shape[0]:
        rows = mx.pad(rows, [(0, spare), (0, 0), (0, 0), (0, 0)])
    at = mx.broadcast_to(positions.places(count, array.shape[0]), rows.shape)
    return mx.put_along_axis(array, at, rows, axis=2)


def pad_rows(array: mx.array, room: int) -> mx.array:
    """Pads (B, heads, rows, size) with zeros up to `room` rows."""
    return mx.pad(array, [(0, 0), (0, 0), (0, room - array.shape[2]), (0, 0)])


def rooms_of(rows: int) -> int:
    return -(-rows // ROOM)


def room_for(rows: int) -> int:
    return rooms_of(rows) * ROOM


def padding_of(rows: Sequence[int]) -> float:
    """Rows of a batch divided by the rows that its requests need; `rows`: of each request."""
    rooms = [rooms_of(each) for each in rows]
    return max(rooms) * len(rooms) / sum(rooms)
