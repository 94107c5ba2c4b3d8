"""A GGUF file's model in mlx-lm's words: its config.json, and a name for each tensor.

A value or a tensor without a place here is refused by name: it may change what is computed.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ....placement.errors import InvalidCheckpoint
from ...checkpoint.gguf_file import GgufFile, GgufTensor
from ...checkpoint.headers import quote

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_TYPES: Final = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
_KEYS: Final = frozenset(
    (
        "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
        "expert_count", "expert_used_count", "expert_feed_forward_length",
        "expert_shared_feed_forward_length", "attention.head_count", "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
        "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.finetuned",
    )
)  # fmt: skip
_GEMMA_KEYS: Final = _KEYS | {
    "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa",
}  # fmt: skip
_BLOCK: Final = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w{1,40})\.(weight|bias)")
_OUTER: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS: Final = {
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    **{f"ffn_{x}_exps": f"mlp.switch_mlp.{x}_proj" for x in ("gate", "up", "down")},
    **{f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GEMMA_PARTS: Final = _PARTS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE: Final = "rope_freqs.weight"
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT: Final = 8192
"""The same in all of Llama 3.1 to 3.3, https://huggingface.co/meta-llama; files do not say it."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """`names`: of each tensor that is written; `order`: of the rows of those that GGUF reorders."""

    config: dict[str, Any]
    names: dict[str, str]
    rows: dict[str, np.ndarray[Any, np.dtype[np.int64]]]

    @property
    def norms_plus_one(self) -> bool:
        """Whether the file's norms are added to one already, which mlx-lm's class does itself."""
        return self.config["model_type"] == "gemma3_text"

    def ordered(self, name: str, array: mx.array) -> mx.array:
        """The array with its rows in the order of the checkpoint."""
        order = self.rows.get(name)
        array = array if order is None else array[mx.array(order)]
        # GGUF drops the first dimension of a matrix with one row.
        return array[None] if name.endswith("ffn_gate_inp_shexp.weight") else array


def model_of(file: GgufFile) -> GgufModel:
    """The model of a file. Raises InvalidCheckpoint, which names what exo-node does not know."""
    values = _Values(file)
    kind = values.model_type
    parts = _GEMMA_PARTS if kind == "gemma3_text" else _PARTS
    names: dict[str, str] = {}
    for name in file.tensors:
        if name != _ROPE:
            names[name] = _name(file, name, parts, kind)
    rows: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
    config = values.config()
    if kind in ("llama", "mixtral"):
        for name in names:
            heads = {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}
            field = next((f for part, f in heads.items() if part in name), None)
            if field is not None:
                rows[name] = _row_order(file.tensors[name], config[field], file)
    return GgufModel(config, names, rows)


def _name(file: GgufFile, name: str, parts: dict[str, str], kind: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in parts:
        raise file.fault(f"is not known in a model of the class {kind}", name)
    part = parts[match[2]]
    if kind == "mixtral" and part.startswith("mlp."):
        part = f"block_sparse_moe.{part.removeprefix('mlp.')}"
    return f"model.layers.{match[1]}.{part}.{match[3]}"


def _row_order(
    tensor: GgufTensor, heads: int, file: GgufFile
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The file's rows in the order of safetensors: of each head the two halves, not pairs."""
    rows = tensor.shape[0]
    if not heads or rows % (2 * heads):
        raise file.fault(f"has {rows} rows for {heads} heads", tensor.name)
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


class _Values:
    """The values of one architecture, each checked as it is read."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._values = file.values
        name = self._values.get("general.architecture")
        self._prefix = f"{name}."
        self.model_type = _TYPES.get(str(name), str(name))
        if name == "llama" and self._values.get("llama.expert_count"):
            self.model_type = "mixtral"
        if self.model_type not in ARCHITECTURES or name == "mixtral":
            raise InvalidCheckpoint(
                f"{file.path.name} has the architecture {quote(name)}, which `exo-node models "
                f"import` does not read (it reads llama, mixtral, qwen2, qwen2moe, qwen3, qwen3moe "
                "and gemma3); `exo-node models pull OWNER/NAME` gets the model in safetensors",
                param="general.architecture",
            )
        keys = _GEMMA_KEYS if self.model_type == "gemma3_text" else _KEYS
        for key in self._values:
            if key.startswith(self._prefix) and key.removeprefix(self._prefix) not in keys:
                raise self._unknown(key)

    def config(self) -> dict[str, Any]:
        kind, tensors = self.model_type, self._file.tensors
        heads = self._integer("attention.head_count", least=1)
        hidden = self._integer("embedding_length")
        head_dim = self._integer("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._integer(key, head_dim) != head_dim:
                raise self._unknown(self._prefix + key)
        tokens = self._shape("token_embd.weight", -2)
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[kind]],
            "model_type": kind,
            "dtype": "bfloat16",
            "hidden_size": hidden,
            "num_hidden_layers": self._integer("block_count"),
            "intermediate_size": self._integer("feed_forward_length", 0),
            "num_attention_heads": heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("rope.freq_base", 10_000.0),
            "max_position_embeddings": self._integer("context_length"),
            "vocab_size": tokens,
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "hidden_act": "silu",
        }
        if (scaling := self._rope_scaling(config)) is not None:
            config["rope_scaling"] = scaling
        return config | self._experts(kind) | (self._gemma(config) if "gemma" in kind else {})

    def _experts(self, kind: str) -> dict[str, Any]:
        if kind == "mixtral":
            used = self._integer("expert_used_count")
            return {"num_local_experts": self._integer("expert_count"), "num_experts_per_tok": used}
        if not kind.endswith("_moe"):
            return {}
        fields: dict[str, Any] = {
            "num_experts": self._integer("expert_count"),
            "num_experts_per_tok": self._integer("expert_used_count"),
            "moe_intermediate_size": self._shape("blk.0.ffn_up_exps.weight", -2),
            "norm_topk_prob": kind == "qwen3_moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        if kind == "qwen2_moe":
            shared = self._shape("blk.0.ffn_up_shexp.weight", -2)
            fields["shared_expert_intermediate_size"] = shared
        return fields

    def _gemma(self, config: dict[str, Any]) -> dict[str, Any]:
        # Of 62 layers is the 27B alone, whose queries are scaled by the width of a head's share.
        is_27b = config["num_hidden_layers"] == 62
        share = config["hidden_size"] // config["num_attention_heads"]
        return {
            "query_pre_attn_scalar": share if is_27b else config["head_dim"],
            "sliding_window": self._integer("attention.sliding_window"),
            "sliding_window_pattern": self._integer("attention.sliding_window_pattern", 6),
            "rope_local_base_freq": self._number("rope.freq_base_swa", 10_000.0),
            "hidden_activation": "gelu_pytorch_tanh",
        }

    def _rope_scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        if _ROPE in self._file.tensors:
            return self._llama3(config)
        key = "rope.scaling.type"
        match self._get(key) or "none":
            case "none":
                return None
            case "linear":
                return {"rope_type": "linear", "factor": self._number("rope.scaling.factor")}
            case "yarn":
                return {
                    "rope_type": "yarn",
                    "factor": self._number("rope.scaling.factor"),
                    "original_max_position_embeddings": self._integer(
                        "rope.scaling.original_context_length"
                    ),
                }
            case _:
                raise self._unknown(self._prefix + key)

    def _llama3(self, config: dict[str, Any]) -> dict[str, Any]:
        """Llama 3's scaling, if the file's factors are those that it computes."""
        tensor = self._file.tensors[_ROPE]
        if tensor.kind or tensor.shape != (config["head_dim"] // 2,):
            raise self._file.fault("is not float32, or of another size than half a head", _ROPE)
        factors = np.fromfile(self._file.path, "<f4", tensor.elements, offset=tensor.offset)
        if len(factors) < tensor.elements:
            raise self._file.fault("ends after the end of the file", _ROPE)
        scaling = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            **_LLAMA3,
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }
        dims = np.arange(len(factors)) / len(factors)
        turns = _LLAMA3_CONTEXT * config["rope_theta"] ** -dims / (2 * np.pi)
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        share = np.clip((turns - low) / (high - low), 0, 1)
        if not np.allclose(factors, 1 / ((1 - share) / scaling["factor"] + share), rtol=1e-4):
            raise self._file.fault("is not the scaling of Llama 3, the only one known", _ROPE)
        return scaling

    def _shape(self, name: str, axis: int) -> int:
        tensor = self._file.tensors.get(name)
        if tensor is None or len(tensor.shape) < -axis:
            raise self._file.fault("is missing, or has too few dimensions", name)
        return tensor.shape[axis]

    def _get(self, key: str) -> object:
        return self._values.get(self._prefix + key)

    def _integer(self, key: str, default: int | None = None, least: int = 0) -> int:
        value = self._get(key)
        if isinstance(value, list) and len(set(value)) == 1:  # one for each layer, all the same
            value = value[0]
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
            raise self._missing(key, value)
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self._missing(key, value)
        # float32 in the file: 1e-6 is what 9.999999974752427e-07 was
        return float(f"{np.float32(value):.7g}")

    def _missing(self, key: str, value: object) -> InvalidCheckpoint:
        return self._file.fault(f"has {self._prefix}{key} = {quote(value)}")

    def _unknown(self, key: str) -> InvalidCheckpoint:
        return self._file.fault(
            f"has {key} = {quote(self._values.get(key))}, which `exo-node models import` does not "
            "know: it may change what the model computes"
        )
