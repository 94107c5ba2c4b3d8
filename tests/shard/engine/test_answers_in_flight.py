"""Answers of which something is on its way round the stages: cancelled, failed, or only late.

Nothing of a request that is over stays anywhere, and the others answer as if they were alone.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from budget import seeds
from engines import changed
from pipelines import THREE, TWO
from readers import Reader, prompt
from staged_readers import CHUNK, LONG, Scene, alone, asks, tokens_of

from exo_node.mtp.types import Round, Sampling
from exo_node.placement.errors import PeerLost, StateLost
from exo_node.shard.engine.request import Parameters

ROOM = 64 << 20
SHORT = prompt(0)
SEEDED = Sampling(temperature=0.9, seed=11)


@pytest.mark.smoke
@pytest.mark.parametrize("is_computed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["question", "chunk", "log", "round"])
def test_of_a_request_that_is_cancelled_while_its_message_is_in_flight_nothing_stays(
    kind: str, is_computed: bool
) -> None:
    """Before or after the stages' work for it."""
    scene = Scene(THREE, ROOM if kind == "question" else 0)
    reader = scene.of_kind(kind)
    message = scene.until(lambda message: message.kind == kind)
    assert message.trip is not None and not message.trip.is_back
    if is_computed:
        scene.link.compute(message)
        assert all(worker.live_requests for worker in scene.pipeline.workers)
    scene.cancel(reader)
    scene.link.flush()
    assert set(scene.pipeline.leftovers) <= {"in flight"}, "which the next step reads"
    _ = scene.answered(asks(LONG[: CHUNK + 3], 5))
    assert not scene.pipeline.leftovers


@pytest.mark.smoke
def test_an_answer_waits_while_all_its_messages_are_in_flight() -> None:
    scene = Scene()
    events = scene.pipeline.engine.generate(asks(SHORT[:7], 5))
    while next(events) is not None:
        pass
    (message,) = scene.link.in_flight
    assert [next(events) for _ in range(5)] == [None] * 5
    scene.link.compute(message)
    assert next(events) is None and scene.link.in_flight == [message]
    scene.link.bring(message)
    assert next(events) is not None
    events.close()


@pytest.mark.parametrize("count", [1, 4])
def test_chunks_of_which_some_are_lost_end_their_answer_once(count: int) -> None:
    """Errors after the first one are dropped."""
    scene = Scene(THREE)
    reader = scene.ask(asks(LONG, 5))
    scene.settle()
    lost = list(scene.link.in_flight)
    assert [message.kind for message in lost] == ["chunk"] * 4
    for message in lost[:count]:
        scene.link.lose(message)
    scene.finish()
    assert isinstance(reader.fault, PeerLost) and "did not answer" in str(reader.fault)
    _ = scene.answered(replace(reader.request, attempt=2))
    assert not scene.pipeline.leftovers


@pytest.mark.smoke
def test_a_round_sets_out_only_when_all_before_it_is_back() -> None:
    """The parts of a prompt and of a log follow each other, and no row follows them."""
    scene = Scene()
    engine_request = asks(LONG, 24)
    earlier = scene.answered(engine_request)
    scene.link.sent.clear()
    after = scene.ask(replace(engine_request, attempt=2, replay=tuple(earlier.rounds[:20])))
    scene.settle()
    kinds = list[list[str]]()
    while len(scene.link.in_flight) != 1 or scene.link.in_flight[0].kind != "round":
        kinds.append([each.kind for each in scene.link.in_flight])
        scene.bring(scene.link.in_flight[0])
    chunk, log = ["chunk"], ["log"]
    # Three chunks for two stages: one more than they compute.
    assert kinds == [chunk * 3, chunk * 3, chunk * 2, chunk, log * 3, log * 2, log]
    assert [len(block.replayed) for block in scene.link.sent[4:7]] == [8, 8, 3]
    scene.finish()
    assert tokens_of(earlier)[:20] + tokens_of(after) == alone(engine_request)


@pytest.mark.smoke
def test_prompts_of_one_forward_set_out_as_far_as_they_keep_all_stages_busy() -> None:
    """One more than the stages compute: the others' would queue in front of later prompts."""
    scene = Scene()
    readers = [scene.ask(asks(prompt(i, CHUNK), 2)) for i in range(4)]
    scene.settle()
    assert [message.kind for message in scene.link.in_flight] == ["chunk"] * 3
    scene.finish()
    assert all(tokens_of(reader) == alone(reader.request) for reader in readers)


def test_groups_on_their_way_come_back_in_any_order() -> None:
    """The one that is back first goes on first, and the other one does not wait."""
    scene = Scene(THREE)
    readers = [scene.ask(asks(prompt(i), 12)) for i in range(6)]
    _ = scene.until(lambda _: len(scene.link.able()) == 3 and _all_shared(scene))
    first = scene.link.able()[0]
    for _ in range(8):  # the others have rounds meanwhile
        scene.bring(scene.link.able()[1])
        assert scene.link.able()[0] is first
    scene.finish()
    assert all(tokens_of(reader) == alone(reader.request) for reader in readers)


@pytest.mark.smoke
def test_no_answer_waits_for_the_prompt_of_one_that_is_to_join_it() -> None:
    """With two stages the third request shares the rounds of one of the others."""
    scene = Scene()
    answers = [scene.ask(asks(prompt(i), 30)) for i in range(2)]
    _ = scene.until(lambda _: all(reader.rounds for reader in answers))
    late = scene.ask(asks(prompt(2, CHUNK), 6))
    away = scene.until(lambda message: (late.request.name, 1) in message.keys)
    told = [len(reader.rounds) for reader in answers]
    for _ in range(8):
        scene.bring(next(each for each in scene.link.able() if each is not away))
    assert all(len(r.rounds) > before + 2 for r, before in zip(answers, told, strict=True))
    scene.finish()
    assert all(tokens_of(reader) == alone(reader.request) for reader in (*answers, late))


def _all_shared(scene: Scene) -> bool:
    return all(len(message.keys) == 2 for message in scene.link.able())


# ----------------------------------------------------------------------------------- random traces


class Trace:
    """Requests that come, go and are resumed while trips come back, or do not, in any order."""

    PROMPTS = (SHORT[:7], LONG, LONG[: 2 * CHUNK], prompt(9, 10), [*LONG[: 2 * CHUNK], 8, 9])
    TOKENS = 10

    def __init__(self, seed: int, bounds: Sequence[int], room: int) -> None:
        self._draw = random.Random(seed)
        self.scene = Scene(bounds, room)
        self._told: dict[str, list[Round]] = {}
        self.shared = self.lost = self.cancelled = self.cached = 0

    def run(self, steps: int) -> None:
        draw, scene, readers = self._draw, self.scene, list[Reader]()
        for _ in range(steps):
            kind = draw.random()
            if len(scene.live) < 6 and kind < 0.12:
                readers.append(scene.ask(self._fresh()))
            elif scene.live and kind < 0.15:
                self.cancelled += 1
                scene.cancel(draw.choice(scene.live))
            elif kind < 0.16:
                scene.pipeline.replace(1 + draw.randrange(len(scene.pipeline.workers)))
            else:
                self._go_on()
            if draw.random() < 0.7:
                scene.settle()
            self._follow(readers)
        while scene.live:
            scene.finish()
            self._follow(readers)
        assert not scene.pipeline.leftovers
        for reader in readers:
            before = self._told.get(reader.request.name, [])
            got = [(r.tokens, r.logprobs) for r in (*before, *reader.rounds)]
            expected = alone(reader.request)
            assert got == expected[: len(got)] and (reader.end is None or got == expected)
            batches = [round_.forward.batch for round_ in reader.rounds]
            self.shared += max(batches, default=1) > 1
            self.cached += reader.end is not None and reader.end.stats.cached_tokens > 0

    def _fresh(self) -> Parameters:
        sampling = self._draw.choice((Sampling(), Sampling(), SEEDED))
        return asks(self._draw.choice(self.PROMPTS), self.TOKENS, sampling=sampling)

    def _go_on(self) -> None:
        able = self.scene.link.able()
        if not able:
            return
        message = self._draw.choice(able)
        if message.trip is not None and self._draw.random() < 0.02:
            self.scene.link.lose(message)
        elif not message.is_computed and self._draw.random() < 0.4:
            self.scene.link.compute(message)
        else:
            self.scene.link.bring(message)

    def _follow(self, readers: list[Reader]) -> None:
        """The next attempts of those that failed, as their entry nodes make them."""
        for index, reader in enumerate(readers):
            if reader.fault is None:
                continue
            assert isinstance(reader.fault, PeerLost)
            self.lost += 1
            name = reader.request.name
            log = self._told.setdefault(name, [])
            log += reader.rounds
            attempt = reader.request.attempt + 1
            anew = reader.request.sharing.alone or isinstance(reader.fault, StateLost)
            engine_request = changed(reader.request, attempt=attempt, replay=tuple(log), alone=anew)
            readers[index] = self.scene.ask(engine_request)


@pytest.mark.parametrize(("bounds", "room"), [(TWO, 0), (THREE, ROOM)])
def test_random_traces_are_the_answers_of_each_alone(bounds: Sequence[int], room: int) -> None:
    totals = [0, 0, 0, 0]
    for seed in seeds(2, 100):
        trace = Trace(seed, bounds, room)
        trace.run(100)
        counts = trace.shared, trace.lost, trace.cancelled, trace.cached
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
    assert all(totals[:3]) and bool(totals[3]) == bool(room), "it shows nothing"
