"""The bytes that a card counts for a token are those that mlx-lm's caches hold."""

# mlx and mlx_lm are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import importlib
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from exo_node.placement.card import derive_card
from exo_node.placement.ids import ModelId

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
    assert card.kv_bytes_per_token == rows
    assert card.kv_bytes_per_layer_token == numbers * 4
