"""Answers go on in the middle of a chunk of somebody's prompt, and all are what they are alone."""

from collections.abc import Generator, Iterator
from typing import Any

import pytest
from engines import request
from readers import Reader, alone, engine, prompt, together
from small import LAYERS

from exo_node.mtp import parts
from exo_node.mtp.parts import Parts
from exo_node.mtp.seams import Wait
from exo_node.shard.engine.events import Delta


@pytest.fixture(autouse=True)
def a_part_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MOST_S", 0.0)


def test_answers_beside_prompts_in_parts_are_what_they_are_alone() -> None:
    served = engine()
    readers = [
        Reader(request(prompt(0), 2, 60)),
        Reader(request(prompt(1, 30), 1, 40), begins=2),
        Reader(request(prompt(2, 40), 3, 40), begins=2),  # read together with the one before
        Reader(request(prompt(3, 500), 2, 20), begins=10),
        Reader(request(prompt(4, 400), 0, 20), begins=14),
    ]
    together(served, readers)
    for reader in readers:
        assert reader.fault is None
        assert tuple(reader.ids) == alone(reader.asked).ids
    assert served.live_requests == 0


@pytest.mark.parametrize("batching", [True, False])
def test_an_answer_goes_on_between_two_parts_of_a_chunk(batching: bool) -> None:
    served = engine(batching=batching)
    told = list[str]()

    def steps(name: str, asked: Any) -> Iterator[None]:
        for event in served.generate(asked):
            if isinstance(event, Wait) and event.part:
                told.append(f"{name}'s part")
            elif isinstance(event, Delta):
                told.append(f"{name}'s token")
            yield

    answering = steps("a", request(prompt(0), 1, 200, ignore_end=True))
    while "a's token" not in told:
        next(answering)
    told.clear()
    reading = steps("b", request(prompt(1, 100), 0, 4))
    while "b's token" not in told:
        next(reading)
        next(answering)
    assert told.count("b's part") >= LAYERS - 1
    assert "b's part b's part" not in " ".join(told)


def leader_ends(monkeypatch: pytest.MonkeyPatch, fault: Exception | None) -> list[Reader]:
    """Three prompts that are read together, whose leader meets `fault`, or None: is cancelled, in
    the middle of the chunk."""
    computed, running = Parts.computed, dict[str, Any]()
    readers = [Reader(request(prompt(i, 40), 1, 12)) for i in range(3)]

    def ending(self: Parts, requests: Any) -> Generator[Wait]:
        for count, wait in enumerate(computed(self, requests)):
            if len(requests) == 3 and count == 1:
                if fault is not None:
                    raise fault
                readers[0].ends = running["turn"] + 2  # `each` was told of the turn before
            yield wait

    monkeypatch.setattr(Parts, "computed", ending)
    served = engine()
    together(served, readers, lambda turn: running.update(turn=turn))
    assert served.live_requests == 0 and served.cache_bytes() == 0
    return readers


def test_a_leader_that_is_cancelled_between_two_parts_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *others = leader_ends(monkeypatch, None)
    assert first.ends is not None and first.done is None
    assert [tuple(r.ids) for r in others] == [alone(r.asked).ids for r in others]


def test_a_fault_between_two_parts_is_told_to_all_that_the_chunk_was_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readers = leader_ends(monkeypatch, RuntimeError("[malloc] out of memory"))
    assert all(reader.fault is not None for reader in readers)
