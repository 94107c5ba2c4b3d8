"""Answers go on in the middle of a forward over prompts, and all are what they are alone."""

# pyright: reportPrivateUsage=false

import pytest
from engines import request
from readers import Reader, alone, engine, prompt, together
from small import LAYERS

from exo_node.shard.engine import prefill_forward
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.prefill_forward import PrefillForward
from exo_node.shard.engine.request import Request


@pytest.fixture(autouse=True)
def a_part_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_forward, "MAX_PART_S", 0.0)


def begin(served: TextEngine, reader: Reader) -> Request:
    """Begins a request as a runner does: the engine's own steps answer it."""

    def on_end(fault: BaseException | None) -> None:
        reader.fault = fault

    return served.begin(reader.request, reader.take, on_end)


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
        assert tuple(reader.ids) == alone(reader.request).ids
    assert served.live_requests == 0


@pytest.mark.parametrize("batching", [True, False])
def test_an_answer_continues_between_two_parts_of_a_chunk(
    batching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, go_on = engine(batching=batching), PrefillForward.advance
    answering = Reader(request(prompt(0), 1, 200, ignore_eos=True))
    other = Reader(request(prompt(1, 100), 0, 4))
    rounds = list[int]()

    def part(self: PrefillForward) -> bool:
        rounds.append(len(answering.rounds))
        return go_on(self)

    first = begin(served, answering)
    while not answering.rounds:
        assert served._engine.step()
    monkeypatch.setattr(PrefillForward, "advance", part)
    second = begin(served, other)
    while not other.rounds:
        assert served._engine.step()
    assert len(rounds) >= LAYERS - 1
    assert len(set(rounds)) == len(rounds)
    for running in (first, second):
        served.cancel(running)
    assert served.live_requests == 0


def stepped_until_a_shared_part(served: TextEngine) -> list[tuple[Reader, Request]]:
    """Three prompts that are read together, in the middle of the forward."""
    readers = [Reader(request(prompt(i, 40), 1, 12)) for i in range(3)]
    running = [(reader, begin(served, reader)) for reader in readers]
    assert served._engine.step()
    under_way = served._engine._prefill_forward
    assert under_way is not None and len(under_way.requests) == 3
    return running


def test_one_that_is_cancelled_between_two_parts_costs_the_others_nothing() -> None:
    served = engine()
    (first, cancelled), *others = stepped_until_a_shared_part(served)
    served.cancel(cancelled)
    while served._engine.step():
        pass
    assert first.end is None and not first.ids
    for reader, _ in others:
        assert tuple(reader.ids) == alone(reader.request).ids
    assert served.live_requests == 0 and served.cache_bytes() == 0
