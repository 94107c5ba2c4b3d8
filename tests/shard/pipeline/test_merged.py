"""Rows that go through a pipeline together are those of each alone, whatever is lost on the way."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from engines import engine_of, load_quietly, request
from loopback import LoopbackLink
from readers import Reader, alone, prompt, together
from small import LAYERS, small_spec

from exo_node.mtp.types import Sampling
from exo_node.placement.errors import InvalidFrame, NumericError, PeerLost, StateLost
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.text_engine import TextEngine
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.pipeline.frames import HiddenBlock, cut_all, parts_of
from exo_node.shard.pipeline.merged import Merged
from exo_node.shard.pipeline.request_state import RequestState
from exo_node.shard.pipeline.stage import StageWorker

SEEDED = Sampling(temperature=0.8, seed=4)


class LosingLink(LoopbackLink):
    """Loses what comes back of some merged forwards, which every stage has computed by then."""

    lost_at: int | None = None
    sent = 0

    def send_all(self, blocks: Sequence[HiddenBlock]) -> "list[Future[HiddenBlock]]":
        self.sent += 1
        futures = super().send_all(blocks)
        if self.sent == self.lost_at:
            futures = [Future[HiddenBlock]() for _ in futures]
            for future in futures:
                future.set_exception(PeerLost("the last stage is gone"))
        return futures


class Split:
    """The small model in stages, in this process."""

    def __init__(self, bounds: Sequence[int], **changes: Any):
        parts = _loaded(tuple(bounds))
        self._parts = parts
        self.workers = [
            StageWorker(part.model, part.expected, time.monotonic) for part in parts[1:]
        ]
        self.link = LosingLink(self.workers, [part.expected for part in parts[1:]])
        wanted = small_spec(num_stages=len(parts), end_layer=bounds[1], **changes)
        self.engine: TextEngine = engine_of(parts[0], wanted, self.link)

    def replace(self, number: int) -> None:
        """By a runner that knows nothing."""
        part = self._parts[number + 1]
        self.workers[number] = StageWorker(part.model, part.expected, time.monotonic)

    @property
    def cache_bytes(self) -> int:
        return self.engine.cache_bytes() + sum(worker.cache_bytes() for worker in self.workers)


@functools.cache
def _loaded(bounds: tuple[int, ...]) -> list[Loaded]:
    stages = len(bounds) - 1
    return [
        load_quietly(
            small_spec(first_layer=a, end_layer=b, stage=i, num_stages=stages, native_mtp=False)
        )
        for i, (a, b) in enumerate(itertools.pairwise(bounds))
    ]


def readers_of(count: int, **changes: Any) -> list[Reader]:
    return [
        Reader(
            request(prompt(i, (0, 9, 40)[i % 3]), 0, 9 + 4 * i, ignore_end=True, **changes),
            begins=2 * i,
        )
        for i in range(count)
    ]


def few_tokens(count: int) -> list[Reader]:
    """Requests that come at once and take a few turns."""
    return [Reader(request(prompt(i), 0, 6, ignore_end=True)) for i in range(count)]


def batches(reader: Reader) -> set[int]:
    return {r.forward.batch for r in reader.rounds}


@pytest.mark.smoke
@pytest.mark.parametrize("bounds", [(0, 2, LAYERS), (0, 1, 3, LAYERS)])
def test_answers_that_travel_together_are_those_that_they_are_alone(bounds: Sequence[int]) -> None:
    """They join, end, stall and are cancelled; groups are as many as stages."""
    split, readers = Split(bounds), readers_of(6)
    readers[1].asked = replace(readers[1].asked, sampling=SEEDED)
    readers[2].stalls = range(24, 40)
    readers[4].ends = 30
    together(split.engine, readers)
    for reader in readers:
        wanted = alone(reader.asked).ids
        assert reader.fault is None
        assert tuple(reader.ids) == wanted[: len(reader.ids) if reader is readers[4] else None]
        assert max(batches(reader)) == -(-6 // (len(bounds) - 1))
    done = readers[0].done
    assert done is not None and done.batch_identity == "bitwise"
    assert done.stats.batching_reason == "" and done.stats.batched_tokens
    assert split.engine.live_requests == 0 and split.cache_bytes == 0


@pytest.mark.smoke
def test_whoever_is_cancelled_as_a_group_sets_out_the_others_end() -> None:
    """One of them computes the group's rows, and the others wait for it."""
    for turn in (9, 10, 11):
        split, readers = Split((0, 2, LAYERS)), few_tokens(4)
        readers[0].ends = turn
        together(split.engine, readers)
        assert 0 < len(readers[0].ids) < 6
        assert [len(reader.ids) for reader in readers[1:]] == [6] * 3
        assert split.engine.live_requests == 0 and split.cache_bytes == 0


def test_fewer_than_two_for_each_stage_are_not_merged() -> None:
    split, readers = Split((0, 2, LAYERS)), readers_of(2)
    together(split.engine, readers)
    assert [batches(reader) for reader in readers] == [{1}, {1}]
    assert split.link.sent == 0


def test_a_group_is_formed_anew_only_where_others_than_before_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    formed = list[int]()
    form = StageWorker.forward_all
    split, readers = Split((0, 2, LAYERS)), readers_of(4)
    merged = split.workers[0]._merged  # pyright: ignore[reportPrivateUsage]

    def counted(self: StageWorker, blocks: Sequence[HiddenBlock]) -> Any:
        out = form(self, blocks)
        formed.append(id(merged._groups[-1].caches))  # pyright: ignore[reportPrivateUsage]
        return out

    monkeypatch.setattr(StageWorker, "forward_all", counted)
    for reader in readers:
        reader.asked = replace(reader.asked, max_tokens=40)
        reader.begins = 0
    together(split.engine, readers)
    assert len(formed) > 60
    assert len(set(formed)) < 8


def follow(split: Split, readers: Sequence[Reader], **changes: Any) -> None:
    """The next attempts, as the entry node makes them of what it was told, give the rest."""
    after = [
        Reader(replace(r.asked, attempt=2, replay=tuple(r.rounds), **changes)) for r in readers
    ]
    together(split.engine, after)
    for before, reader in zip(readers, after, strict=True):
        assert reader.fault is None and reader.done is not None
        assert tuple(before.ids + reader.ids) == alone(before.asked).ids
    assert split.cache_bytes == 0


@pytest.mark.parametrize("replaced", [False, True])
def test_a_loss_on_the_way_back_costs_no_answer(replaced: bool) -> None:
    """Every stage is a row ahead of what was handed out."""
    split, readers = Split((0, 2, LAYERS)), few_tokens(4)
    split.link.lost_at = 5
    together(split.engine, readers)
    lost = [reader for reader in readers if reader.fault is not None]
    assert len(lost) == 2 and all(isinstance(reader.fault, PeerLost) for reader in lost)
    assert max(len(reader.ids) for reader in lost) > 2
    if replaced:
        split.replace(0)
    follow(split, lost)


@pytest.mark.smoke
@pytest.mark.parametrize("fault", [RuntimeError("[malloc] out of memory"), ValueError("shapes")])
@pytest.mark.parametrize("first", [0, 2])
def test_a_fault_of_a_merged_forward_ends_no_answer(
    first: int, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, readers, count = Split((0, 2, LAYERS)), readers_of(4), itertools.count()
    hidden = StageModel.hidden

    def failing(model: StageModel, tokens: mx.array, *rest: Any) -> mx.array:
        if tokens.shape[0] > 1 and model.first == first and next(count) == 9:
            raise fault
        return hidden(model, tokens, *rest)

    monkeypatch.setattr(StageModel, "hidden", failing)
    together(split.engine, readers)
    lost = [reader for reader in readers if reader.fault is not None]
    assert len(lost) == 2 and all(isinstance(reader.fault, StateLost) for reader in lost)
    follow(split, lost, alone=True)


@pytest.mark.smoke
def test_nobody_goes_on_with_rows_of_a_forward_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _loaded((0, 2, LAYERS))[0].model
    states = [RequestState(model.make_caches()) for _ in range(3)]
    for state in states:
        mx.eval(model.hidden(mx.array([[5, 6, 7]]), None, state.caches))
        state.wrote((3,))
    merged = Merged(model, mx.float32)
    _ = merged.rows(states[:2], [8, 9], None)

    def failing(*_: object) -> mx.array:
        raise RuntimeError("[malloc] out of memory")

    monkeypatch.setattr(StageModel, "hidden", failing)
    with pytest.raises(StateLost):
        _ = merged.rows(states[:2], [8, 9], None)
    for use in (states[0].alone, states[0].view, lambda: merged.rows(states[1:], [1, 2], None)):
        with pytest.raises(StateLost, match="shared failed"):
            _ = use()
    assert [state.position for state in states] == [4, 4, 3]
    for state in states:
        merged.drop(state)
    assert not merged.arrays()


@pytest.mark.parametrize("first", [0, pytest.param(2, marks=pytest.mark.smoke)])
def test_numbers_that_are_none_end_their_own_answer_only(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, readers, count = Split((0, 2, LAYERS)), readers_of(4), itertools.count()
    hidden = StageModel.hidden

    def broken(model: StageModel, tokens: mx.array, *rest: Any) -> mx.array:
        out = hidden(model, tokens, *rest)
        if tokens.shape[0] > 1 and model.first == first and next(count) == 9:
            out = mx.concatenate([out[:1] * float("nan"), out[1:]])
        return out

    monkeypatch.setattr(StageModel, "hidden", broken)
    together(split.engine, readers)
    faults = [reader.fault for reader in readers if reader.fault is not None]
    assert len(faults) == 1 and isinstance(faults[0], NumericError)
    assert str(faults[0]).startswith(f"stage {int(first > 0)} (")
    for reader in readers:
        if reader.fault is None:
            assert tuple(reader.ids) == alone(reader.asked).ids
    assert split.cache_bytes == 0


@pytest.mark.parametrize(
    "bounds", [(0, 2, LAYERS), pytest.param((0, 1, 3, LAYERS), marks=pytest.mark.smoke)]
)
def test_what_a_stage_computes_otherwise_together_is_said(
    bounds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the stages behind it do not."""
    stages = len(bounds) - 1
    split, readers = Split(bounds), few_tokens(2 * stages)
    split.workers[0].probe()
    merged = split.workers[0]._merged  # pyright: ignore[reportPrivateUsage]
    assert merged.same and not merged.refused and not merged.arrays()
    hidden = StageModel.hidden

    def by_batch(model: StageModel, tokens: mx.array, *rest: Any) -> mx.array:
        differs = model.first == bounds[1] and tokens.shape[0] > 1
        return hidden(model, tokens, *rest) * (1 + 1e-6 * differs)

    monkeypatch.setattr(StageModel, "hidden", by_batch)
    split.workers[0].probe()
    assert not merged.same
    together(split.engine, readers)
    assert [r.done.batch_identity for r in readers if r.done] == ["near_tie"] * len(readers)


@pytest.mark.parametrize("changes", [{"batching": False}, {"fixed_rows": 4}])
def test_what_is_turned_off_is_not_merged(changes: dict[str, Any]) -> None:
    split, readers = Split((0, 2, LAYERS), **changes), readers_of(4)
    together(split.engine, readers)
    assert split.link.sent == 0
    assert all(reader.done and reader.done.stats.batching_reason for reader in readers)


def test_layers_that_compute_no_batch_are_passed_one_request_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split, readers = Split((0, 2, LAYERS)), readers_of(4)

    def refused(model: StageModel, tokens: mx.array, *rest: Any) -> mx.array:
        if tokens.shape[0] > 1:
            raise TypeError("offset must be an int")
        return hidden(model, tokens, *rest)

    hidden = StageModel.hidden
    with monkeypatch.context() as patched:
        patched.setattr(StageModel, "hidden", refused)
        split.workers[0].probe()
    together(split.engine, readers)
    assert max(batches(readers[0])) == 2  # on the generator's stage
    assert [tuple(r.ids) for r in readers] == [alone(r.asked).ids for r in readers]


def block(name: str, rows: int = 1, size: int = 4) -> HiddenBlock:
    return HiddenBlock(name, 1, 5, rows, (7,) * rows, pb.REPLY_ALL, bytes(4 * size * rows))


def frames(blocks: Sequence[HiddenBlock]) -> list[str | None]:
    return [each.WhichOneof("kind") for each in cut_all(blocks, "p", 1, "float32", 4)]


def test_rows_of_several_requests_travel_in_one_frame_and_other_blocks_by_themselves() -> None:
    assert frames([block("a"), block("b"), block("c", rows=2)]) == ["together", "hidden"]
    assert frames([block("a"), block("a")]) == ["hidden", "hidden"]
    assert frames([block("a")]) == ["hidden"]
    assert frames([block(f"r{i}") for i in range(17)]) == ["hidden"] * 17


REFUSED: list[tuple[str, Callable[[pb.Together], None]]] = [
    ("2 to 16", lambda t: t.ClearField("frames")),
    ("2 to 16", lambda t: t.frames.extend(list(t.frames) * 10)),
    ("different requests", lambda t: t.frames[1].MergeFrom(pb.Frame(request="a"))),
    ("one row each", lambda t: t.frames[1].MergeFrom(pb.Frame(release=pb.Release()))),
    ("one row each", lambda t: t.frames[1].MergeFrom(pb.Frame(hidden=pb.Hidden(rows=2)))),
]


@pytest.mark.parametrize(("why", "change"), REFUSED)
def test_frames_that_do_not_belong_together_are_refused(
    why: str, change: Callable[[pb.Together], None]
) -> None:
    (frame,) = cut_all([block("a"), block("b")], "p", 1, "float32", 4)
    assert len(parts_of(frame.together)) == 2
    change(frame.together)
    with pytest.raises(InvalidFrame, match=why):
        _ = parts_of(frame.together)
