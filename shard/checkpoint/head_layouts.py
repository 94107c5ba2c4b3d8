"""The layouts of MTP heads, and which of them a checkpoint may have."""

import re
from collections.abc import Sequence
from typing import ClassVar, cast

from .checkpoint import HEAD_FILES
from .head_shapes import (
    Config,
    HeadLayout,
    HeadTensors,
    RequiredSizes,
    Shapes,
    experts_shapes,
    gated_shapes,
    grouped_attention_shapes,
    indexer_shapes,
    joint_shapes,
    latent_attention_shapes,
    nextn_joint_shapes,
    size,
)
from .headers import Tensor

_LAYER = re.compile(r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d{1,6})\.(.+)")
_LONGCAT = re.compile(r"model\.mtp\.(?:layers\.0\.)?(.+)")
_NEMOTRON = re.compile(r"mtp\.(?:layers\.(?:0\.(enorm|hnorm|eh_proj)|1\.(final_layernorm)))?(.+)")
_MIMO_V2 = re.compile(r"model\.mtp\.layers\.0\.(.+)")
_QWEN = re.compile(r"(?:language_model\.(?:model\.)?|model\.(?:language_model\.)?)?mtp\.(.+)")
_MIMO = re.compile(r"model\.mtp_layers\.0\.(.+)")
_ERNIE = re.compile(r"model\.(mtp_(?:emb_norm|hidden_norm|linear_proj|block)\.(\d{1,6})\..+)")
_MIMO_FURTHER = re.compile(r"model\.mtp_layers\.\d{1,6}\..+")
_FP8_BLOCK = [128, 128]


class QwenLayout(HeadLayout):
    """`mtp.*` of Qwen3-Next, 3.5, 3.6 and 3.8: fc, three norms, one decoder layer.

    Raw repositories store the experts one by one (Qwen3-Next, 3.5) or fused (3.6), converters stack
    them as `switch_mlp` or leave them fused. An own file of the head needs no prefix.
    """

    name = "qwen"

    def canonical(self, tensor: Tensor) -> str | None:
        if match := _QWEN.fullmatch(tensor.name):
            return match.group(1)
        others = _LAYER.fullmatch(tensor.name) or _MIMO_FURTHER.fullmatch(tensor.name)
        return tensor.name if tensor.file in HEAD_FILES and not others else None

    def shapes(self, config: RequiredSizes, tensors: HeadTensors) -> Shapes:
        hidden, layer = config["hidden_size"], "layers.0."
        norms = ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")
        yield from joint_shapes(hidden, "fc", *norms, layer=layer)
        biased = ("q_proj", "k_proj", "v_proj", "o_proj") if config.get("attention_bias") else ()
        # Each head's query comes with its output gate.
        yield from grouped_attention_shapes(f"{layer}self_attn.", config, query=2, biased=biased)
        yield from self._mlp(f"{layer}mlp.", config, tensors)

    def _mlp(self, mlp: str, config: RequiredSizes, tensors: HeadTensors) -> Shapes:
        hidden, experts = config["hidden_size"], size(config, "num_experts")
        if not experts:
            yield from gated_shapes(mlp, hidden, config["intermediate_size"])
            return
        yield f"{mlp}gate.weight", (experts, hidden)
        if shared := config["shared_expert_intermediate_size"]:
            yield from gated_shapes(f"{mlp}shared_expert.", hidden, shared)
            yield f"{mlp}shared_expert_gate.weight", (1, hidden)
        yield from experts_shapes(mlp, experts, hidden, config["moe_intermediate_size"], tensors)


class NextnLayout(HeadLayout):
    """One decoder layer after the last of DeepSeek-V3 and GLM-4.x-MoE, with what joins it on.

    `model.layers.{num_hidden_layers}.*`: enorm, hnorm, eh_proj, shared_head.norm, the layer as in
    the backbone, and from some publishers copies of the embeddings and lm_head.
    """

    name = "nextn"
    # No decoder layer has these. Layers past the last without them may be a config's mistake.
    markers = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")

    def __init__(self, index: int) -> None:
        self._index = index

    def canonical(self, tensor: Tensor) -> str | None:
        """The tensor's name in the head; its whole name where it lies in a layer further on."""
        match = _LAYER.fullmatch(tensor.name)
        if match is None or (layer := int(match.group(1))) < self._index:
            return None
        return match.group(2) if layer == self._index else tensor.name

    def reads_fp8(self, config: Config) -> bool:
        """Whether the family takes FP8 blocks: mlx-lm's DeepSeek-V3 does, in blocks of 128; its
        glm4_moe_lite does not."""
        if config.get("model_type") == "glm4_moe_lite":
            return False
        fields: object = config.get("quantization_config")
        scheme = cast("Config", fields) if isinstance(fields, dict) else {}
        blocks = scheme.get("weight_block_size")
        return bool(size(config, "kv_lora_rank")) and blocks in (None, _FP8_BLOCK)

    def shapes(self, config: RequiredSizes, tensors: HeadTensors) -> Shapes:
        """Every tensor of the head; copies of the ends where they are there."""
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        yield from nextn_joint_shapes(hidden)
        for copy in ("embed_tokens", "shared_head.head"):
            if any(name.startswith(f"{copy}.") for name in tensors):
                yield f"{copy}.weight", (vocabulary, hidden)
        if size(config, "kv_lora_rank"):
            yield from latent_attention_shapes("self_attn.", config, tensors)
            if size(config, "index_topk"):
                yield from indexer_shapes("self_attn.indexer.", config)
        else:
            biased = ("q_proj", "k_proj", "v_proj") if config.get("attention_bias") else ()
            normed = bool(config.get("use_qk_norm"))
            yield from grouped_attention_shapes("self_attn.", config, biased=biased, normed=normed)
        yield from self._mlp("mlp.", config, tensors)

    def _mlp(self, mlp: str, config: RequiredSizes, tensors: HeadTensors) -> Shapes:
        hidden, experts = config["hidden_size"], self._routed(config)
        if not experts:
            yield from gated_shapes(mlp, hidden, config["intermediate_size"])
            return
        inner = config["moe_intermediate_size"]
        yield f"{mlp}gate.weight", (experts, hidden)
        yield f"{mlp}gate.e_score_correction_bias", (experts,)
        if shared := size(config, "n_shared_experts"):
            yield from gated_shapes(f"{mlp}shared_experts.", hidden, shared * inner)
        yield from experts_shapes(mlp, experts, hidden, inner, tensors)

    def _routed(self, config: Config) -> int:
        """Experts of the head's layer; 0 where it is dense."""
        dense = self._index < (size(config, "first_k_dense_replace") or 0)
        between = self._index % max(1, size(config, "moe_layer_freq") or 1)
        return 0 if dense or between else size(config, "n_routed_experts") or 0


class MimoLayout(HeadLayout):
    """`model.mtp_layers.0.*` of MiMo-7B: input_proj, three norms, one decoder layer."""

    name = "mimo"

    def canonical(self, tensor: Tensor) -> str | None:
        """The tensor's name in the head; its whole name where it lies in a layer further on."""
        if match := _MIMO.fullmatch(tensor.name):
            return match.group(1)
        return tensor.name if _MIMO_FURTHER.fullmatch(tensor.name) else None

    def shapes(self, config: RequiredSizes, tensors: HeadTensors) -> Shapes:
        hidden = config["hidden_size"]
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        yield from joint_shapes(hidden, "input_proj", *norms)
        biased = ("q_proj", "k_proj", "v_proj")
        # mlx-lm's class takes the width of a head from the hidden size alone.
        width = hidden // max(config["num_attention_heads"], 1)
        yield from grouped_attention_shapes(
            "self_attn.", config, width=width, biased=biased, normed=False
        )
        yield from gated_shapes("mlp.", hidden, config["intermediate_size"])


class ErnieLayout(HeadLayout):
    """`model.mtp_*.0.*` of Ernie-4.5: mtp_linear_proj, two norms, one dense decoder layer."""

    name = "ernie"

    def canonical(self, tensor: Tensor) -> str | None:
        """The tensor's name in the head; its whole name where it lies in a layer further on."""
        if match := _ERNIE.fullmatch(tensor.name):
            name, layer = match.groups()
            return tensor.name if int(layer) else name
        return None

    def shapes(self, config: RequiredSizes, tensors: HeadTensors) -> Shapes:
        hidden, block = config["hidden_size"], "mtp_block.0."
        norms = ("mtp_emb_norm.0", "mtp_hidden_norm.0")
        yield from joint_shapes(hidden, "mtp_linear_proj.0", *norms, layer=block)
        yield from grouped_attention_shapes(f"{block}self_attn.", config, normed=False)
        yield from gated_shapes(f"{block}mlp.", hidden, config["intermediate_size"])


class LongcatLayout(HeadLayout):
    """`model.mtp.*` of LongCat-Flash: a NextN head with a single attention and a dense MLP."""

    name = "longcat"

    def canonical(self, tensor: Tensor) -> str | None:
        match = _LONGCAT.fullmatch(tensor.name)
        if match is None:
            return None
        name = match.group(1).removeprefix("transformer_layer.").replace("norm.m.", "norm.")
        return "shared_head.norm.weight" if name == "norm.weight" else name

    def shapes(self, config: RequiredSizes, tensors: HeadTensors) -> Shapes:
        """Every tensor of the head; a copy of the embeddings where it is there."""
        hidden = config["hidden_size"]
        yield from nextn_joint_shapes(hidden)
        if "embed_tokens.weight" in tensors:
            yield "embed_tokens.weight", (config["vocab_size"], hidden)
        yield from latent_attention_shapes("self_attn.", config, tensors)
        yield from gated_shapes("mlp.", hidden, config["ffn_hidden_size"])


class NemotronLayout(HeadLayout):
    """`mtp.layers.*` of Nemotron-H: a NextN head whose layer is one block of attention, which has
    the joint, and one of experts, which has the final norm."""

    name = "nemotron"

    def canonical(self, tensor: Tensor) -> str | None:
        match = _NEMOTRON.fullmatch(tensor.name)
        if match is None:
            return None
        joint, norm, rest = match.groups()
        return f"{'shared_head.norm' if norm else joint or ''}{rest}"

    def shapes(self, config: RequiredSizes, tensors: HeadTensors) -> Shapes:
        hidden = config["hidden_size"]
        yield "eh_proj.weight", (hidden, 2 * hidden)
        for norm in ("enorm", "hnorm", "shared_head.norm", "layers.0.norm", "layers.1.norm"):
            yield f"{norm}.weight", (hidden,)
        biased = ("q_proj", "k_proj", "v_proj", "o_proj") if config.get("attention_bias") else ()
        yield from grouped_attention_shapes("layers.0.mixer.", config, biased=biased, normed=False)
        yield from self._mixture("layers.1.mixer.", config, tensors)

    def _mixture(self, mixer: str, config: RequiredSizes, tensors: HeadTensors) -> Shapes:
        hidden, experts = config["hidden_size"], config["n_routed_experts"]
        inner, latent = config["moe_intermediate_size"], size(config, "moe_latent_size")
        yield f"{mixer}gate.weight", (experts, hidden)
        yield f"{mixer}gate.e_score_correction_bias", (experts,)
        if latent:
            yield f"{mixer}fc1_latent_proj.weight", (latent, hidden)
            yield f"{mixer}fc2_latent_proj.weight", (hidden, latent)
        if size(config, "n_shared_experts"):
            shared = size(config, "moe_shared_expert_intermediate_size") or 0
            yield f"{mixer}shared_experts.up_proj.weight", (shared, hidden)
            yield f"{mixer}shared_experts.down_proj.weight", (hidden, shared)
        outer = latent or hidden
        if any(name.startswith(f"{mixer}switch_mlp.") for name in tensors):
            yield f"{mixer}switch_mlp.fc1.weight", (experts, inner, outer)
            yield f"{mixer}switch_mlp.fc2.weight", (experts, outer, inner)
            return
        for expert in range(experts):
            yield f"{mixer}experts.{expert}.up_proj.weight", (inner, outer)
            yield f"{mixer}experts.{expert}.down_proj.weight", (outer, inner)


class MimoV2Layout(HeadLayout):
    """`model.mtp.layers.0.*` of MiMo-V2-Flash: a NextN head with a sliding window and a dense MLP.

    Further layers are left where they are.
    """

    name = "mimo_v2"
    ignores_further_layers = True

    def canonical(self, tensor: Tensor) -> str | None:
        match = _MIMO_V2.fullmatch(tensor.name)
        if match is None:
            return None
        name = match.group(1).replace("final_layernorm.", "shared_head.norm.")
        return name.replace("pre_mlp_layernorm.", "post_attention_layernorm.")

    def reads_fp8(self, config: Config) -> bool:
        return True

    def shapes(self, config: RequiredSizes, tensors: HeadTensors) -> Shapes:
        hidden, heads = config["hidden_size"], config["swa_num_attention_heads"]
        groups, values = config["swa_num_key_value_heads"], config["swa_v_head_dim"]
        yield from nextn_joint_shapes(hidden)
        yield "self_attn.q_proj.weight", (heads * config["swa_head_dim"], hidden)
        yield "self_attn.k_proj.weight", (groups * config["swa_head_dim"], hidden)
        yield "self_attn.v_proj.weight", (groups * values, hidden)
        yield "self_attn.o_proj.weight", (hidden, heads * values)
        if config.get("add_swa_attention_sink_bias"):
            yield "self_attn.attention_sink_bias", (heads,)
        yield from gated_shapes("mlp.", hidden, config["intermediate_size"])


class StepLayout(HeadLayout):
    """One decoder layer after the last of Step-3.5: a NextN head with a dense MLP.

    Further layers are left where they are, and so are its copies of the ends.
    """

    name = "step"
    ignores_further_layers = True
    copies: ClassVar = ("embed_tokens.", "transformer.shared_head.output.", "shared_head.output.")

    def __init__(self, index: int) -> None:
        self._index = index

    def canonical(self, tensor: Tensor) -> str | None:
        match = _LAYER.fullmatch(tensor.name)
        if match is None or int(match.group(1)) != self._index:
            return None
        return None if match.group(2).startswith(self.copies) else match.group(2)

    def shapes(self, config: RequiredSizes, tensors: HeadTensors) -> Shapes:
        hidden, width = config["hidden_size"], config["head_dim"]
        names, sliding = ("num_attention_heads", "num_attention_groups"), self._sliding(config)
        heads, groups = (size(sliding, n) or 0 if sliding else config[n] for n in names)
        raw = "transformer." if "transformer.shared_head.norm.weight" in tensors else ""
        yield from nextn_joint_shapes(hidden, f"{raw}shared_head.norm")
        for name, outputs in (("q_proj", heads), ("k_proj", groups), ("v_proj", groups)):
            yield f"self_attn.{name}.weight", (outputs * width, hidden)
        yield "self_attn.o_proj.weight", (hidden, heads * width)
        for norm in ("q_norm", "k_norm"):
            yield f"self_attn.{norm}.weight", (width,)
        if config.get("use_head_wise_attn_gate", True):
            yield "self_attn.g_proj.weight", (heads, hidden)
        yield from gated_shapes("mlp.", hidden, config["intermediate_size"])

    def _sliding(self, config: Config) -> Config | None:
        """The sizes of layers with a window, if the head's layer is one and they are others."""
        kinds = config.get("layer_types")
        listed = cast("Sequence[object]", kinds) if isinstance(kinds, list) else ()
        if listed:
            slides = len(listed) <= self._index or listed[self._index] == "sliding_attention"
        else:
            slides = self._index % 2 == 0
        others = config.get("attention_other_setting")
        return cast("Config", others) if slides and isinstance(others, dict) else None


def layouts_of(config: Config) -> list[HeadLayout]:
    """The layouts that a checkpoint may have, by its own config.json or that of its text model."""
    index = size(config, "num_hidden_layers")
    match config.get("model_type"):  # their names are also those of other layouts
        case "longcat_flash":
            return [LongcatLayout()]
        case "nemotron_h":
            return [NemotronLayout()]
        case "mimo_v2_flash":
            return [MimoV2Layout()]
        case "step3p5":
            return [StepLayout(index)] if index else []
        case _:
            layouts: list[HeadLayout] = [QwenLayout(), MimoLayout(), ErnieLayout()]
            return [*layouts, NextnLayout(index)] if index else layouts
