"""GGUF files of tiny models, written by the `gguf` package, with its own names of tensors."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from models import DEMO
from zoo import tiny_config

ARCHITECTURES: Final = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
VOCABULARY: Final = 4096
"""That of the demo, whose tokenizer the files have."""
_MERGED: Final = {
    "mixtral": {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
}


def tiny_model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A random model of a class, its numbers exact in bfloat16 and float16, and its config."""
    mx.random.seed(3)
    config = tiny_config(name) | {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    config |= {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
    if name == "qwen3_moe":
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if name == "gemma3_text":
        config |= {"query_pre_attn_scalar": config["head_dim"], "sliding_window_pattern": 6}
        config |= {"rope_local_base_freq": 10_000.0}
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(config))
    parameters: Any = tree_flatten(model.parameters())
    exact = [(path, mx.round(mx.random.normal(a.shape) * 32) / 256) for path, a in parameters]
    model.load_weights(exact)
    return model, config


def write_model(
    path: Path,
    name: str,
    model: nn.Module,
    config: Mapping[str, Any],
    *,
    kind: gguf.GGMLQuantizationType | None = None,
    values: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a model as llama.cpp's converter does; `kind`: of its matrices, but for routers."""
    architecture = ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, architecture)
    _add_values(writer, config)
    add_tokenizer(writer)
    for key, value in (values or {}).items():
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_string(
            key, value
        )
    arch = next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for own, array in tree_flatten(model.parameters()):
        gguf_name = names.get_name(_published(own, name), try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, own
        numbers = _as_stored(own, name, np.array(array, np.float32), config)
        if kind is None or numbers.ndim < 2 or "ffn_gate_inp" in gguf_name:
            writer.add_tensor(gguf_name, numbers)
        else:
            writer.add_tensor(gguf_name, gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The demo's tokenizer and a template."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    tokens: dict[str, int] = dict(tokenizer["model"]["vocab"])
    special = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    ordered = sorted({**tokens, **special}.items(), key=lambda item: item[1])
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([token for token, _ in ordered])
    writer.add_token_types([3 if token in special else 1 for token, _ in ordered])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(special["<|im_end|>"])
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}")


def _add_values(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(2048)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "sliding_window_pattern" in config:
        writer.add_sliding_window(config["sliding_window"])


def _published(own: str, name: str) -> str:
    """The publisher's name of a tensor, by which the package's table goes."""
    own = own.replace("switch_mlp", "experts")
    for part, published in _MERGED.get(name, {}).items():
        own = own.replace(f"experts.{part}", f"experts.{published}")
    return own


def _as_stored(
    own: str, name: str, array: "np.ndarray[Any, Any]", config: Mapping[str, Any]
) -> "np.ndarray[Any, Any]":
    """Rows of queries and keys in pairs (Llama), norms plus one (Gemma), gates without a row."""
    if name == "gemma3_text" and own.endswith("norm.weight"):
        return array + 1
    if own.endswith("shared_expert_gate.weight"):
        return array[0]
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    field = next((f for part, f in heads.items() if part in own), None)
    if ARCHITECTURES[name] != "llama" or field is None:
        return array
    half = array.shape[0] // config[field] // 2
    paired = np.empty_like(array)
    for head in range(config[field]):
        for place in range(half):
            start = head * 2 * half
            paired[start + 2 * place] = array[start + place]
            paired[start + 2 * place + 1] = array[start + half + place]
    return paired
