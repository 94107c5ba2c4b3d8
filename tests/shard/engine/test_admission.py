"""Requests hold no more rows at once than one context has, and none waits behind one that came
later."""

from collections.abc import Generator
from typing import Any

import pytest
from engines import answer, engine_of, load_quietly, request, spec
from readers import Reader, together
from small import small_checkpoint

from exo_node.mtp.seams import Wait
from exo_node.shard.engine.admission import GROWTH, Admission


class Guest:
    """One request at the door."""

    def __init__(
        self, door: Admission, prompt: int, max_tokens: int = 0, *, background: bool = False
    ) -> None:
        steps = door.enter(prompt, max_tokens, background=background)
        self._steps: Generator[Wait, None, Any] = steps
        self._door = door
        self._entry: Any = None
        self._wait: Wait | None = None
        self._go()

    @property
    def inside(self) -> bool:
        if self._wait is not None and self._wait.future.done():
            self._go()
        return self._entry is not None

    def leave(self) -> None:
        self._door.leave(self._entry)

    def cancel(self) -> None:
        self._steps.close()

    def _go(self) -> None:
        try:
            self._wait = next(self._steps)
        except StopIteration as end:
            self._entry, self._wait = end.value, None


def test_all_have_room_together_or_wait_in_the_order_of_arrival() -> None:
    door = Admission(1000)
    first, second, big, small = (Guest(door, rows) for rows in (400, 300, 700, 10))
    assert [g.inside for g in (first, second, big, small)] == [True, True, False, False]
    assert door.waiting == 2
    first.leave()
    assert big.inside and not small.inside
    second.leave()
    assert small.inside and door.waiting == 0


def test_one_alone_always_has_room_and_an_answers_first_tokens_count() -> None:
    door = Admission(1000)
    huge = Guest(door, 5000, 5000)
    assert huge.inside
    late = Guest(door, 1)
    assert not late.inside
    huge.leave()
    assert late.inside
    late.leave()
    some = [Guest(door, 10, 100_000) for _ in range(2)]
    assert [g.inside for g in some] == [True, 2 * (10 + GROWTH) <= 1000]


def test_those_in_the_background_come_last() -> None:
    door = Admission(100)
    first = Guest(door, 90)
    late, person = Guest(door, 90, background=True), Guest(door, 90)
    assert first.inside and door.waiting == 2
    first.leave()
    assert person.inside and not late.inside
    person.leave()
    assert late.inside


@pytest.mark.parametrize("when", ["while it waits", "after it was told"])
def test_who_goes_leaves_no_room_taken(when: str) -> None:
    door = Admission(100)
    first, second, third = Guest(door, 90), Guest(door, 90), Guest(door, 90)
    if when == "while it waits":
        second.cancel()
        first.leave()
    else:
        first.leave()
        second.cancel()
    assert third.inside
    third.leave()
    assert Guest(door, 100).inside


def test_answers_that_do_not_fit_together_come_one_after_the_other() -> None:
    """And each is what it is alone."""
    fields: dict[str, Any] = {"num_layers": 6, "native_mtp": True, "context_length": 128}
    wanted = spec(small_checkpoint(6), 0, 6, **fields)
    served = engine_of(load_quietly(wanted), wanted)
    asked = [request(list(range(5, 85)), 2, 20, ignore_end=True) for _ in range(4)]
    readers = [Reader(each) for each in asked[1:]]
    ended = list[Reader]()

    def look(_: int) -> None:
        ended.extend(r for r in readers if r.done is not None and r not in ended)
        assert served.live_requests <= 1

    together(served, readers, look)
    assert [readers.index(each) for each in ended] == [0, 1, 2]
    alone = answer(served, asked[0]).ids
    assert [tuple(each.ids) for each in readers] == [alone] * 3


def test_one_that_is_asked_too_early_goes_on_waiting() -> None:
    door = Admission(100)
    first = Guest(door, 90)
    steps = door.enter(90, 0)
    assert [next(steps).future.done() for _ in range(3)] == [False] * 3
    first.leave()
    with pytest.raises(StopIteration):
        next(steps)
