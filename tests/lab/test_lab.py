"""The parts of the laboratory that need no process: the switch, and the judge of attempts."""

import random
from collections.abc import Sequence
from typing import Any

from switch import Shape, Switch, mac
from witness import Seen, judge

NAMES = ("a", "b", "c")


def frame(target: int | None, number: int = 0) -> bytes:
    address = b"\xff" * 6 if target is None else mac(target)
    return address + number.to_bytes(8, "big")


def through(shape: Shape, frames: Sequence[bytes], *, until: float = 10.0) -> list[Any]:
    """(port, frame) of each frame that leaves the switch, of those the first port sends at 0 s."""
    switch = Switch(NAMES, random.Random(1), shape)
    for each in frames:
        switch.take(0, each, 0.0)
    return switch.due(until)


def test_the_switch_sends_a_frame_to_its_address_and_a_broadcast_to_all_others() -> None:
    assert through(Shape(), [frame(2)]) == [(2, frame(2))]
    assert [port for port, _ in through(Shape(), [frame(None)])] == [1, 2]
    assert through(Shape(), [frame(0)]) == []


def test_the_switch_blocks_one_way_only() -> None:
    assert through(Shape(blocked=(("a", "b"),)), [frame(1)]) == []
    assert len(through(Shape(blocked=(("b", "a"),)), [frame(1)])) == 1


def test_without_multicast_groups_are_dropped_and_broadcasts_pass() -> None:
    group = b"\x01\x00\x5e\x00\x00\xfb" + b"mdns"
    assert len(through(Shape(), [group])) == 2
    assert through(Shape(multicast=False), [group]) == []
    assert len(through(Shape(multicast=False), [frame(None)])) == 2


def test_the_switch_delays_and_keeps_the_order_under_jitter() -> None:
    frames = [frame(1, number) for number in range(100)]
    shape = Shape(delay_ms=50, jitter_ms=100)
    assert len(through(Shape(delay_ms=50), frames, until=0.051)) == 100
    assert len(through(shape, frames, until=0.051)) < 100
    assert through(shape, frames, until=0.049) == []
    assert [each for _, each in through(shape, frames, until=0.151)] == frames


def test_the_switch_loses_the_configured_share() -> None:
    arrived = len(through(Shape(loss=0.05), [frame(1)] * 10_000))
    assert 9400 < arrived < 9600


def test_an_attempt_after_a_newer_one_is_counted_on_each_runner() -> None:
    lines = ["1 7 r 1", "2 7 r 2", "3 8 r 1", "4 7 q 1", "5 7 r 1", "6 7 r 2"]
    assert judge(lines) == Seen(forwards=6, requests=2, resumed=1, went_back=1)
