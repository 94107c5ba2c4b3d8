"""Layouts that one family has alone, under the names of a NextN head; see `head_layouts`."""

import re
from collections.abc import Sequence
from typing import ClassVar, cast

from .head_shapes import (
    Config,
    HeadLayout,
    HeadTensors,
    RequiredSizes,
    Shapes,
    gated_shapes,
    grouped_attention_shapes,
    joint_shapes,
    latent_attention_shapes,
    size,
)
from .headers import Tensor

LAYER = re.compile(r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d{1,6})\.(.+)")
_LONGCAT = re.compile(r"model\.mtp\.(?:layers\.0\.)?(.+)")
_NEMOTRON = re.compile(r"mtp\.(?:layers\.(?:0\.(enorm|hnorm|eh_proj)|1\.(final_layernorm)))?(.+)")
_MIMO_V2 = re.compile(r"model\.mtp\.layers\.0\.(.+)")


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
        yield from joint_shapes(hidden)
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
        yield from joint_shapes(hidden)
        yield "self_attn.q_proj.weight", (heads * config["swa_head_dim"], hidden)
        yield "self_attn.k_proj.weight", (groups * config["swa_head_dim"], hidden)
        yield "self_attn.v_proj.weight", (groups * values, hidden)
        yield "self_attn.o_proj.weight", (hidden, heads * values)
        if config.get("add_swa_attention_sink_bias"):
            yield "self_attn.attention_sink_bias", (heads,)
        yield from gated_shapes("mlp.", hidden, config["intermediate_size"])


class StepLayout(HeadLayout):
    """One decoder layer behind the last of Step-3.5: a NextN head with a dense MLP.

    Further layers are left where they are, and so are its copies of the ends.
    """

    name = "step"
    ignores_further_layers = True
    copies: ClassVar = ("embed_tokens.", "transformer.shared_head.output.", "shared_head.output.")

    def __init__(self, index: int) -> None:
        self._index = index

    def canonical(self, tensor: Tensor) -> str | None:
        match = LAYER.fullmatch(tensor.name)
        if match is None or int(match.group(1)) != self._index:
            return None
        return None if match.group(2).startswith(self.copies) else match.group(2)

    def shapes(self, config: RequiredSizes, tensors: HeadTensors) -> Shapes:
        hidden, width = config["hidden_size"], config["head_dim"]
        names, sliding = ("num_attention_heads", "num_attention_groups"), self._sliding(config)
        heads, groups = (size(sliding, n) or 0 if sliding else config[n] for n in names)
        raw = "transformer." if "transformer.shared_head.norm.weight" in tensors else ""
        yield from joint_shapes(hidden, f"{raw}shared_head.norm")
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
