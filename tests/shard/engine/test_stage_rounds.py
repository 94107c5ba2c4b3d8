"""Answers that share rounds over stages are those of each alone."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from pipelines import THREE, TWO
from readers import Reader, prompt, together
from staged_readers import alone, asks, few_tokens, readers_of, staged, tokens_of

from exo_node.mtp.types import Sampling
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.states.groups import StageGroup
from exo_node.shard.model.stage_model import StageModel

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


def test_a_group_is_formed_anew_only_where_others_than_before_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = list[object]()
    change = StageGroup[Any].change

    def counted(self: StageGroup[Any], *args: Any) -> None:
        changes.append(args)
        change(self, *args)

    monkeypatch.setattr(StageGroup, "change", counted)
    pipeline = staged()
    readers = [Reader(asks(prompt(i), 40)) for i in range(4)]
    together(pipeline.engine, readers)
    assert len([size for size in pipeline.link.rounds if size == 2]) > 60
    assert 0 < len(changes) < 16, "of two groups on two stages"


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
