"""What goes wrong in a shared forward ends no answer that can be computed without it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from engines import request
from readers import Reader, alone, engine, prompt, together

from exo_node.mtp.batch import Batch
from exo_node.mtp.batch_prompts import PromptBatch
from exo_node.placement.errors import NumericError, StateLost
from exo_node.shard.engine.local import FamilyTarget


def go_on(served: Any, readers: Sequence[Reader]) -> list[Reader]:
    """The attempts that follow, as the entry node makes them of what it was told."""
    for reader in readers:
        assert isinstance(reader.fault, StateLost), reader.fault
    after = [
        Reader(replace(r.asked, attempt=2, replay=tuple(r.rounds), alone=True)) for r in readers
    ]
    together(served, after)
    for before, reader in zip(readers, after, strict=True):
        assert reader.fault is None and reader.done is not None
        assert reader.done.stats.batching_reason.startswith("begun anew after a fault")
        assert tuple(before.ids + reader.ids) == alone(before.asked).ids
    return after


def test_tokens_that_are_lost_on_their_way_end_all_that_waited_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their rows are in the caches: nobody may go on behind them."""
    served, shared = engine(runs_ahead=True), 0
    land = Batch._land  # pyright: ignore[reportPrivateUsage]

    def failing(self: Batch, flight: Any, *, goes_on: bool, begun: float | None = None) -> None:
        nonlocal shared
        shared += self.size > 2
        if shared > 4 and not goes_on:  # as a member joins
            self._flight = None  # pyright: ignore[reportPrivateUsage]
            raise RuntimeError("the device is gone")
        land(self, flight, goes_on=goes_on, begun=begun)

    monkeypatch.setattr(Batch, "_land", failing)
    readers = [Reader(request(prompt(i), 0, 60), begins=8 if i == 3 else 0) for i in range(4)]
    together(served, readers)
    _ = go_on(served, readers)  # though the batch fails again


FAULTS = (RuntimeError("[malloc] out of memory"), ValueError("[concatenate] shapes differ"))


@pytest.mark.smoke
@pytest.mark.parametrize("fault", FAULTS, ids=["RuntimeError", "ValueError"])
def test_a_fault_of_a_forward_over_prompts_is_told_to_all_of_them(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    served = engine()
    with monkeypatch.context() as patched:

        def failing(self: object, group: object) -> None:
            raise fault

        patched.setattr(PromptBatch, "_read", failing)
        readers = [Reader(request(prompt(i, 40), 1, 12)) for i in range(3)]
        together(served, readers)
        _ = go_on(served, readers)
    again = [Reader(request(prompt(i, 40), 1, 12)) for i in range(3)]
    together(served, again)
    assert [tuple(r.ids) for r in again] == [alone(r.asked).ids for r in again]


def test_a_target_that_gives_no_number_ends_its_own_answer_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its row of the logits is no distribution from the tenth shared forward on."""
    served, count = engine(), 0
    forward = FamilyTarget.forward_batch

    def broken(
        target: FamilyTarget, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array | None]:
        nonlocal count
        logits, hidden = forward(target, tokens, caches)
        count += 1
        if count >= 10 and logits.shape[0] > 1:
            logits = mx.concatenate([logits[:1] * float("nan"), logits[1:]])
        return logits, hidden

    monkeypatch.setattr(FamilyTarget, "forward_batch", broken)
    readers = [Reader(request(prompt(i), 0, 50, ignore_end=True)) for i in range(3)]
    together(served, readers)
    ended = [reader for reader in readers if reader.fault is not None]
    assert ended and all(isinstance(reader.fault, NumericError) for reader in ended)
    assert len(ended) < 3
    for reader in readers:
        assert tuple(reader.ids) == alone(reader.asked).ids[: len(reader.ids)]
    assert served.live_requests == 0


@pytest.mark.parametrize("fault", FAULTS, ids=["RuntimeError", "ValueError"])
def test_a_fault_of_a_shared_forward_ends_all_of_it_and_nothing_that_follows(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    served = engine()
    with monkeypatch.context() as patched:

        def failing(target: object, tokens: mx.array, caches: object) -> None:
            raise fault

        patched.setattr(FamilyTarget, "forward_batch", failing)
        readers = [Reader(request(prompt(i), 2, 50)) for i in range(3)]
        together(served, readers)
        _ = go_on(served, readers)
    assert served.live_requests == 0 and served.cache_bytes() == 0
    again = [Reader(request(prompt(i), 2, 20)) for i in range(2)]
    together(served, again)
    assert [tuple(reader.ids) for reader in again] == [alone(r.asked).ids for r in again]


def test_a_fault_as_a_batch_is_formed_costs_nothing_that_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While one of its members does not read, which is taken out of it, and another one joins."""
    served, faults = engine(), 0
    formed = Batch._draft_for_members  # pyright: ignore[reportPrivateUsage]
    readers = [Reader(request(prompt(i), 2, 40, ignore_end=True)) for i in range(4)]
    readers[1].stalls, readers[3].begins = range(12, 40), 14

    def failing(self: Batch) -> None:
        nonlocal faults
        members = self._members  # pyright: ignore[reportPrivateUsage]
        joins = any(member.answer._max_tokens == 41 for member in members)  # pyright: ignore[reportPrivateUsage]
        if joins and not faults:
            faults = 1
            raise RuntimeError("[malloc] out of memory")
        formed(self)

    readers[3].asked = replace(readers[3].asked, max_tokens=41)
    monkeypatch.setattr(Batch, "_draft_for_members", failing)
    together(served, readers)
    assert faults and any(reader.fault is not None for reader in readers)
    lost = [reader for reader in readers if reader.fault is not None]
    _ = go_on(served, lost)
    for reader in readers:
        if reader not in lost:
            assert tuple(reader.ids) == alone(reader.asked).ids
    again = [Reader(request(prompt(i), 2, 8)) for i in range(3)]
    together(served, again)
    assert [tuple(r.ids) for r in again] == [alone(r.asked).ids for r in again]
    assert all(r.done is not None and r.done.stats.batched_tokens for r in again)
