"""The bytes of caches: what a card counts for a token, what is evaluated and measured here."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import models
from mlx_lm.models import cache as kinds
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.deepseek_v41 import LayerCache

from exo_node.mtp.caches.rollback import TapedCache, cache_arrays
from exo_node.mtp.targets import WholeTarget
from exo_node.mtp.types import Prefilled, Step
from exo_node.placement.ids import ModelId
from exo_node.placement.library import derive_card
from exo_node.shard.tools.bare_engine import bare_engine, bare_request

BASE: dict[str, Any] = {
    "dtype": "float32",
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,  # hidden_size / heads, which minicpm3 takes whatever config.json says
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
YARN = {"topk_method": "greedy", "rope_scaling": {"type": "yarn", "factor": 2}}
INDEXER = {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 8}
MINI = {"dim_model_base": 32, "scale_depth": 1.0, "scale_emb": 1.0, "rope_scaling": {"type": "su"}}
GLM = {"head_dim": 8, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("model_type", "fields", "numbers"),
    [
        ("glm4_moe", EXPERTS | GLM, 2 * 2 * 8),
        ("deepseek_v3", EXPERTS | LATENT, 16 + 4),
        ("deepseek_v3", EXPERTS | LATENT | {"head_dim": 4}, 16 + 4),
        ("deepseek_v32", EXPERTS | LATENT | INDEXER, 16 + 4 + 2 * 8),
        ("deepseek_v2", EXPERTS | LATENT | YARN, 4 * (16 + 8)),
        ("minicpm3", LATENT | MINI, 4 * (16 + 8)),
        ("youtu_llm", LATENT | {"head_dim": 4}, 4 * (16 + 8)),
    ],
)
def test_a_tokens_bytes_are_those_of_the_cache(
    model_type: str, fields: dict[str, Any], numbers: int
) -> None:
    config = BASE | fields | {"model_type": model_type}
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    model = module.Model(module.ModelArgs.from_dict(config))
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=caches))
    arrays = [value for _, value in tree_flatten([cache.state for cache in caches])]
    rows = sum(a.nbytes // a.shape[2] for a in arrays if isinstance(a, mx.array))
    card = derive_card(ModelId("m"), config, 10**6)
    assert card.num_attention_layers * card.kv_bytes_per_layer_token == rows
    assert card.kv_bytes_per_layer_token == numbers * 4


def _write(cache: Any) -> Any:
    keys, values = mx.ones((1, 2, 300, 64)), mx.ones((1, 2, 300, 64))
    _ = cache.update_and_fetch(keys, values)
    return cache


def _states(cache: Any) -> Any:
    cache[0], cache[1] = mx.ones((1, 3, 8)), mx.ones((1, 2, 4, 4))
    return cache


def _list() -> Any:
    inner = kinds.CacheList(_write(kinds.KVCache()), _states(kinds.ArraysCache(2)))
    return kinds.CacheList(inner, _write(kinds.RotatingKVCache(64)), kinds.KVCache())


def _layer() -> Any:
    cache = LayerCache(8)
    _ = cache.update_window(mx.ones((1, 20, 16)))
    cast("Any", cache).pending_kv = mx.ones((1, 2, 16))
    return cache


CACHES: dict[str, Callable[[], Any]] = {
    "KVCache": lambda: _write(kinds.KVCache()),
    "ConcatenateKVCache": lambda: _write(kinds.ConcatenateKVCache()),
    "RotatingKVCache": lambda: _write(kinds.RotatingKVCache(64, keep=4)),
    "ChunkedKVCache": lambda: _write(kinds.ChunkedKVCache(64)),
    "QuantizedKVCache": lambda: _write(kinds.QuantizedKVCache()),
    "ArraysCache": lambda: _states(kinds.ArraysCache(3)),
    "TapedCache": lambda: _states(TapedCache(2)),
    "CacheList": _list,
    "LayerCache": _layer,
}


@pytest.mark.parametrize("kind", CACHES)
def test_every_byte_of_a_cache_is_seen(kind: str) -> None:
    cache = CACHES[kind]()
    arrays = cache_arrays([cache, cache])
    assert sum(array.nbytes for array in arrays) == 2 * cache.nbytes > 0


def test_no_model_of_mlx_lm_makes_a_cache_of_another_kind() -> None:
    names: set[str] = set()
    for file in Path(next(iter(models.__path__))).glob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name == "make_cache":
                calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
                names |= {name.id for name in calls if isinstance(name, ast.Name)}
    cache_classes = {name for name in names if "Cache" in name}
    assert "CacheList" in cache_classes
    assert cache_classes - set(CACHES) == set()


def test_each_chunk_of_a_prompt_is_evaluated_before_the_next() -> None:
    """Also where a layer's caches lie in a list: deepseek_v32 and others."""
    config = BASE | EXPERTS | LATENT | INDEXER | {"model_type": "deepseek_v32"}
    module = importlib.import_module("mlx_lm.models.deepseek_v32")
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    caches, steps = make_prompt_cache(model), list[object]()
    before = mx.get_active_memory()

    def noted(step: Step) -> None:
        if isinstance(step, Prefilled) and 0 < step.rows < step.total:
            assert mx.get_active_memory() - before >= sum(cache.nbytes for cache in caches) > 0
            steps.append(step.rows)

    engine = bare_engine(WholeTarget(model), lambda: caches, chunk=16)
    engine.add(bare_request([1] * 80, 1, 16, deliver=noted, finish=steps.append))
    while engine.step():
        pass
    assert steps == [16, 32, 48, 64, "length"]
