"""Losses of rounds that answers share over stages cost none of them a token."""

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from engines import changed
from pipelines import THREE, Pipeline
from readers import Reader, together
from staged_readers import alone, few_tokens, lost_of, readers_of, staged, tokens_of

from exo_node.placement.errors import InvalidFrame, NumericError, PeerLost, StateLost
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.pipeline.frames import HiddenBlock
from exo_node.shard.pipeline.link import Trip


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


@pytest.mark.parametrize("first", [0, pytest.param(2, marks=pytest.mark.smoke)])
def test_numbers_that_are_none_end_their_own_answer_only(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, readers, count = staged(), readers_of(4), itertools.count()
    hidden = StageModel.hidden

    def broken(model: StageModel, tokens: mx.array, *rest: Any, **named: Any) -> mx.array:
        out = hidden(model, tokens, *rest, **named)
        if tokens.shape[0] > 1 and model.first == first and next(count) == 5:
            out = mx.concatenate([out[:1] * float("nan"), out[1:]])
        return out

    monkeypatch.setattr(StageModel, "hidden", broken)
    pipeline.link.holds = True  # what this stage found is known before another one says the same
    together(pipeline.engine, readers, lambda _: pipeline.link.flush())
    pipeline.link.flush()
    (ended,) = lost_of(readers)
    assert isinstance(ended.fault, NumericError)
    assert str(ended.fault).startswith(f"stage {int(first > 0)} (")
    assert tokens_of(ended) == alone(ended.request)[: len(ended.rounds)]
    assert all(tokens_of(r) == alone(r.request) for r in readers if r is not ended)
    assert not pipeline.leftovers
