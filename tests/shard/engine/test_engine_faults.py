"""Errors of a forward or a reader end no answer that does not depend on it."""

# pyright: reportPrivateUsage=false

import inspect
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from driven import begin, driven
from engines import changed, request
from readers import Reader, alone, assert_as_alone, both_ways, engine, prompt

from exo_node.mtp.targets import FamilyTarget
from exo_node.mtp.types import FinishReason
from exo_node.placement.errors import NumericError, StateLost
from exo_node.shard.engine import batch, prefill_forward
from exo_node.shard.engine import request as requests
from exo_node.shard.engine.answers.events import Delta
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.batch import Batch
from exo_node.shard.engine.states.cache_set import CacheSet


def go_on(served: TextEngine, readers: Sequence[Reader]) -> None:
    """The attempts that follow, as the entry node makes them of what it was told."""
    assert served.live_requests == 0 and served.cache_bytes() == 0
    for reader in readers:
        assert isinstance(reader.fault, StateLost), reader.fault
    after = [
        Reader(changed(r.request, attempt=2, replay=tuple(r.rounds), alone=True)) for r in readers
    ]
    driven(served, after)
    for before, reader in zip(readers, after, strict=True):
        assert reader.fault is None and reader.end is not None
        assert reader.end.stats.batching_reason.startswith("restarted after a fault")
        assert tuple(before.ids + reader.ids) == alone(before.request).ids


def assert_batches_go_on(served: TextEngine) -> None:
    """Later requests share forwards, as if nothing had failed."""
    again = [Reader(request(prompt(i), 2, 12)) for i in range(3)]
    driven(served, again)
    assert_as_alone(again)
    assert all(r.end is not None and r.end.stats.batched_tokens for r in again)
    assert served.live_requests == 0 and served.cache_bytes() == 0


# ---------------------------------------------------------------- forwards


@pytest.mark.parametrize(
    "ahead", [pytest.param(False, marks=pytest.mark.smoke), True], ids=["one by one", "ahead"]
)
def test_a_fault_of_a_shared_forward_ends_all_of_it_and_nothing_that_follows(
    monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    """From the fifth one on; the attempts that follow share none."""
    served, count, forward = engine(runs_ahead=ahead), 0, FamilyTarget.forward_batch

    def failing(target: FamilyTarget, tokens: mx.array, caches: Sequence[object]) -> Any:
        nonlocal count
        count += tokens.shape[0] > 1
        if count >= 5 and tokens.shape[0] > 1:
            raise RuntimeError("[malloc] out of memory")
        return forward(target, tokens, caches)

    with monkeypatch.context() as patched:
        patched.setattr(FamilyTarget, "forward_batch", failing)
        readers = [Reader(request(prompt(i), 2, 30)) for i in range(3)]
        driven(served, readers)
        assert all(len(reader.rounds) > 1 for reader in readers)
        go_on(served, readers)
    assert_batches_go_on(served)


def test_a_fault_of_a_forward_over_prompts_is_told_to_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And to no answer that it was computed between."""
    served = engine()
    other = Reader(request(prompt(9), 2, 40, ignore_eos=True))
    readers = [Reader(request(prompt(i, 40), 1, 12), begins=6) for i in range(3)]

    def failing(*_: object) -> None:
        raise ValueError("[concatenate] shapes differ")

    with monkeypatch.context() as patched:
        patched.setattr(prefill_forward, "prefill_together", failing)
        driven(served, [other, *readers])
        go_on(served, readers)
    assert_as_alone([other])
    assert_batches_go_on(served)


@pytest.mark.parametrize("k", [0, 2])
def test_tokens_that_are_lost_on_their_way_end_all_that_waited_for_them(
    monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """Their rows are in the caches, and a round after them is under way: nobody may go on."""
    served, count, land = engine(runs_ahead=True), 0, Batch.land

    def failing(self: Batch, *rest: Any) -> Any:
        nonlocal count
        count += len(self.requests) > 2
        if count > 4 and len(self.requests) > 2:
            raise RuntimeError("the device is gone")
        return land(self, *rest)

    readers = [Reader(request(prompt(i), k, 30, ignore_eos=True)) for i in range(4)]
    with monkeypatch.context() as patched:
        patched.setattr(Batch, "land", failing)
        driven(served, readers)
        go_on(served, readers)
    assert_batches_go_on(served)


@pytest.mark.parametrize(
    ("of", "where"), [(CacheSet, "extract"), (CacheSet, "change"), (batch, "_last_tokens")]
)
def test_a_fault_as_a_batch_changes_costs_nothing_that_follows(
    monkeypatch: pytest.MonkeyPatch, of: Any, where: str
) -> None:
    """While one of its members does not read, which is taken out of it, and another one joins."""
    monkeypatch.setattr(requests, "MAX_UNREAD_EVENTS", 4)
    served, faults = engine(), list[str]()
    readers = [Reader(request(prompt(i), 2, 40, ignore_eos=True)) for i in range(4)]
    readers[1].stalls, readers[3].begins = range(6, 60), 14
    work = getattr(of, where)

    def failing(subject: Any, *rest: Any) -> Any:
        if isinstance(subject, CacheSet):
            is_due = len(subject.rows) > 2
        else:  # at the end of a change, as somebody leaves who goes on later
            leaves = inspect.stack()[1].frame.f_locals.get("leaves", ())
            is_due = any(each.phase == "decode" for each in leaves)
        if is_due and not faults:
            faults.append(where)
            raise RuntimeError("[malloc] out of memory")
        return work(subject, *rest)

    monkeypatch.setattr(of, where, failing)
    driven(served, readers)
    assert faults
    lost = [reader for reader in readers if reader.fault is not None]
    assert lost
    go_on(served, lost)
    assert_as_alone([reader for reader in readers if reader not in lost])
    assert_batches_go_on(served)


@both_ways
def test_a_target_that_gives_no_number_ends_its_own_answer_only(
    monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    """Its row of the logits is no distribution from the tenth shared forward on."""
    served, count, forward = engine(runs_ahead=ahead), 0, FamilyTarget.forward_batch

    def broken(target: FamilyTarget, tokens: mx.array, caches: Sequence[object]) -> Any:
        nonlocal count
        logits, hidden = forward(target, tokens, caches)
        count += 1
        if count >= 10 and logits.shape[0] == 3:
            logits = mx.concatenate([logits[:1] * float("nan"), logits[1:]])
        return logits, hidden

    monkeypatch.setattr(FamilyTarget, "forward_batch", broken)
    readers = [Reader(request(prompt(i), 0, 50, ignore_eos=True)) for i in range(3)]
    driven(served, readers)
    first, *others = readers
    assert isinstance(first.fault, NumericError)
    assert len(first.ids) > 1 and tuple(first.ids) == alone(first.request).ids[: len(first.ids)]
    assert_as_alone(others)
    assert served.live_requests == 0 and served.cache_bytes() == 0


# ---------------------------------------------------------------- readers


class Broken(Reader):
    """Its fourth round cannot be delivered."""

    def take(self, event: object) -> None:
        if isinstance(event, Delta) and len(self.rounds) == 3:
            raise ConnectionResetError("its reader is gone")
        super().take(event)


@both_ways
@pytest.mark.parametrize("k", [0, 2])
def test_a_reader_that_cannot_be_told_ends_its_own_answer_only(k: int, *, ahead: bool) -> None:
    served = engine(runs_ahead=ahead)
    engine_request = [request(prompt(i), k, 30, ignore_eos=True) for i in range(3)]
    broken, others = Broken(engine_request[0]), [Reader(each) for each in engine_request[1:]]
    driven(served, [broken, *others])
    assert isinstance(broken.fault, ConnectionResetError) and len(broken.rounds) == 3
    assert_as_alone(others)
    assert served.live_requests == 0 and served.cache_bytes() == 0


class Failing:
    """A stop condition that fails at the `count`-th token."""

    def __init__(self, count: int) -> None:
        self._left = count

    def push(self, token: int) -> FinishReason | None:
        del token
        self._left -= 1
        if not self._left:
            raise UnicodeDecodeError("utf-8", b"", 0, 1, "no text")
        return None


@both_ways
@pytest.mark.parametrize("count", [1, 10])
def test_a_stop_condition_that_fails_ends_its_own_answer_only(count: int, *, ahead: bool) -> None:
    """At the first token, which is a prompt's, and in a round."""
    served = engine(runs_ahead=ahead)
    failing, *others = [Reader(request(prompt(i), 2, 30, ignore_eos=True)) for i in range(3)]
    begin(served, failing).stop_condition = Failing(count)
    driven(served, others)
    assert isinstance(failing.fault, UnicodeDecodeError)
    assert len(failing.ids) < count
    assert tuple(failing.ids) == alone(failing.request).ids[: len(failing.ids)]
    assert_as_alone(others)
    assert served.live_requests == 0 and served.cache_bytes() == 0


@both_ways
@pytest.mark.parametrize("k", [0, 2])
def test_a_slow_reader_leaves_the_batch_and_comes_back_with_the_same_ids(
    monkeypatch: pytest.MonkeyPatch, k: int, *, ahead: bool
) -> None:
    """The others go on without it, and the batch changes only where somebody comes or goes."""
    monkeypatch.setattr(requests, "MAX_UNREAD_EVENTS", 3)
    changes, change = list[int](), Batch.change

    def counted(self: Batch, *rest: Any) -> None:
        change(self, *rest)
        changes.append(len(self.requests))

    monkeypatch.setattr(Batch, "change", counted)
    served = engine(runs_ahead=ahead)
    readers = [Reader(request(prompt(i), k, 60, ignore_eos=True)) for i in range(4)]
    readers[1].stalls = range(8, 26)
    batch_sizes = list[int]()
    driven(served, readers, lambda _: batch_sizes.append(len(readers[1].rounds)))
    assert batch_sizes[25] == batch_sizes[18] < len(readers[0].rounds) / 2
    sizes = [r.forward.batch for r in readers[0].rounds]
    without = sizes.index(3)
    assert 4 in sizes[:without] and 4 in sizes[without:]
    assert len(changes) < 12, "not once for each round that it missed"
    assert_as_alone(readers)
