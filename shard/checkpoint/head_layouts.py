"""The layouts of MTP heads: which tensors one has, in which shapes, by config.json's sizes.

Shapes are those of an unquantised head; `head_storage` says how else a matrix may be stored. Every
size is a Python integer from a hostile file, so nothing here divides by one or allocates by it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

from .checkpoint import HEAD_FILES
from .headers import Tensor

Shape = tuple[int, ...]
Shapes = Iterator[tuple[str, Shape]]
Config = Mapping[str, Any]
HeadTensors = Mapping[str, Tensor]
"""A head's tensors by canonical name: the part of the name behind the layout's prefix."""
LayoutName = Literal["qwen", "nextn", "mimo", "ernie", "longcat"]

_QWEN = re.compile(r"(?:language_model\.(?:model\.)?|model\.(?:language_model\.)?)?mtp\.(.+)")
_LAYER = re.compile(r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d{1,6})\.(.+)")
_MIMO = re.compile(r"model\.mtp_layers\.0\.(.+)")
_ERNIE = re.compile(r"model\.(mtp_(?:emb_norm|hidden_norm|linear_proj|block)\.(\d{1,6})\..+)")
_LONGCAT = re.compile(r"model\.mtp\.(?:layers\.0\.)?(.+)")
_MIMO_FURTHER = re.compile(r"model\.mtp_layers\.\d{1,6}\..+")
_PARTS = ("gate_proj", "up_proj", "down_proj")
_FP8_BLOCK = [128, 128]


def size(config: Config, key: str) -> int | None:
    """A whole number of config.json; None where it is absent or anything else."""
    value: object = config.get(key)
    return value if type(value) is int else None


class QwenLayout:
    """`mtp.*` of Qwen3-Next, 3.5, 3.6 and 3.8: fc, three norms, one decoder layer.

    Raw repositories store the experts one by one (Qwen3-Next, 3.5) or fused (3.6), converters stack
    them as `switch_mlp` or leave them fused. An own file of the head needs no prefix.
    """

    name: ClassVar[LayoutName] = "qwen"

    def canonical(self, tensor: Tensor) -> str | None:
        """The tensor's name in the head; None where it is not of it."""
        if match := _QWEN.fullmatch(tensor.name):
            return match.group(1)
        others = _LAYER.fullmatch(tensor.name) or _MIMO_FURTHER.fullmatch(tensor.name)
        return tensor.name if tensor.file in HEAD_FILES and not others else None

    def needed(self, config: Config) -> Sequence[str]:
        """The sizes that config.json must give."""
        attention = ("hidden_size", "num_attention_heads", "num_key_value_heads")
        experts = ("moe_intermediate_size", "shared_expert_intermediate_size")
        return *attention, *(experts if size(config, "num_experts") else ("intermediate_size",))

    def reads_fp8(self, _config: Config) -> bool:
        """Whether the family takes FP8 blocks: mlx-lm's Qwen models do not."""
        return False

    def shapes(self, config: Config, tensors: HeadTensors) -> Shapes:
        """Every tensor of the head."""
        hidden, layer = config["hidden_size"], "layers.0."
        yield "fc.weight", (hidden, 2 * hidden)
        for norm in ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm"):
            yield f"{norm}.weight", (hidden,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{norm}.weight", (hidden,)
        biased = ("q_proj", "k_proj", "v_proj", "o_proj") if config.get("attention_bias") else ()
        # Each head's query comes with its output gate.
        yield from _grouped_attention(f"{layer}self_attn.", config, query=2, biased=biased)
        yield from self._mlp(f"{layer}mlp.", config, tensors)

    def _mlp(self, mlp: str, config: Config, tensors: HeadTensors) -> Shapes:
        hidden, experts = config["hidden_size"], size(config, "num_experts")
        if not experts:
            yield from _gated(mlp, hidden, config["intermediate_size"])
            return
        yield f"{mlp}gate.weight", (experts, hidden)
        if shared := config["shared_expert_intermediate_size"]:
            yield from _gated(f"{mlp}shared_expert.", hidden, shared)
            yield f"{mlp}shared_expert_gate.weight", (1, hidden)
        yield from _experts(mlp, experts, hidden, config["moe_intermediate_size"], tensors)


class NextnLayout:
    """One decoder layer behind the last of DeepSeek-V3 and GLM-4.x-MoE, with what joins it on.

    `model.layers.{num_hidden_layers}.*`: enorm, hnorm, eh_proj, shared_head.norm, the layer as in
    the backbone, and from some publishers copies of the embeddings and lm_head.
    """

    name: ClassVar[LayoutName] = "nextn"
    markers: ClassVar = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")
    """Names that no decoder layer has."""

    def __init__(self, index: int) -> None:
        self._index = index

    def canonical(self, tensor: Tensor) -> str | None:
        """The tensor's name in the head; its whole name where it lies in a layer further on."""
        match = _LAYER.fullmatch(tensor.name)
        if match is None or (layer := int(match.group(1))) < self._index:
            return None
        return match.group(2) if layer == self._index else tensor.name

    def needed(self, config: Config) -> Sequence[str]:
        """The sizes that config.json must give."""
        latent = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if size(config, "index_topk"):
            latent += ("index_n_heads", "index_head_dim", "q_lora_rank")
        attention = latent if size(config, "kv_lora_rank") else ("num_key_value_heads",)
        mlp = "moe_intermediate_size" if self._routed(config) else "intermediate_size"
        return "hidden_size", "vocab_size", "num_attention_heads", *attention, mlp

    def reads_fp8(self, config: Config) -> bool:
        """Whether the family takes FP8 blocks: mlx-lm's DeepSeek-V3 does, in blocks of 128; its
        glm4_moe_lite does not."""
        if config.get("model_type") == "glm4_moe_lite":
            return False
        fields: object = config.get("quantization_config")
        scheme = cast("Config", fields) if isinstance(fields, dict) else {}
        blocks = scheme.get("weight_block_size")
        return bool(size(config, "kv_lora_rank")) and blocks in (None, _FP8_BLOCK)

    def shapes(self, config: Config, tensors: HeadTensors) -> Shapes:
        """Every tensor of the head; copies of the ends where they are there."""
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        yield "eh_proj.weight", (hidden, 2 * hidden)
        norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm")
        for norm in (*norms, "post_attention_layernorm"):
            yield f"{norm}.weight", (hidden,)
        for copy in ("embed_tokens", "shared_head.head"):
            if any(name.startswith(f"{copy}.") for name in tensors):
                yield f"{copy}.weight", (vocabulary, hidden)
        if size(config, "kv_lora_rank"):
            yield from _latent_attention("self_attn.", config, tensors)
            if size(config, "index_topk"):
                yield from _indexer("self_attn.indexer.", config)
        else:
            biased = ("q_proj", "k_proj", "v_proj") if config.get("attention_bias") else ()
            normed = bool(config.get("use_qk_norm"))
            yield from _grouped_attention("self_attn.", config, biased=biased, normed=normed)
        yield from self._mlp("mlp.", config, tensors)

    def _mlp(self, mlp: str, config: Config, tensors: HeadTensors) -> Shapes:
        hidden, experts = config["hidden_size"], self._routed(config)
        if not experts:
            yield from _gated(mlp, hidden, config["intermediate_size"])
            return
        inner = config["moe_intermediate_size"]
        yield f"{mlp}gate.weight", (experts, hidden)
        yield f"{mlp}gate.e_score_correction_bias", (experts,)
        if shared := size(config, "n_shared_experts"):
            yield from _gated(f"{mlp}shared_experts.", hidden, shared * inner)
        yield from _experts(mlp, experts, hidden, inner, tensors)

    def _routed(self, config: Config) -> int:
        """Experts of the head's layer; 0 where it is dense."""
        dense = self._index < (size(config, "first_k_dense_replace") or 0)
        between = self._index % max(1, size(config, "moe_layer_freq") or 1)
        return 0 if dense or between else size(config, "n_routed_experts") or 0


class MimoLayout:
    """`model.mtp_layers.0.*` of MiMo-7B: input_proj, three norms, one decoder layer."""

    name: ClassVar[LayoutName] = "mimo"

    def canonical(self, tensor: Tensor) -> str | None:
        """The tensor's name in the head; its whole name where it lies in a layer further on."""
        if match := _MIMO.fullmatch(tensor.name):
            return match.group(1)
        return tensor.name if _MIMO_FURTHER.fullmatch(tensor.name) else None

    def needed(self, _config: Config) -> Sequence[str]:
        """The sizes that config.json must give."""
        attention = ("hidden_size", "num_attention_heads", "num_key_value_heads")
        return *attention, "intermediate_size"

    def reads_fp8(self, _config: Config) -> bool:
        """Whether the family takes FP8 blocks."""
        return False

    def shapes(self, config: Config, _tensors: HeadTensors) -> Shapes:
        """Every tensor of the head."""
        hidden = config["hidden_size"]
        yield "input_proj.weight", (hidden, 2 * hidden)
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        for norm in (*norms, "input_layernorm", "post_attention_layernorm"):
            yield f"{norm}.weight", (hidden,)
        biased = ("q_proj", "k_proj", "v_proj")
        # mlx-lm's class takes the width of a head from the hidden size alone.
        widths = {key: value for key, value in config.items() if key != "head_dim"}
        yield from _grouped_attention("self_attn.", widths, biased=biased, normed=False)
        yield from _gated("mlp.", hidden, config["intermediate_size"])


class ErnieLayout:
    """`model.mtp_*.0.*` of Ernie-4.5: mtp_linear_proj, two norms, one dense decoder layer."""

    name: ClassVar[LayoutName] = "ernie"

    def canonical(self, tensor: Tensor) -> str | None:
        """The tensor's name in the head; its whole name where it lies in a layer further on."""
        if match := _ERNIE.fullmatch(tensor.name):
            name, layer = match.groups()
            return tensor.name if int(layer) else name
        return None

    def needed(self, _config: Config) -> Sequence[str]:
        """The sizes that config.json must give."""
        attention = ("hidden_size", "num_attention_heads", "num_key_value_heads")
        return *attention, "intermediate_size"

    def reads_fp8(self, _config: Config) -> bool:
        """Whether the family takes FP8 blocks."""
        return False

    def shapes(self, config: Config, _tensors: HeadTensors) -> Shapes:
        """Every tensor of the head."""
        hidden, block = config["hidden_size"], "mtp_block.0."
        yield "mtp_linear_proj.0.weight", (hidden, 2 * hidden)
        norms = ("input_layernorm", "post_attention_layernorm")
        for norm in ("mtp_emb_norm.0", "mtp_hidden_norm.0", *(block + norm for norm in norms)):
            yield f"{norm}.weight", (hidden,)
        yield from _grouped_attention(f"{block}self_attn.", config, normed=False)
        yield from _gated(f"{block}mlp.", hidden, config["intermediate_size"])


class LongcatLayout:
    """`model.mtp.*` of LongCat-Flash: a NextN head with a single attention and a dense MLP."""

    name: ClassVar[LayoutName] = "longcat"

    def canonical(self, tensor: Tensor) -> str | None:
        """The tensor's name in a NextN head."""
        match = _LONGCAT.fullmatch(tensor.name)
        if match is None:
            return None
        name = match.group(1).removeprefix("transformer_layer.").replace("norm.m.", "norm.")
        return "shared_head.norm.weight" if name == "norm.weight" else name

    def needed(self, _config: Config) -> Sequence[str]:
        """The sizes that config.json must give."""
        latent = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return "hidden_size", "vocab_size", "num_attention_heads", "ffn_hidden_size", *latent

    def reads_fp8(self, _config: Config) -> bool:
        """Whether the family takes FP8 blocks."""
        return False

    def shapes(self, config: Config, tensors: HeadTensors) -> Shapes:
        """Every tensor of the head; a copy of the embeddings where it is there."""
        hidden = config["hidden_size"]
        yield "eh_proj.weight", (hidden, 2 * hidden)
        norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm")
        for norm in (*norms, "post_attention_layernorm"):
            yield f"{norm}.weight", (hidden,)
        if "embed_tokens.weight" in tensors:
            yield "embed_tokens.weight", (config["vocab_size"], hidden)
        yield from _latent_attention("self_attn.", config, tensors)
        yield from _gated("mlp.", hidden, config["ffn_hidden_size"])


Layout = QwenLayout | NextnLayout | MimoLayout | ErnieLayout | LongcatLayout


def layouts_of(config: Config) -> list[Layout]:
    """The layouts that a checkpoint may have, by its own config.json or that of its text model."""
    if config.get("model_type") == "longcat_flash":  # its names are also Qwen's
        return [LongcatLayout()]
    layouts: list[Layout] = [QwenLayout(), MimoLayout(), ErnieLayout()]
    if index := size(config, "num_hidden_layers"):
        layouts.append(NextnLayout(index))
    return layouts


def _grouped_attention(
    prefix: str, config: Config, *, query: int = 1, biased: Sequence[str] = (), normed: bool = True
) -> Shapes:
    """`query` is how many rows of q_proj there are for one of a query."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = size(config, "head_dim") or hidden // max(heads, 1)
    rows = {
        "q_proj": query * heads * width,
        "k_proj": config["num_key_value_heads"] * width,
        "v_proj": config["num_key_value_heads"] * width,
        "o_proj": hidden,
    }
    for name, outputs in rows.items():
        yield f"{prefix}{name}.weight", (outputs, heads * width if name == "o_proj" else hidden)
        if name in biased:
            yield f"{prefix}{name}.bias", (outputs,)
    for name in ("q_norm", "k_norm") if normed else ():
        yield f"{prefix}{name}.weight", (width,)


def _latent_attention(prefix: str, config: Config, tensors: HeadTensors) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    queries = heads * (config["qk_nope_head_dim"] + rotary)
    values = heads * config["v_head_dim"]
    rank = size(config, "q_lora_rank")
    if rank is None:
        yield f"{prefix}q_proj.weight", (queries, hidden)
    else:
        yield f"{prefix}q_a_proj.weight", (rank, hidden)
        yield f"{prefix}q_a_layernorm.weight", (rank,)
        yield f"{prefix}q_b_proj.weight", (queries, rank)
    yield f"{prefix}kv_a_proj_with_mqa.weight", (latent + rotary, hidden)
    yield f"{prefix}kv_a_layernorm.weight", (latent,)
    if f"{prefix}embed_q.weight" in tensors:  # mlx-lm splits kv_b_proj by head
        yield f"{prefix}embed_q.weight", (heads, latent, config["qk_nope_head_dim"])
        yield f"{prefix}unembed_out.weight", (heads, config["v_head_dim"], latent)
    else:
        yield f"{prefix}kv_b_proj.weight", (heads * config["qk_nope_head_dim"] + values, latent)
    yield f"{prefix}o_proj.weight", (hidden, values)
    if config.get("attention_bias"):
        yield f"{prefix}kv_a_proj_with_mqa.bias", (latent + rotary,)
        yield f"{prefix}o_proj.bias", (hidden,)
        if rank is not None:
            yield f"{prefix}q_a_proj.bias", (rank,)


def _indexer(prefix: str, config: Config) -> Shapes:
    """The indexer of DeepSeek-V3.2 and GLM-5, which chooses the rows that attention reads."""
    hidden, heads, width = (config[k] for k in ("hidden_size", "index_n_heads", "index_head_dim"))
    yield f"{prefix}wq_b.weight", (heads * width, config["q_lora_rank"])
    yield f"{prefix}wk.weight", (width, hidden)
    yield f"{prefix}k_norm.weight", (width,)
    yield f"{prefix}k_norm.bias", (width,)
    yield f"{prefix}weights_proj.weight", (heads, hidden)


def _gated(prefix: str, hidden: int, inner: int) -> Shapes:
    for part in _PARTS:
        yield f"{prefix}{part}.weight", (hidden, inner) if part == "down_proj" else (inner, hidden)


def _experts(mlp: str, experts: int, hidden: int, inner: int, tensors: HeadTensors) -> Shapes:
    """Routed experts in the form that is there; one by one where none is."""
    if any(name.startswith(f"{mlp}switch_mlp.") for name in tensors):
        for name, shape in _gated(f"{mlp}switch_mlp.", hidden, inner):
            yield name, (experts, *shape)
        return
    fused = {
        f"{mlp}experts.gate_up_proj": (experts, 2 * inner, hidden),
        f"{mlp}experts.down_proj": (experts, hidden, inner),
    }
    if any(name.startswith(tuple(fused)) for name in tensors):
        for name, shape in fused.items():
            # Raw ones have no suffix; MLX OptiQ quantises them as they are, and adds it.
            suffixed = any(other.startswith(f"{name}.") for other in tensors)
            yield f"{name}.weight" if suffixed else name, shape
        return
    for expert in range(experts):
        yield from _gated(f"{mlp}experts.{expert}.", hidden, inner)
