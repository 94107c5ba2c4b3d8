"""A whole model's spare that was sent copies goes on with few rounds, and with the same drafts.

A small checkpoint with its head, both perturbed by their rows. What is repeated is counted in
forwards of the target.
"""

import functools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest
from engines import ORACLE, answer, engine_of, load_quietly, request
from shims import by_rows, perturb
from small import small_spec

from exo_node.mtp.depth import Plan
from exo_node.mtp.seams import Block, Want
from exo_node.mtp.steps import Prefilled
from exo_node.mtp.types import Round, Sampling
from exo_node.placement.errors import InvalidFrame
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.engine import TextEngine
from exo_node.shard.engine.events import Delta
from exo_node.shard.engine.request import EngineRequest
from exo_node.shard.model.load import Loaded
from exo_node.shard.pipeline.state_sender import EVERY_S, StateSender
from exo_node.shard.pipeline.state_store import StateStore

PROMPT: list[int] = next(row["prompt_ids"] for row in ORACLE if row["prompt"] == "Tell me a story.")
LONG = (PROMPT * 8)[:90]
"""Of six chunks, the last one shorter."""
CHUNK = 16
TOKENS = 28
FEW = 5
EVERY = 3
"""Steps from one copy to the next."""
GREEDY = Sampling()
SEEDED = Sampling(temperature=1.0, seed=5)


@functools.cache
def _loaded() -> tuple[pb.StageSpec, Loaded]:
    wanted = small_spec(native_mtp=True, prefill_chunk=CHUNK)
    loaded = load_quietly(wanted)
    assert perturb(loaded.model.model, by_rows, size=0.1) > 10
    head: Any = loaded.head
    assert perturb(head, by_rows, size=0.1) > 4
    return wanted, loaded


class Paced(StateSender):
    """A copy every few steps, however long they take."""

    now = 0.0
    every = EVERY

    def due(self, request: str) -> bool:
        self.now += EVERY_S / self.every * (1 + 1e-9)  # sums of thirds may fall short of one
        return super().due(request)


class Stretches:
    """Drafts two tokens a round, or none for a while, as the position says."""

    def plan(self, position: int) -> Plan:
        inside = position % 16
        return Plan(2, 1) if inside < 8 else Plan(0, 16 - inside)

    def learn(self, k: int, accepted: int, position: int, seconds: float) -> None:
        del k, accepted, position, seconds


def stretches(asked: EngineRequest) -> Stretches:
    del asked
    return Stretches()


class Whole:
    """A runner of the whole model, and its spare."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        stretches: bool = False,
        rows: int = 0,
        every: int = EVERY,
    ) -> None:
        wanted, loaded = _loaded()
        self.spec = pb.StageSpec()
        self.spec.CopyFrom(wanted)
        self.spec.fixed_rows = rows
        self.loaded = loaded
        self.copies = StateStore(loaded.model, loaded.expected, time.monotonic)
        self.sent: list[pb.StateCopy] = []
        self.arrives = True
        self.state_sender = Paced(
            loaded.model,
            loaded.expected,
            lambda: self.state_sender.now,
            self._send,
            self.copies.hold,
        )
        self.state_sender.every = every
        self.state_sender.follow(following=True)
        self._killed: list[Generator[Any]] = []
        self._patch = monkeypatch
        self._stretches = stretches
        self.runner = self._engine(state_sender=self.state_sender)
        self.spare = self._engine(copies=self.copies)
        self.forwards: list[int] = []
        """Rows of each forward of the spare's target."""
        forward = self.spare._target.forward  # pyright: ignore[reportPrivateUsage]

        def counted(tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block:
            self.forwards.append(tokens.shape[0])
            return forward(tokens, caches, want=want)

        monkeypatch.setattr(self.spare._target, "forward", counted)  # pyright: ignore[reportPrivateUsage]

    def until(self, cut: int, asked: EngineRequest, *, unread: int = 0) -> tuple[Round, ...]:
        """The rounds that were handed out before the runner was killed; it made `unread` more."""
        rounds = [event.round for event in self._begun(asked, cut + unread, Delta)]
        return tuple(rounds[:cut])

    def in_prompt(self, asked: EngineRequest, reports: int) -> None:
        """Killed after so many reports of a prompt being read; the first says 0."""
        _ = list(self._begun(asked, reports, Prefilled))

    def _begun(self, asked: EngineRequest, count: int, kind: type[Any]) -> Generator[Any]:
        events: Generator[Any] = self.runner.generate(asked)
        self._killed.append(events)  # never closed, as by a process that is gone
        while count:
            event = next(events)
            if isinstance(event, kind):
                count -= 1
                yield event
        if kind is Prefilled:
            _ = next(events)  # a copy is made once the report was taken

    def rest(self, asked: EngineRequest, log: Sequence[Round]) -> tuple[Round, ...]:
        again = replace(asked, attempt=asked.attempt + 1, replay=tuple(log))
        return answer(self.spare, again).rounds

    def repeated(self, rest: Sequence[Round]) -> int:
        """Forwards of the spare that gave nothing new."""
        return len(self.forwards) - len(rest)

    def close(self) -> None:
        """What was not killed after all is cancelled."""
        for events in self._killed:
            events.close()
        self._killed.clear()

    def rename(self, request: str) -> None:
        """What the spare keeps was sent under that name."""
        kept = self.copies._kept  # pyright: ignore[reportPrivateUsage]
        [kept[request]] = [kept.pop(name) for name in list(kept)]

    def fresh(self) -> TextEngine:
        """A runner without a spare."""
        return self._engine()

    def _engine(self, **parts: Any) -> TextEngine:
        engine = engine_of(self.loaded, self.spec, **parts)
        if self._stretches:
            self._patch.setattr(engine.drafting, "depth", stretches)
        return engine

    def _send(self, copy: pb.StateCopy) -> None:
        self.sent.append(pb.StateCopy.FromString(copy.SerializeToString()))
        if self.arrives:
            self.copies.keep(pb.StateCopy.FromString(copy.SerializeToString()))
        self.state_sender.delivered(0.0)


def asked(k: int, sampling: Sampling = GREEDY, prompt: Sequence[int] = PROMPT) -> EngineRequest:
    return request(prompt, k, TOKENS, ignore_end=True, top_logprobs=0, sampling=sampling)


@dataclass(frozen=True, slots=True)
class Mode:
    k: int
    stretches: bool = False
    rows: int = 0
    sampling: Sampling = GREEDY


MODES = {
    "plain": Mode(0),
    "plain, seeded": Mode(0, sampling=SEEDED),
    "drafting": Mode(2),
    "drafting, seeded": Mode(2, sampling=SEEDED),
    "at times": Mode(2, stretches=True),
    "strict": Mode(2, rows=4),
    "strict, at times": Mode(2, stretches=True, rows=4),
}


@functools.cache
def expected_of(mode: Mode) -> tuple[Round, ...]:
    with pytest.MonkeyPatch.context() as patch:
        whole = Whole(patch, stretches=mode.stretches, rows=mode.rows)
        return answer(whole.fresh(), asked(mode.k, mode.sampling)).rounds


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> Whole:
    return Whole(monkeypatch)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("name", MODES)
def test_a_spare_repeats_what_came_after_its_last_copy_and_drafts_as_before(
    monkeypatch: pytest.MonkeyPatch, name: str, share: float
) -> None:
    mode = MODES[name]
    whole, wanted = Whole(monkeypatch, mode.stretches, mode.rows), asked(mode.k, mode.sampling)
    expected = expected_of(mode)
    cut = 1 + int(share * len(expected))
    log = whole.until(cut, wanted)
    assert log == expected[:cut]
    assert whole.rest(wanted, log) == expected[cut:]
    assert whole.repeated(expected[cut:]) <= EVERY, f"without copies it would have been {cut}"


@pytest.mark.parametrize("name", ["plain", "drafting", "at times"])
def test_rounds_that_nobody_read_are_not_taken_for_the_answers(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The last copy is ahead of what was handed out: the one before it is gone on from."""
    mode = MODES[name]
    whole, wanted = Whole(monkeypatch, mode.stretches), asked(mode.k)
    expected = expected_of(mode)
    log = whole.until(8, wanted, unread=2)
    assert whole.rest(wanted, log) == expected[8:]
    assert whole.repeated(expected[8:]) <= 2 * EVERY


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize(("reports", "read"), [(3, 4), (5, 2), (7, 1)])
def test_a_prompt_is_read_on(
    monkeypatch: pytest.MonkeyPatch, k: int, reports: int, read: int
) -> None:
    """Behind its last row nobody knows the first token: the last chunk is read once more."""
    whole, wanted = Whole(monkeypatch, every=1), asked(k, prompt=LONG)
    expected = answer(whole.fresh(), replace(wanted, max_tokens=FEW)).rounds
    whole.in_prompt(replace(wanted, max_tokens=FEW), reports)
    assert whole.rest(replace(wanted, max_tokens=FEW), ()) == expected
    assert whole.forwards[:read] == [16] * (read - 1) + [10]
    assert max(whole.forwards[read:]) <= 1 + k


def test_a_second_spare_is_sent_what_the_first_one_took_up(
    drafting: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, expected = asked(2), expected_of(MODES["drafting"])
    log = drafting.until(6, wanted)
    second = Whole(monkeypatch)
    drafting.runner = second.runner
    second.runner._earlier._copies = drafting.copies  # pyright: ignore[reportPrivateUsage]
    again = replace(wanted, attempt=2, replay=log)
    more = second.until(4, again)
    assert (*log, *more) == expected[:10]
    assert second.rest(again, (*log, *more)) == expected[10:]
    assert second.repeated(expected[10:]) <= EVERY


# ------------------------------------------------------------------ what is not gone on from


def test_a_copy_of_other_tokens_is_not_gone_on_from(drafting: Whole) -> None:
    """Without a seed a second attempt draws others; a spare may have the first one's copies."""
    wanted, expected = asked(0), expected_of(MODES["plain"])
    _ = drafting.until(9, asked(0, Sampling(temperature=9.0, seed=6)))
    drafting.rename(wanted.request)
    assert drafting.rest(wanted, expected[:9]) == expected[9:]
    assert drafting.repeated(expected[9:]) == 9


def test_a_copy_without_the_drafters_state_is_for_plain_answers_only(drafting: Whole) -> None:
    wanted, expected = asked(0), expected_of(MODES["plain"])
    log = drafting.until(9, wanted)
    assert not any(copy.HasField("drafter") for copy in drafting.sent)
    again = replace(wanted, k=2)
    rest = drafting.rest(again, log)
    fresh = answer(drafting.fresh(), replace(again, attempt=2, replay=log))
    assert (log, rest) == (expected[:9], fresh.rounds)
    assert drafting.repeated(rest) == 9


def test_an_answer_that_ended_or_is_cancelled_is_dropped_and_one_that_is_parked_is_not(
    drafting: Whole,
) -> None:
    for end, held in (("cancelled", False), ("parked", True)):
        wanted = asked(2)
        _ = drafting.until(6, wanted)
        assert drafting.copies.bytes > 0
        if end == "parked":
            drafting.runner.park(wanted.request, 1)
        drafting.close()
        assert (drafting.copies.bytes > 0) is held
    assert drafting.runner.expire(0.0) != []
    assert drafting.copies.bytes == 0


def test_rebuilding_everything_takes_up_nothing(drafting: Whole) -> None:
    wanted, expected = asked(2), expected_of(MODES["drafting"])
    log = drafting.until(9, wanted)
    assert drafting.rest(replace(wanted, rebuild_all=True), log) == expected[9:]
    assert drafting.repeated(expected[9:]) == 9


# ------------------------------------------------------------------ what is refused

Spoil = Callable[[pb.DrafterCopy], object]
SPOILT: list[Spoil] = [
    lambda drafter: setattr(drafter, "begin", drafter.begin + 1),
    lambda drafter: setattr(drafter, "begin", drafter.rows + 1),
    lambda drafter: setattr(drafter, "rows", drafter.rows + 1),
    lambda drafter: setattr(drafter, "rows", 2**50),
    lambda drafter: setattr(drafter.layer, "room", 2**30),
    lambda drafter: setattr(drafter.layer, "room", 1),
    lambda drafter: drafter.layer.tensors.pop(),
    lambda drafter: drafter.layer.ClearField("tensors"),
    lambda drafter: drafter.layer.tensors[0].shape.append(1),
    lambda drafter: setattr(drafter.layer.tensors[0], "data", b"1234"),
    lambda drafter: setattr(drafter.read, "data", b""),
    lambda drafter: drafter.read.shape.append(1),
    lambda drafter: setattr(drafter.read, "dtype", 9),
    lambda drafter: drafter.pending.CopyFrom(drafter.read),
    lambda drafter: drafter.ahead.CopyFrom(pb.Tensor(shape=[1, 2**31, 2**31])),
]


@functools.cache
def sent_copies() -> list[bytes]:
    """Those of one answer."""
    with pytest.MonkeyPatch.context() as patch:
        whole = Whole(patch)
        whole.arrives = False
        _ = whole.until(9, asked(2))
        whole.close()
    return [copy.SerializeToString() for copy in whole.sent]


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("number", [1, 2], ids=["first", "next"])
def test_a_drafters_copy_that_cannot_be_is_refused(
    drafting: Whole, number: int, spoil: Spoil
) -> None:
    """The first copy, of the prompt, has no rows of the head yet."""
    *before, spoilt = [pb.StateCopy.FromString(sent) for sent in sent_copies()[: number + 1]]
    for copy in before:
        drafting.copies.keep(copy)
    assert drafting.copies.bytes > 0
    spoil(spoilt.drafter)
    with pytest.raises(InvalidFrame) as caught:
        drafting.copies.keep(spoilt)
    assert caught.value.param == "copy.drafter"
    assert drafting.copies.bytes == 0
    assert drafting.copies.take(spoilt.request, 2, 1000) is None
