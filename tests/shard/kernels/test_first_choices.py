"""Kernels that are compiled while a model loads are those that answers use."""

import mlx.core as mx
import pytest

from exo_node.mtp.pieces import result_of
from exo_node.mtp.sampler import Sampler
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
