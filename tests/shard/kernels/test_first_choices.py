"""Kernels that are compiled while a model loads are those that answers use."""

import mlx.core as mx
import pytest

from exo_node.mtp.pieces import result_of
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.types import Sampling
from exo_node.shard.kernels.first_choices import WAYS, choose_first


@pytest.mark.parametrize(("k", "compiles"), [(0, True), (1, True), (3, True), (3, False)])
def test_every_way_draws_a_token_drafts_and_a_verdict_where_that_is_compiled_at_first(
    monkeypatch: pytest.MonkeyPatch, k: int, compiles: bool
) -> None:
    monkeypatch.setattr("exo_node.shard.kernels.first_choices.available", lambda: compiles)
    judged, judge = list[tuple[int, ...]](), Sampler.judge

    def watch(self: Sampler, logits: mx.array, *rest: object) -> object:
        judged.append(logits.shape)
        return judge(self, logits, *rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Sampler, "judge", watch)
    result_of(choose_first(512, k, mx.bfloat16))
    assert judged == [(k + 1, 512)] * (compiles * len(WAYS))


def test_the_ways_cover_the_rules_and_the_filters() -> None:
    assert {way.rule_of(3) for way in WAYS} == {"greedy", "block", "coupled"}
    assert {way.rule_of(1) for way in WAYS} >= {"ratio"}
    for name in ("top_p", "top_k", "min_p"):
        values = {getattr(way, name) for way in WAYS if not way.greedy}
        assert len(values) > 1, f"{name} on and off"
    assert {way.presence_penalty > 0 for way in WAYS} == {True, False}
    assert any(way == Sampling(temperature=way.temperature) for way in WAYS if not way.greedy)
