"""Rows of a batch's requests in slots of one array: who leaves frees one, who joins takes one.

An array is (slots, heads, room, size). Its first slots are the requests', in their order; those
behind are spare: nothing reads them, and only what a change moves is copied. MLX writes a slice in
place where nobody else holds the array, so changes keep no views of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
from mlx_lm.models.cache import KVCache

ROOM: Final = KVCache.step
"""Rows by which the room grows."""
SOON: Final = ROOM // 4
"""Rows that the longest request of a batch has room for at least, whenever the room is chosen."""


@dataclass(frozen=True, slots=True)
class Change:
    """Who is in a batch from now on."""

    order: Sequence[int]
    """By place, where each request that stays was before: see `order_of`."""
    rows: Sequence[int]
    """Of each request, those that stay and those that join behind them."""

    @property
    def moves(self) -> list[tuple[int, int]]:
        """(from, to) of those that stay at another place; none begins where one ends."""
        return [(old, new) for new, old in enumerate(self.order) if old != new]

    def slots(self, have: int) -> int:
        """A quarter more than are taken where they have to grow, half more before they shrink."""
        size = len(self.rows)
        if size > have:
            return size + size // 4
        return have if have - size <= max(1, size // 2) else size

    def room(self, have: int) -> int:
        """It shrinks by more than one step only: requests grow."""
        most = max(self.rows)
        wanted = room_for(most + SOON)
        return have if room_for(most + 1) <= have <= wanted + ROOM else wanted


def order_of(stays: Sequence[int]) -> list[int]:
    """Places for those that stay, who were at `stays`, ascending: the last ones take the places of
    those that leave."""
    kept, late = set(stays), [place for place in stays if place >= len(stays)]
    return [place if place in kept else late.pop() for place in range(len(stays))]


def lifted(held: mx.array, change: Change) -> list[mx.array]:
    """Copies of what moves, to be evaluated before `seated` or `lined_up`."""
    return [mx.contiguous(held[old : old + 1]) for old, _ in change.moves]


def seated(
    held: mx.array, change: Change, moving: Sequence[mx.array], joins: Sequence[mx.array]
) -> mx.array:
    """(slots, heads, room, size) behind the change. `joins`: (1, heads, rows, size) of each.

    A slot is written in full: rows that another one left could be no numbers, which no mask hides.
    """
    _put(held, change, moving)
    slots, room = change.slots(held.shape[0]), change.room(held.shape[2])
    stay = len(change.order)
    if (slots, room) != (held.shape[0], held.shape[2]):
        part = mx.contiguous(held[:stay, :, :room])
        held = mx.pad(part, [(0, slots - stay), (0, 0), (0, room - part.shape[2]), (0, 0)])
    for place, rows in enumerate(joins, stay):
        held[place : place + 1] = padded(rows[..., : change.rows[place], :], room)
    return held


def lined_up(
    held: mx.array, change: Change, moving: Sequence[mx.array], joins: Sequence[mx.array]
) -> mx.array:
    """(B, …) behind the change, without spare slots: for what each forward makes anew."""
    _put(held, change, moving)
    staying = held[: len(change.order)]
    return mx.concatenate([staying, *joins]) if joins else staying


def _put(held: mx.array, change: Change, moving: Sequence[mx.array]) -> None:
    for (_, new), rows in zip(change.moves, moving, strict=True):
        held[new : new + 1] = rows


def padded(held: mx.array, room: int) -> mx.array:
    """Zeros behind its rows."""
    return mx.pad(held, [(0, 0), (0, 0), (0, room - held.shape[2]), (0, 0)])


def rooms_of(rows: int) -> int:
    return -(-rows // ROOM)


def room_for(rows: int) -> int:
    return rooms_of(rows) * ROOM


def padding_of(rows: Sequence[int]) -> float:
    """How many times as many rows a batch holds as its requests, which have `rows`, do alone."""
    rooms = [rooms_of(each) for each in rows]
    return max(rooms) * len(rooms) / sum(rooms)
