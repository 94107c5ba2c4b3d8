"""Whether a verify computes what single steps do, and the part of a model that differs first."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import mlx.core as mx
import pytest
from chips import M3_MAX, on_chip
from clocks import Clock
from mlx import nn
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import KVCache
from shims import at_rows, by_rows, perturb
from tiny import VOCABULARY, taped_qwen
from zoo import tiny_config
from zoo_runs import small

from exo_node.mtp.caches.rollback import TapedCache, with_tapes
from exo_node.mtp.families.qwen35 import Qwen35Family
from exo_node.mtp.part_probe import differing_part
from exo_node.mtp.pieces import result_of
from exo_node.mtp.probe import (
    LONGEST_PROBED,
    PROMPT_ROWS,
    Subject,
    exact_depth,
)
from exo_node.mtp.seams import ForwardOutput, Want
from exo_node.mtp.targets import FamilyTarget, WholeTarget
from exo_node.shard.engine.answers.draft_profile import DraftProfile
from exo_node.shard.engine.answers.probing import probe_costs
from exo_node.shard.engine.answers.text_engine import NO_PROFILE
from exo_node.shard.kernels import row_sets
from exo_node.shard.kernels.row_groups import group_rows
from exo_node.shard.model.stage_model import StageModel

Change = Callable[[ForwardOutput, mx.array, Sequence[Any]], ForwardOutput]
"""Changes the output of a forward, given its ids and caches."""


class ChangedTarget(FamilyTarget):
    """A target whose forwards of one request are changed after the computation."""

    def __init__(self, model: qwen3_5.Model, change: Change | None) -> None:
        super().__init__(Qwen35Family(model))
        self._change = change

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[Any],
        *,
        want: Want,
        embeddings: mx.array | None = None,
    ) -> ForwardOutput:
        block = super().forward(tokens, caches, want=want, embeddings=embeddings)
        return block if self._change is None else self._change(block, tokens, caches)


def subject_of(
    model: qwen3_5.Model, change: Change | None = None, context: int = LONGEST_PROBED
) -> Subject:
    def make_caches() -> list[Any]:
        return with_tapes(model.make_cache())

    return Subject(ChangedTarget(model, change), make_caches, VOCABULARY, context, lambda: 0.0)


def probe(model: qwen3_5.Model, k: int, change: Change | None = None) -> int:
    return result_of(exact_depth(subject_of(model, change), k))


@pytest.mark.parametrize(
    ("model_kind", "k"),
    [
        ({"dtype": "float32"}, 1),
        ({"dtype": "float32"}, 2),
        *((kind, 3) for kind in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "bits": 4})),
        ({"moe": True}, 3),
        ({"dtype": "float32"}, 7),
    ],
    ids=str,
)
def test_the_cpu_is_bitwise(model_kind: dict[str, Any], k: int) -> None:
    assert probe(taped_qwen(**model_kind), k) == k


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("only", ["", "v_proj", "in_proj_qkv", "lm_head", "layers.0.mlp"])
def test_numbers_that_depend_on_the_row_count_are_exact_at_no_depth(k: int, only: str) -> None:
    model = taped_qwen()
    assert perturb(model, by_rows, only=only)
    assert probe(model, k) == 0


@pytest.mark.parametrize(
    ("behind", "context_length", "depth"),
    [
        (1000, 8192, 0),
        (4000, 8192, 0),
        (5000, 8192, 2),
        (4000, 4096, 2),
        (1000, 1024, 2),
        (20, 64, 0),
    ],
)
def test_long_contexts_are_measured_as_far_as_the_placement_has_them(
    behind: int, context_length: int, depth: int
) -> None:
    """Attention on GPUs changes its kernels with the length of the context."""

    def change(block: ForwardOutput, tokens: mx.array, caches: Sequence[Any]) -> ForwardOutput:
        rows = tokens.shape[0]
        position = max(cache.offset for cache in caches if isinstance(cache, KVCache)) - rows
        if position < behind or rows == 1:
            return block
        return ForwardOutput(block.logits * 1.01, block.hidden)

    subject = subject_of(taped_qwen(), change, context_length)
    assert result_of(exact_depth(subject, 2)) == depth


def test_a_kernel_that_is_chosen_by_the_size_of_a_buffer_is_noticed() -> None:
    """MLX on CUDA takes cuDNN where the keys lie in a buffer of a multiple of 256 rows."""

    def change(block: ForwardOutput, tokens: mx.array, caches: Sequence[Any]) -> ForwardOutput:
        del tokens
        long_caches = [c for c in caches if isinstance(c, KVCache) and c.offset >= 256]
        if any(c.keys is not None and c.keys.shape[2] % 256 == 0 for c in long_caches):
            return ForwardOutput(block.logits * 1.01, block.hidden)
        return block

    assert probe(taped_qwen(), 2, change) == 0


@pytest.mark.parametrize("width", [2, 3, 4, 6])
def test_the_depth_ends_before_the_first_number_of_rows_that_differs(width: int) -> None:
    """One kernel for two rows and another for four would pass a probe of four rows alone."""
    model = taped_qwen()
    _ = perturb(model, at_rows([width]))
    assert probe(model, 5) == width - 2
    assert probe(model, width - 2) == width - 2


@pytest.mark.parametrize("width", [2, 4, 5])
def test_every_number_of_rows_is_measured_after_a_long_context(width: int) -> None:
    def change(block: ForwardOutput, tokens: mx.array, caches: Sequence[Any]) -> ForwardOutput:
        is_long = any(isinstance(c, KVCache) and c.offset > 4000 for c in caches)
        scale = 1.01 if is_long and tokens.size == width else 1.0
        return block._replace(logits=block.logits * scale)

    assert probe(taped_qwen(), 5, change) == width - 2


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", [KVCache, TapedCache])
def test_a_block_that_only_writes_other_rows_into_a_cache_is_noticed(kind: type, k: int) -> None:

    def change(block: ForwardOutput, tokens: mx.array, caches: Sequence[Any]) -> ForwardOutput:
        if 1 < tokens.shape[0] < PROMPT_ROWS:
            for cache in caches:
                if isinstance(cache, kind):
                    nudge(cache)
        return block

    assert probe(taped_qwen(), k, change) == 0


def nudge(cache: KVCache | TapedCache) -> None:
    """Simulates that a block's rows are computed by another kernel than single ones."""
    if isinstance(cache, KVCache):
        assert cache.values is not None
        cache.values = cache.values * 1.001
        return
    restore = cache.rollback

    def rollback(rows: int) -> None:
        restore(rows)
        cache[1] = cache[1] * 1.001

    cache.rollback = rollback


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


def test_of_many_depths_some_are_probed_and_the_others_lie_between() -> None:
    """A machine whose rows take one second each, and a draft half of one."""
    clock, rows, asked = Clock(), set[int](), set[int]()

    def timed(block: ForwardOutput, tokens: mx.array, _: Sequence[Any]) -> ForwardOutput:
        if tokens.shape[0] < PROMPT_ROWS:
            rows.add(tokens.shape[0])
        clock.now += tokens.shape[0]
        return block

    def draft(_: mx.array, token: mx.array, depth: int) -> mx.array:
        asked.add(depth)
        clock.now += 0.5 * depth
        return token

    made = subject_of(taped_qwen(), timed)
    subject = replace(made, clock=clock, make_drafter=lambda: draft)
    profile = DraftProfile.open("", NO_PROFILE, clock)
    result_of(probe_costs(subject, 7, profile))
    assert profile.costs.probed == (1.0, 2.5, 4.0, 5.5, 7.0, 8.5, 10.0, 11.5)
    assert (rows, asked) == ({1, 2, 3, 5, 8}, {1, 2, 4, 7})
