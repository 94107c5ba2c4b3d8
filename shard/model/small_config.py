"""A config.json of the same class and structure as a real one, for a model of a few megabytes.

Sizes become small. The structure stays: kinds of layers, shared and routed experts, groups,
windows, latent attention, tied embeddings, scalings.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeGuard, cast

HIDDEN: Final = 128
HEADS: Final = 4
HEAD_DIM: Final = 32
"""MLX's kernels for recurrent layers want multiples of 32."""

_WINDOW: Final = 8  # shorter than the check's prompt, so that it slides

_LIMITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "model_dim", "block_dim", "conv_dim"), HIDDEN
    ),
    **dict.fromkeys(
        (
            "intermediate_size", "ffn_hidden_size", "n_inner", "intermediate_size_mlp",
            "shared_intermediate_size", "ffn_dim", "mlp_hidden_size", "block_ff_dim",
        ),
        2 * HIDDEN,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
            "moe_shared_expert_intermediate_size", "moe_latent_size",
        ),
        HIDDEN // 2,
    ),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "num_vocab"), 512),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim"), HEAD_DIM),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"), HEAD_DIM),
    "qk_head_dim": 2 * HEAD_DIM,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "hc_lowrank"), 64),
    **dict.fromkeys(("index_head_dim", "indexer_head_dim"), 2 * HEAD_DIM),
    **dict.fromkeys(("index_n_heads", "indexer_n_heads"), HEADS),
    "indexer_budget": _WINDOW,
    "ple_embed_dim": HIDDEN,
    **dict.fromkeys(("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by"), 64),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    **dict.fromkeys(
        ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8
    ),
    **dict.fromkeys(
        (
            "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k",
            "num_shared_experts", "n_shared_experts", "n_group", "num_expert_group",
        ),
        2,
    ),
    **dict.fromkeys(("topk_group", "limited_groups"), 1),
    **dict.fromkeys(
        (
            "sliding_window", "sliding_window_size", "attention_window_size", "window_size",
            "window_length", "attention_chunk_size",
        ),
        _WINDOW,
    ),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), HEAD_DIM),
    **dict.fromkeys(("mamba_d_ssm", "d_inner", "lru_width"), 2 * HIDDEN),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "ssm_n_groups"), 2),
    **dict.fromkeys(("ssm_state_size", "mamba_d_state", "state_size"), 32),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 64),
    "time_step_rank": HIDDEN // 16,
    "hidden_size_per_layer_input": 32,
}  # fmt: skip
"""Upper bounds of sizes. A smaller value stays, as it may be a switch (0 and 1 mean off)."""

_KEY_VALUE_HEADS: Final = (
    ("num_key_value_heads", "num_attention_heads"),
    ("n_kv_heads", "n_heads"),
    ("num_global_key_value_heads", "num_attention_heads"),
    ("linear_num_key_heads", "linear_num_value_heads"),
)


def small_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with small sizes, in its nested `text_config` too where it has one.

    Quantisation is left out: how weights are stored does not change how layers are put together.
    """
    text = config.get("text_config")
    small = _shrink(config)
    if isinstance(text, Mapping):
        small["text_config"] = _shrink(cast("Mapping[str, Any]", text))
    for name in ("quantization", "quantization_config"):
        _ = small.pop(name, None)
    return small


def _shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    small = {name: _size(name, value) for name, value in config.items()}
    _share_heads(config, small)
    scaling = config.get("rope_scaling")
    if isinstance(scaling, Mapping):
        small["rope_scaling"] = _cut_factors(cast("Mapping[str, Any]", scaling), config)
    if _is_count(config.get("rotary_dim")) and _is_count(config.get("head_dim")):
        small["rotary_dim"] = config["rotary_dim"] * HEAD_DIM // config["head_dim"]
    return small


def _size(name: str, value: object) -> Any:
    limit = _LIMITS.get(name)
    return min(value, limit) if limit is not None and _is_count(value) else value


def _share_heads(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Shrinks the heads. Key heads stay one, equal to the others in number, or fewer."""
    for keys, values in _KEY_VALUE_HEADS:
        of_keys, of_values = config.get(keys), config.get(values)
        if not _is_count(of_keys) or not _is_count(of_values) or of_values < HEADS:
            continue
        small[values] = HEADS
        small[keys] = HEADS if of_keys == of_values else min(of_keys, HEADS // 2)


def _cut_factors(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Cuts LongRoPE's factors to one for each pair of rotated dimensions."""
    share = config.get("partial_rotary_factor")
    pairs = int(HEAD_DIM * (share if isinstance(share, float) else 1)) // 2
    return {
        name: value[:pairs] if name in ("long_factor", "short_factor") else value
        for name, value in scaling.items()
    }


def _is_count(value: object) -> TypeGuard[int]:
    """Whether `value` is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
