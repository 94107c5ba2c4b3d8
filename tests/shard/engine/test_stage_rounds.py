"""Answers that share rounds over stages are those of each alone, through losses too."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from engines import changed
from pipelines import THREE, TWO, Pipeline
from readers import Reader, prompt, together
from staged_readers import alone, asks, few_tokens, lost_of, readers_of, staged, tokens_of

from exo_node.mtp.types import Sampling
from exo_node.placement.errors import InvalidFrame, PeerLost, StateLost
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.pipeline.frames import HiddenBlock
from exo_node.shard.pipeline.link import Trip

SEEDED = Sampling(temperature=0.8, seed=4)


def batches(reader: Reader) -> set[int]:
    return {round_.forward.batch for round_ in reader.rounds}


@pytest.mark.parametrize("bounds", [TWO, THREE])
def test_answers_that_share_rounds_are_those_that_they_are_alone(bounds: Sequence[int]) -> None:
    """They join, end, stall and are cancelled; groups are as many as stages."""
    pipeline, readers = staged(bounds), readers_of(6)
    readers[1].request = replace(readers[1].request, sampling=SEEDED)
    readers[2].stalls = range(24, 40)
    readers[4].ends = 30
    together(pipeline.engine, readers)
    for reader in readers:
        expected = alone(reader.request)
        assert reader.fault is None
        assert tokens_of(reader) == expected[: len(reader.rounds) if reader is readers[4] else None]
    most = -(-6 // (len(bounds) - 1))
    assert max(pipeline.link.rounds) == max(itertools.chain(*map(batches, readers))) == most
    end = readers[0].end
    assert end is not None and end.batch_identity == "bitwise"
    assert end.stats.batching_reason == "" and end.stats.batched_tokens
    assert not pipeline.leftovers


def test_prompt_chunks_ask_for_no_answer_and_the_last_for_one_row() -> None:
    pipeline = staged(prefill_chunk=4)
    together(pipeline.engine, [Reader(asks(prompt(0, 13), 2))])
    replies = [block.reply for block in pipeline.link.sent]
    assert replies == [pb.REPLY_COMPUTED] * 3 + [pb.REPLY_LAST, pb.REPLY_ALL]


# ---------------------------------------------------------------------------- what is not the same


@pytest.mark.parametrize(
    ("bounds", "stage"),
    [(TWO, 0), (TWO, 1), pytest.param(THREE, 1, marks=pytest.mark.smoke)],
)
def test_what_a_stage_computes_otherwise_together_is_said(
    bounds: Sequence[int], stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the stages after it do not."""
    pipeline, readers = staged(bounds), few_tokens(2 * (len(bounds) - 1))
    pipeline.workers[0].begin_measuring().finish()
    rounds = pipeline.workers[0]._rounds  # pyright: ignore[reportPrivateUsage]
    assert rounds.is_same and not rounds.batching_reason and not rounds.groups.bytes
    hidden = StageModel.hidden

    def by_batch(model: StageModel, tokens: mx.array, *rest: Any, **named: Any) -> mx.array:
        differs = model.first == bounds[stage] and tokens.shape[0] > 1
        return hidden(model, tokens, *rest, **named) * (1 + 1e-6 * differs)

    monkeypatch.setattr(StageModel, "hidden", by_batch)
    pipeline.workers[0].begin_measuring().finish()
    pipeline.engine.measurements.measure()
    assert rounds.is_same == (stage == 0)
    together(pipeline.engine, readers)
    assert [r.end.batch_identity for r in readers if r.end] == ["near_tie"] * len(readers)


def test_what_is_turned_off_is_not_shared() -> None:
    pipeline, readers = staged(batching=False), readers_of(4)
    together(pipeline.engine, readers)
    assert set(pipeline.link.rounds) == {1}
    assert all(reader.end and reader.end.stats.batching_reason for reader in readers)


def follow(pipeline: Pipeline, readers: Sequence[Reader], **changes: Any) -> None:
    """The next attempts, as the entry node makes them of what it was told, give the rest."""
    after = [
        Reader(changed(r.request, attempt=2, replay=tuple(r.rounds), **changes)) for r in readers
    ]
    together(pipeline.engine, after)
    for before, reader in zip(readers, after, strict=True):
        assert reader.fault is None and reader.end is not None
        assert tokens_of(before, reader) == alone(before.request)
    assert not pipeline.leftovers


@pytest.mark.parametrize(
    ("first", "fault"),
    [(0, RuntimeError("[malloc] out of memory")), (2, ValueError("shapes"))],
)
def test_a_fault_of_a_shared_forward_ends_no_answer(
    first: int, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, readers, count = staged(), readers_of(4), itertools.count()
    hidden = StageModel.hidden

    def failing(model: StageModel, tokens: mx.array, *rest: Any, **named: Any) -> mx.array:
        if tokens.shape[0] > 1 and model.first == first and next(count) == 5:
            raise fault
        return hidden(model, tokens, *rest, **named)

    monkeypatch.setattr(StageModel, "hidden", failing)
    together(pipeline.engine, readers)
    lost = lost_of(readers)
    assert len(lost) == 2
    assert all(isinstance(r.fault, StateLost) and "shared" in str(r.fault) for r in lost)
    assert all(tokens_of(r) == alone(r.request) for r in readers if r not in lost)
    follow(pipeline, lost, alone=True)


@pytest.mark.parametrize(
    "loss", ["freed", "replaced", pytest.param("later attempt", marks=pytest.mark.smoke)]
)
def test_where_a_stage_refuses_one_the_others_of_the_forward_continue_by_another_attempt(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some stages have a row of theirs that others have not."""
    pipeline, readers, times = staged(THREE), few_tokens(6), itertools.count()
    worker, members = pipeline.workers[1], list[str]()
    send = pipeline.link.send

    def sending(block: HiddenBlock) -> Trip:
        if len(block.members) < 2 or next(times) != 3:
            return send(block)
        members.extend(member.request for member in block.members)
        if loss == "freed":
            sessions = worker._requests  # pyright: ignore[reportPrivateUsage]
            sessions[members[1]].used_at -= 100.0
            assert worker.expire(50.0) == members[1:]
        elif loss == "later attempt":
            worker.release((members[1], 1))
        else:
            pipeline.replace(2)
        return send(block)

    monkeypatch.setattr(pipeline.link, "send", sending)
    together(pipeline.engine, readers)
    lost = {reader.request.name: reader for reader in lost_of(readers)}
    faults = [type(lost[name].fault) for name in members]
    if loss == "replaced":
        assert faults == [PeerLost, StateLost] and len(lost) > 2
    else:
        own = InvalidFrame if loss == "later attempt" else PeerLost
        assert faults == [StateLost, own] and len(lost) == 2
    assert all(tokens_of(r) == alone(r.request) for r in readers if r.request.name not in lost)
    assert not pipeline.leftovers
    follow(pipeline, list(lost.values()))
