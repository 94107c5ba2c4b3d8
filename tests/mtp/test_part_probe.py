"""The part of a model that differs in blocks is found, and none where all agree."""

from time import perf_counter
from typing import Any

import mlx.core as mx
import pytest
from chips import M3_MAX, on_chip
from mlx import nn
from shims import by_rows, perturb
from zoo import tiny_config
from zoo_runs import small

from exo_node.mtp.part_probe import differing_part
from exo_node.mtp.pieces import result_of
from exo_node.mtp.probe import Subject
from exo_node.mtp.targets import WholeTarget
from exo_node.shard.kernels import row_sets
from exo_node.shard.kernels.row_groups import group_rows
from exo_node.shard.model.stage_model import StageModel

ROWS = 3


def model_of(name: str) -> Any:
    return small({**tiny_config(name), "vocab_size": 160})


def found(model: Any, context_length: int = 100) -> tuple[str, int] | None:
    """The name of the part that differs, and the rows before the block."""
    stage = StageModel(model, 0, len(model.layers))
    modules = stage.own_modules(outer=True)
    calls = [(type(each), vars(type(each)).get("__call__")) for each in modules]
    subject = Subject(
        WholeTarget(model), stage.make_caches, 160, context_length, lambda: 0.0, None, modules
    )
    part = result_of(differing_part(subject, ROWS))
    assert calls == [(type(each), vars(type(each)).get("__call__")) for each in modules]
    if part is None:
        return None
    return {id(m): path for path, m in model.named_modules()}[id(part.module)], part.context


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "nemotron_h", "deepseek_v3"])
def test_none_is_found_where_all_agree(name: str) -> None:
    assert found(model_of(name)) is None


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("llama", "model.layers.1.mlp.down_proj"),
        ("llama", "model.layers.0.self_attn.k_proj"),
        ("llama", "lm_head"),
        ("qwen3_moe", "model.layers.1.mlp.gate"),
        ("nemotron_h", "backbone.layers.1.mixer.in_proj"),
    ],
)
def test_a_product_that_differs_is_found_among_all(name: str, path: str) -> None:
    model = model_of(name)
    paths = [each for each, _ in model.named_modules()]
    assert path in paths, paths
    assert perturb(model, by_rows, only=path) == 1
    assert found(model) == (path, 24)


def test_of_several_the_first_is_found() -> None:
    model = model_of("llama")
    _ = perturb(model, by_rows, only="layers.1")
    path = found(model)
    assert path is not None and path[0].startswith("model.layers.1.self_attn.")


def test_embeddings_are_found_where_they_are_the_lm_head() -> None:
    model: Any = small({**tiny_config("llama"), "vocab_size": 160, "tie_word_embeddings": True})

    class Differing(nn.Embedding):
        def as_linear(self, x: mx.array) -> mx.array:
            return super().as_linear(x) * (1 + 0.01 * x.shape[1])

    model.model.embed_tokens.__class__ = Differing
    assert found(model) == ("model.embed_tokens", 24)


def test_attention_that_differs_from_some_number_of_keys_on_is_found_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products agree, as they are in groups."""
    monkeypatch.setattr(row_sets, "VALUES", 64)
    model = model_of("llama")
    with on_chip(M3_MAX):
        stage = StageModel(model, 0, len(model.layers))
        _ = group_rows(stage.own_modules(outer=True), mx.float32, perf_counter)
        assert found(model, 1000) is None
        assert found(model, 2000) == ("model.layers.0.self_attn", 1100)
