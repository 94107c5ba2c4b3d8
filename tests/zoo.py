"""A tiny config.json for every model class of mlx-lm, made from what its arguments are called.

A name means the same in nearly all classes; where it does not, or where a class wants more, its
line in `_OWN` says so.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, Final

import mlx_lm.models

LAYERS: Final = 6
WINDOW: Final = 8
VOCABULARY: Final = 128

_HELPERS: Final = frozenset(
    (
        "activations",
        "base",
        "bitlinear_layers",
        "cache",
        "gated_delta",
        "mla",
        "pipeline",
        "rope_utils",
        "ssm",
        "switch_layers",
    )
)

_HIDDEN, _HEADS, _HEAD_DIM = 128, 4, 32


def _each(value: object, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


_USUAL: Final[Mapping[str, Any]] = {
    **_each(_HIDDEN, "hidden_size n_embd d_model model_dim hidden_dim"),
    **_each(_HIDDEN, "block_dim dim_model_base"),
    **_each(VOCABULARY, "vocab_size num_vocab vocab_size_per_layer_input"),
    **_each(LAYERS, "num_hidden_layers n_layer n_layers num_layers num_transformer_layers"),
    **_each(
        2 * _HIDDEN,
        "intermediate_size n_inner ffn_hidden_size intermediate_size_mlp "
        "shared_intermediate_size ff_intermediate_size dense_intermediate_size",
    ),
    **_each(
        _HIDDEN // 2,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
        "moe_shared_expert_intermediate_size share_expert_dim moe_hidden_size",
    ),
    **_each(_HEADS, "num_attention_heads n_head n_heads num_heads"),
    **_each(_HEADS, "swa_num_attention_heads index_n_heads"),
    **_each(2, "num_key_value_heads n_kv_heads num_kv_heads"),
    **_each(2, "swa_num_key_value_heads num_attention_groups"),
    **_each(_HEAD_DIM, "head_dim swa_head_dim swa_v_head_dim global_head_dim"),
    **_each(_HEAD_DIM, "v_head_dim qk_nope_head_dim qk_rope_head_dim"),
    **_each(_HEAD_DIM, "kv_channels hidden_size_per_head query_pre_attn_scalar"),
    **_each(_HEAD_DIM, "linear_key_head_dim linear_value_head_dim"),
    **_each(_HEADS, "linear_num_key_heads linear_num_value_heads"),
    **_each(64, "q_lora_rank kv_lora_rank o_lora_rank"),
    **_each(2 * _HEAD_DIM, "index_head_dim"),
    "index_topk": 512,
    "rotary_dim": _HEAD_DIM,
    **_each(4, "num_experts n_routed_experts num_local_experts"),
    "moe_num_experts": 4,
    **_each(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    **_each(1, "n_shared_experts num_shared_experts num_shared_expert"),
    **_each(1, "moe_num_shared_experts zero_expert_num moe_top_k"),
    **_each(1, "n_group topk_group first_k_dense_replace"),
    **_each(1, "num_dense_layers decoder_sparse_step moe_layer_freq"),
    **_each(WINDOW, "sliding_window sliding_window_size attention_window_size window_size"),
    "sliding_window_pattern": 3,
    "layer_group_size": 3,
    "full_attention_interval": 3,
    **_each(4, "linear_conv_kernel_dim conv_kernel mamba_d_conv conv1d_width"),
    **_each(3, "conv_L_cache"),
    "group_norm_size": 4,
    **_each(32, "state_size ssm_state_size mamba_d_state"),
    **_each(8, "mamba_num_heads mamba_n_heads"),
    **_each(_HEAD_DIM, "mamba_head_dim mamba_d_head"),
    **_each(2, "mamba_n_groups n_groups"),
    "mamba_d_ssm": 2 * _HIDDEN,
    **_each(32, "a_low_rank_dim v_low_rank_dim gate_low_rank_dim"),
    "decay_low_rank_dim": 32,
    "time_step_rank": 8,
    "time_step_limit": [0.0, 1e9],
    **_each(
        1e-5,
        "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon "
        "layernorm_epsilon post_norm_eps",
    ),
    **_each(10000.0, "rope_theta swa_rope_theta rope_local_base_freq"),
    "rope_scaling": None,
    "rotary_emb_base": 10000,
    **_each(0.5, "partial_rotary_factor rotary_pct"),
    **_each(4096, "max_position_embeddings n_positions n_ctx block_size model_max_length"),
    **_each(
        False,
        "attention_bias use_bias mlp_bias use_qkv_bias mamba_proj_bias conv_bias "
        "attention_out_bias use_cla use_mixed_mlp_moe use_conv_bias qk_layernorm "
        "add_swa_attention_sink_bias add_full_attention_sink_bias mla_scale_q_lora "
        "mla_scale_kv_lora linear_allow_neg_eigval block_auto_adjust_ff_dim",
    ),
    **_each(True, "norm_topk_prob use_qk_norm qk_norm post_norm use_expert_bias"),
    "mamba_conv_bias": True,
    "tie_word_embeddings": False,
    "mlp_only_layers": [],
    **_each(1.0, "logits_scaling residual_multiplier embedding_multiplier"),
    **_each(1.0, "routed_scaling_factor attention_multiplier"),
    "scoring_func": "sigmoid",
    "score_function": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "relu2",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}

_SLIDING = (["sliding_attention"] * 2 + ["full_attention"]) * 2
_LINEAR = (["linear_attention"] * 2 + ["full_attention"]) * 2
_TWO_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
_KDA = {
    "kda_layers": [1, 2, 4, 5],
    "full_attn_layers": [3, 6],
    "num_heads": _HEADS,
    "head_dim": _HEAD_DIM,
    "short_conv_kernel_size": 4,
}

_LONGCAT = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"}

_OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": _SLIDING},
    "baichuan_m1": {"sliding_window_layers": [1, 2, 4, 5], "conv_window": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
        },
        "topk_method": "gready",
    },
    "exaone4": {"sliding_window_pattern": "LLG"},
    "exaone_moe": {"layer_types": _SLIDING, "is_moe_layer": [False] + [True] * 5},
    "gear": {"layer_types": _SLIDING},
    "gemma3": {"text_config": "gemma3_text"},
    "gemma3n": {
        "text_config": {
            "model_type": "gemma3n_text",
            "layer_types": _SLIDING,
            "intermediate_size": [256] * LAYERS,
            "activation_sparsity_pattern": [0.0] * LAYERS,
            "num_kv_shared_layers": 2,
            "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 32,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 16,
        }
    },
    "gemma4": {"text_config": "gemma4_text"},
    "gemma4_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": None,
        "layer_types": _SLIDING,
    },
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention"] * 2},
    "hunyuan": {
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 3,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 2,
    },
    "falcon_h1": {"mamba_expand": 2},
    "kimi_k25": {"text_config": "deepseek_v3"},
    "kimi_vl": {"text_config": "deepseek_v3"},
    "kimi_linear": {"linear_attn_config": _KDA},
    "kimi_k3": {"text_config": {"linear_attn_config": _KDA, "hidden_act": "situ"}},
    "laguna": {"layer_types": _SLIDING, "rope_parameters": _TWO_ROPES},
    "lfm2": {"full_attn_idxs": [2, 5], "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0},
    "lfm2-vl": {"text_config": "lfm2"},
    "lfm2_moe": {"full_attn_idxs": [2, 5]},
    "llama4": {
        "text_config": {
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 1,
            "model_type": "llama4_text",
        }
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0, 1, 1]},
    "longcat_flash": {**_LONGCAT, "attention_method": "MLA"},
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2},
    "mellum": {"layer_types": _SLIDING, "rope_parameters": _TWO_ROPES},
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 1, 0] * 2, "moe_layer_freq": [0] + [1] * 5},
    "minicpm": {"scale_depth": 1.4, "scale_emb": 1.0},
    "minicpm3": {
        "scale_depth": 1.4,
        "scale_emb": 1.0,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * (_HEAD_DIM // 2),
            "short_factor": [1.0] * (_HEAD_DIM // 2),
            "original_max_position_embeddings": 4096,
        },
    },
    "minimax_m3_vl": {"text_config": {"moe_layer_freq": [0] + [1] * 5}},
    "ministral3": {
        "layer_types": _SLIDING,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 4096,
        },
    },
    "mistral3": {"text_config": "llama"},
    "pixtral": {"text_config": "llama"},
    "mistral4": {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 4096,
        },
    },
    "muse_glimmer": {"layer_types": _SLIDING, "rope_parameters": None},
    "muse_spark": {
        "text_config": {
            "layer_types": _SLIDING,
            "mlp_layer_types": ["sparse"] * LAYERS,
            "num_shared_experts": 0,
            "layer_rope_theta": [10000.0] * LAYERS,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 1.0,
        }
    },
    "nanochat": {"num_key_value_heads": _HEADS},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False},
            }
        ]
        * LAYERS,
        "hidden_act": "silu",
    },
    "nemotron_h": {"hybrid_override_pattern": "MM*-M*", "mamba_hidden_act": "silu"},
    "olmo3": {"layer_types": _SLIDING},
    "olmo_hybrid": {"layer_types": _LINEAR, "rope_parameters": None},
    "openelm": {
        "ffn_dim_divisor": 32,
        "num_query_heads": [4, 4, 4, 8, 8, 8],
        "num_kv_heads": [2, 2, 2, 4, 4, 4],
        "ffn_multipliers": [1.0, 1.0, 2.0, 2.0, 2.0, 2.0],
        "max_context_length": 4096,
    },
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0},
    "phimoe": {
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * (_HEAD_DIM // 2),
            "short_factor": [1.0] * (_HEAD_DIM // 2),
            "long_mscale": 1.0,
            "short_mscale": 1.0,
            "original_max_position_embeddings": 4096,
        }
    },
    "phixtral": {"n_positions": 4096},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"mamba_step": 2},
    "prism_hadamard_qwen35": {
        "text_config": {},
        "schema_version": 2,
        "tensor_namespace": "mlx-vlm-qwen3_5",
    },
    "qwen2_vl": {"text_config": "qwen2"},
    "qwen3_5": {"text_config": {}},
    "qwen3_5_moe": {"text_config": {}},
    "qwen3_vl": {"text_config": "qwen3"},
    "qwen3_vl_moe": {"text_config": "qwen3_moe"},
    "recurrent_gemma": {
        "block_types": ["recurrent", "recurrent", "attention"],
        "logits_soft_cap": 30.0,
    },
    "smollm3": {"no_rope_layer_interval": 3},
    "spark2_5": {"hidden_act": "gelu", "layer_types": _SLIDING, "rope_parameters": _TWO_ROPES},
    "step3p5": {"layer_types": _SLIDING, "moe_layers_enum": "1,2,3,4,5"},
    "deepseek_v41": {
        "compress_ratios": [0] * LAYERS,
        "kv_source_layer_ids": list(range(LAYERS)),
        "index_source_layer_ids": list(range(LAYERS)),
        "o_groups": 2,
        "hc_mult": 2,
    },
}
_MORE: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "gemma4 with shared keys": ("gemma4_text", {"num_kv_shared_layers": 3}),
    "gemma4 with inputs for each layer": ("gemma4_text", {"hidden_size_per_layer_input": 32}),
    "hunyuan with shared keys": ("hunyuan", {"use_cla": True}),
    "nanbeige in loops": ("nanbeige", {"num_loops": 2}),
    "llama with windows": ("llama", {"sliding_window": WINDOW, "layer_types": _SLIDING}),
    "qwen3_5 with experts": ("qwen3_5_moe", {}),
}
"""Other structures of a class: its name, and what is different."""


def classes() -> list[str]:
    """mlx-lm's model classes by module, and other structures of some."""
    names = sorted(each.name for each in pkgutil.iter_modules(mlx_lm.models.__path__))
    return [name for name in names if name not in _HELPERS] + sorted(_MORE)


def tiny_config(name: str) -> dict[str, Any]:
    """Raises what importing the class raises."""
    same: Mapping[str, Any] = {}
    kind, changes = _MORE.get(name, (name, same))
    own = dict(_OWN.get(kind, {}))
    text = own.pop("text_config", None)
    config = {**_named(kind, "ModelArgs"), **own, **changes, "model_type": kind}
    if isinstance(text, str):
        config["text_config"] = tiny_config(text)
    elif text is not None:
        args = next((n for n in ("TextArgs", "TextConfig", "TextModelArgs") if _has(kind, n)), None)
        source = (kind, args) if args else ("qwen3_5", "TextModelArgs")
        config["text_config"] = {**_named(*source), "model_type": kind, **text}
    return config


def _named(kind: str, arguments: str) -> dict[str, Any]:
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    fields = dataclasses.fields(getattr(module, arguments))
    names = [each.name for each in fields if each.name != "model_type"]
    return {name: _USUAL[name] for name in names if name in _USUAL}


def _has(kind: str, arguments: str) -> bool:
    return hasattr(importlib.import_module(f"mlx_lm.models.{kind}"), arguments)
