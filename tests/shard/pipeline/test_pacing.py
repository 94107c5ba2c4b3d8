"""How many chunks of prompts are under way, and whose is next."""

from collections.abc import Generator
from concurrent.futures import Future

import pytest

from exo_node.mtp.seams import Wait
from exo_node.shard.pipeline.pacing import Pacing, Place

STAGES = 2
MOST = STAGES + 1


class Prompt:
    """A reader of chunks that asks for a place whenever it has none."""

    def __init__(self, pacing: Pacing, *, background: bool = False) -> None:
        self.pacing = pacing
        self._background = background
        self.asking: Generator[Wait, None, Place] | None = None
        self._wait: Wait | None = None

    def ask(self) -> Place | None:
        """None where it is to wait."""
        self.asking = self.pacing.place(self, background=self._background)
        try:
            self._wait = next(self.asking)
        except StopIteration as end:
            self.asking = None
            return end.value
        return None

    def went_on(self) -> Place | None:
        """What the driver of a generation does with one that waited."""
        assert self.asking is not None and self._wait is not None
        if not self._wait.future.done():
            return None
        with pytest.raises(StopIteration) as end:
            next(self.asking)
        self.asking = None
        return end.value.value

    def place(self) -> Place:
        place = self.ask()
        assert place is not None
        return place


def sent(place: Place) -> "Future[None]":
    computed: Future[None] = Future()
    place.keep(computed)
    place.close()
    return computed


def test_as_many_chunks_as_keep_the_stages_busy_are_under_way() -> None:
    prompt = Prompt(Pacing(STAGES))
    under_way = [sent(prompt.place()) for _ in range(MOST)]
    assert prompt.ask() is None
    assert prompt.went_on() is None
    under_way[0].set_result(None)
    assert prompt.went_on() is not None
    assert prompt.pacing.under_way == MOST


def test_a_chunk_that_was_never_sent_leaves_its_place() -> None:
    prompt = Prompt(Pacing(STAGES))
    for _ in range(MOST + 1):
        prompt.place().close()
    assert prompt.pacing.under_way == 0


def test_a_failure_frees_the_place_too() -> None:
    prompt = Prompt(Pacing(STAGES))
    sent(prompt.place()).set_exception(ValueError())
    gone = sent(prompt.place())
    assert gone.cancel()
    assert prompt.pacing.under_way == 0


def test_chunks_of_several_prompts_set_out_in_turn() -> None:
    pacing = Pacing(STAGES)
    first, second = Prompt(pacing), Prompt(pacing)
    under_way = [sent(first.place()) for _ in range(MOST)]
    order = list[str]()
    assert first.ask() is None and second.ask() is None
    for computed in under_way:
        computed.set_result(None)
        for name, prompt in (("b", second), ("a", first)):
            if prompt.asking is not None and (place := prompt.went_on()) is not None:
                order.append(name)
                _ = sent(place)
                assert prompt.ask() is None
    assert "".join(order) == "aba"


def test_the_background_waits_until_nobody_else_reads() -> None:
    pacing = Pacing(STAGES)
    front, behind = Prompt(pacing), Prompt(pacing, background=True)
    first = sent(front.place())
    assert behind.ask() is None
    first.set_result(None)
    assert behind.went_on() is None  # there is room, and another prompt that is not read yet
    pacing.done(front)
    assert behind.went_on() is not None


def test_prompts_in_front_pass_those_in_the_background() -> None:
    pacing = Pacing(STAGES)
    front, behind = Prompt(pacing), Prompt(pacing, background=True)
    under_way = [sent(behind.place()) for _ in range(MOST)]
    assert behind.ask() is None and front.ask() is None
    under_way[0].set_result(None)
    assert behind.went_on() is None
    assert front.went_on() is not None


@pytest.mark.parametrize("granted", [False, True])
def test_a_cancelled_prompt_leaves_nothing(granted: bool) -> None:
    pacing = Pacing(STAGES)
    prompt, other = Prompt(pacing), Prompt(pacing)
    under_way = [sent(other.place()) for _ in range(MOST)]
    assert prompt.ask() is None
    if granted:
        under_way.pop().set_result(None)
    assert prompt.asking is not None
    prompt.asking.close()
    for computed in under_way:
        computed.set_result(None)
    assert pacing.under_way == 0
    for _ in range(MOST):
        _ = sent(other.place())
