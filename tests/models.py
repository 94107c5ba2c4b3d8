"""Makes tiny random checkpoints of several families, in the layouts that publishers use."""

import importlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from exo_node.mtp.families import longcat, nemotron_h
from exo_node.shard.checkpoint.checkpoint import HEAD_FILES, Checkpoint

DEMO = Path(__file__).parent.parent / "shard" / "models" / "demo"

Family = Literal[
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm4_moe",
    "glm4_moe_lite",
    "mimo",
    "ernie4_5",
    "ernie4_5_moe",
    "longcat_flash",
    "nemotron_h",
    "mimo_v2_flash",
    "step3p5",
    "qwen3",
    "llama",
]
Experts = Literal["fused", "unfused"]
Weights = dict[str, mx.array]

GROUP_SIZE = 32
WINDOW = 6
"""Fewer rows than the tests' prompts have."""
_QWEN_35 = ("qwen3_5", "qwen3_5_moe")
_HYBRID = (*_QWEN_35, "qwen3_next")
_INDEXED = ("deepseek_v32", "glm_moe_dsa")
_NEXTN = ("deepseek_v3", *_INDEXED, "glm4_moe", "glm4_moe_lite")
_ERNIE = ("ernie4_5", "ernie4_5_moe")
_LAYERED = ("mimo_v2_flash", "step3p5")
"""With heads of several layers."""
_OTHERS = (*_ERNIE, "mimo", "longcat_flash", "nemotron_h", *_LAYERED)
_WITH_HEAD = (*_HYBRID, *_NEXTN, *_OTHERS)
_LAYER_CLASSES = {
    "deepseek_v3": "DeepseekV3DecoderLayer",
    "deepseek_v32": "DeepseekV32DecoderLayer",
    "glm_moe_dsa": "DeepseekV32DecoderLayer",
    "glm4_moe": "DecoderLayer",
    "glm4_moe_lite": "Glm4MoeLiteDecoderLayer",
}
_FLOAT32 = ("A_log", "e_score_correction_bias")
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def make_checkpoint(
    folder: Path,
    family: Family,
    *,
    dtype: str = "bfloat16",
    layers: int = 4,
    hidden: int = 64,
    vocab: int = 512,
    mtp: bool = True,
    raw: bool = True,
    bits: int = 0,
    head_bits: int = 0,
    experts: Experts = "fused",
    tied: bool = False,
    shards: int = 1,
    seed: int = 0,
    changes: Mapping[str, Any] = _NOTHING,
) -> Path:
    """Write a random checkpoint into `folder`, which is made, and return it.

    `raw` is the original repositories' layout. Qwen: norms stored as w - 1, conv1d as (C, 1, K),
    the head as `mtp.*`; Qwen3-Next's experts are one tensor each, Qwen3.5's fused, and its head's
    as `experts` says. DeepSeek-V3 and GLM: the head is the layer past the last, with copies of
    embeddings and lm_head; one tensor for each expert; latent attention's `kv_b_proj` whole.

    `raw=False` is mlx-lm's layout, with the head, if any, where a converter that keeps it puts it.
    There backbone and head may be quantised, with `bits` and `head_bits`, in groups of GROUP_SIZE.
    Qwen3 and Llama have one layout and no head. More `shards` than one come with an index. A
    vocabulary of 4096 brings the demo's tokenizer with it. `changes`: other fields of the config.
    """
    assert not (raw and (bits or head_bits)), "only mlx-lm's layout is quantised here"
    mx.random.seed(seed)
    config = _config(family, dtype, layers, hidden, vocab, changes, mtp=mtp, tied=tied)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = _random_parameters(model)
    drafts = mtp and family in _WITH_HEAD
    head = _head(family, config, weights) if drafts else {}
    if bits:
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": bits}
        paths = {p for p, m in model.named_modules() if hasattr(m, "to_quantized")}
        weights = _quantized(weights, bits, paths)
    if head_bits:
        # DeepSeek's and GLM's router is no layer that mlx quantises.
        unpacked = "mlp.gate" if family in _NEXTN else ""
        paths = {k.removesuffix(".weight") for k, v in head.items() if v.ndim > 1} - {unpacked}
        head = _quantized(head, head_bits, paths)
    weights |= {_head_name(family, layers, name): value for name, value in head.items()}
    if drafts and family in _LAYERED:  # a second layer, which is not read
        further = ((_head_name(family, layers, name), value) for name, value in head.items())
        first, second = (
            ("mtp.layers.0", "mtp.layers.1") if "mimo" in family else (layers, layers + 1)
        )
        weights |= {name.replace(f"{first}.", f"{second}.", 1): -value for name, value in further}
    if raw and family in _HYBRID:
        weights = _to_raw(weights, family, experts)
    if raw and family == "nemotron_h":
        weights = _to_raw_nemotron(weights)
    if raw and family == "step3p5":
        weights = _to_raw_step(weights)
    if raw and family in (*_NEXTN, *_ERNIE, "longcat_flash", "mimo_v2_flash"):
        weights = _to_raw_nextn(weights, config)
    folder.mkdir(parents=True)
    _save(folder, _typed(weights, dtype), shards, "pt" if raw else "mlx")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if vocab == 4096:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(DEMO / name, folder / name)
    return folder


def _config(
    family: Family,
    dtype: str,
    layers: int,
    hidden: int,
    vocab: int,
    changes: Mapping[str, Any],
    *,
    mtp: bool,
    tied: bool,
) -> dict[str, Any]:
    text: dict[str, Any] = {
        "model_type": family,
        "dtype": dtype,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
    }
    eos = {"eos_token_id": 4095} if vocab == 4096 else {}
    if family in _NEXTN:
        return text | eos | _nextn_fields(family, hidden, mtp=mtp) | dict(changes)
    if family in ("mimo", "nemotron_h", *_ERNIE):
        text |= {"num_nextn_predict_layers": int(mtp)}
    if family in _ERNIE:
        text |= {"use_bias": False, "moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1}
        text |= {"moe_intermediate_size": hidden, "moe_num_shared_experts": 1}
    if family == "longcat_flash":
        text |= _longcat_fields(hidden, layers)
    if family == "nemotron_h":
        text |= _nemotron_fields(hidden, layers)
    if family in _LAYERED:
        text |= {"num_nextn_predict_layers": 2 * mtp, "sliding_window": WINDOW}
        text |= (
            _mimo_v2_fields(hidden, layers) if family == "mimo_v2_flash" else _step_fields(hidden)
        )
    if family not in _HYBRID:
        return text | eos | dict(changes)
    text |= {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
    }
    if family != "qwen3_5":
        text |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden,
            "shared_expert_intermediate_size": hidden,
        }
    if family == "qwen3_next":
        text |= {
            "partial_rotary_factor": 0.25,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "num_nextn_predict_layers": int(mtp),
        }
        return text | eos | dict(changes)
    text |= {"model_type": f"{family}_text", "mtp_num_hidden_layers": int(mtp), **changes}
    return {"model_type": family, "tie_word_embeddings": tied, "text_config": text} | eos


def _nextn_fields(family: Family, hidden: int, *, mtp: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "moe_intermediate_size": hidden,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
        "num_nextn_predict_layers": int(mtp),
        "tie_word_embeddings": False,
    }
    if family == "glm4_moe":
        return fields | {
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        }
    if family in _INDEXED:  # fewer rows than the tests' prompts have, so that some are left out
        fields |= {"moe_layer_freq": 1, "index_topk": 6, "index_n_heads": 16, "index_head_dim": 32}
        fields |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    return fields | {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "head_dim": 16,
        "attention_bias": False,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def _longcat_fields(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 2,
        "num_layers": layers,
        "ffn_hidden_size": 2 * hidden,
        "expert_ffn_hidden_size": hidden,
        "moe_topk": 2,
        "n_routed_experts": 6,
        "routed_scaling_factor": 1.5,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_bias": False,
    }


def _nemotron_fields(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "hybrid_override_pattern": ("ME*M" * layers)[:layers],
        "mtp_hybrid_override_pattern": "*E",
        "layer_norm_epsilon": 1e-6,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "n_groups": 2,
        "conv_kernel": 4,
        "use_conv_bias": True,
        **dict.fromkeys(("use_bias", "mlp_bias", "mamba_proj_bias", "attention_bias"), False),
        "moe_intermediate_size": hidden,
        "moe_shared_expert_intermediate_size": 2 * hidden,
        "moe_latent_size": hidden // 2,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    }


def _mimo_v2_fields(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "hybrid_layer_pattern": [0, *[1] * (layers - 1)],
        "moe_layer_freq": [0, *[1] * (layers - 1)],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "moe_intermediate_size": hidden,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": None,
        "routed_scaling_factor": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "layernorm_epsilon": 1e-6,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "head_dim": 16,
        "v_head_dim": 8,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "partial_rotary_factor": 0.5,
        "attention_value_scale": 0.7,
    }


def _step_fields(hidden: int) -> dict[str, Any]:
    return {
        "num_attention_groups": 2,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 4},
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
        "moe_layers_enum": "1,2",
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "moe_intermediate_size": hidden,
        "share_expert_dim": hidden,
        "moe_router_scaling_factor": 1.5,
    }


def _random_parameters(model: nn.Module) -> Weights:
    """MLX's own random start, with norms spread around 1 so that a lost shift shows."""
    return {name: _spread(name, value) for name, value in _flat(model).items()}


def _flat(model: nn.Module) -> Weights:
    return dict(tree_flatten(model.parameters()))


def _spread(name: str, value: mx.array) -> mx.array:
    noise = mx.random.normal(value.shape)
    if _is_norm(name):
        return value + 0.1 * noise
    if name.endswith(("e_score_correction_bias", "router_bias", "attention_sink_bias")):
        return 0.1 * mx.abs(noise)
    if name.endswith(
        ("mlp.gate.weight", "mixer.gate.weight")
    ):  # zeros in some classes: every expert the same
        return noise / value.shape[-1] ** 0.5
    return value


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight") or "norm_" in name


def _head(family: Family, config: dict[str, Any], weights: Weights) -> Weights:
    """A head in mlx's layout: one decoder layer with attention, as mlx-lm builds it."""
    module = importlib.import_module(f"mlx_lm.models.{family}".removesuffix("_moe"))
    if family in _NEXTN:
        return _nextn_head(family, config, weights)
    if family in _OTHERS:
        return _other_head(family, config)
    if family == "qwen3_next":
        args, kind = module.ModelArgs.from_dict(config), module.Qwen3NextDecoderLayer
    else:
        args, kind = module.TextModelArgs.from_dict(config["text_config"]), module.DecoderLayer
    layer = kind(args, layer_idx=args.full_attention_interval - 1)
    head = {f"layers.0.{name}": value for name, value in _random_parameters(layer).items()}
    head["fc.weight"] = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False).weight
    return head | _norms(args.hidden_size, "pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")


def _nextn_head(family: Family, config: dict[str, Any], weights: Weights) -> Weights:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    args = module.ModelArgs.from_dict(config)
    if family == "glm_moe_dsa":  # a subclass
        module = importlib.import_module("mlx_lm.models.deepseek_v32")
    kind = getattr(module, _LAYER_CLASSES[family])
    head = _random_parameters(kind(args, args.num_hidden_layers))
    head["eh_proj.weight"] = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False).weight
    head |= _norms(args.hidden_size, "enorm", "hnorm", "shared_head.norm")
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    return head | {f"{to}.weight": weights[f"{name}.weight"] for to, name in copies.items()}


def _other_head(family: Family, config: dict[str, Any]) -> Weights:
    """A head of a layout that one family has alone."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    args = module.ModelArgs.from_dict(config)
    joint = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False).weight
    if family == "mimo":
        norms = "token_layernorm", "hidden_layernorm", "final_layernorm"
        head = _random_parameters(module.TransformerBlock(args))
        return head | {"input_proj.weight": joint} | _norms(args.hidden_size, *norms)
    if family == "longcat_flash":
        head = _random_parameters(longcat.HeadLayer(args)) | {"eh_proj.weight": joint}
        return head | _norms(args.hidden_size, "enorm", "hnorm", "norm")
    if family == "nemotron_h":
        head = _random_parameters(nemotron_h.HeadBlocks(args)) | {"eh_proj.weight": joint}
        return head | _norms(args.hidden_size, "enorm", "hnorm", "final_layernorm")
    if family in _LAYERED:
        kind = module.DecoderLayer if family == "mimo_v2_flash" else module.Step3p5DecoderLayer
        own = (args, False, True) if family == "mimo_v2_flash" else (args, 3)
        head = _random_parameters(kind(*own)) | {"eh_proj.weight": joint}
        return head | _norms(args.hidden_size, "enorm", "hnorm", "shared_head.norm")
    layer = module.DecoderLayer(args) if family == "ernie4_5" else _dense_layer(module, args)
    head = {f"mtp_block.{name}": value for name, value in _random_parameters(layer).items()}
    norms = _norms(args.hidden_size, "mtp_emb_norm", "mtp_hidden_norm")
    return head | {"mtp_linear_proj.weight": joint} | norms


def _dense_layer(module: Any, args: Any) -> nn.Module:
    return module.Ernie4_5_DecoderLayer(args, args.num_hidden_layers)


def _norms(hidden: int, *names: str) -> Weights:
    return {f"{name}.weight": 1.0 + 0.1 * mx.random.normal((hidden,)) for name in names}


def _head_name(family: Family, layers: int, name: str) -> str:
    if family in _NEXTN:
        return f"model.layers.{layers}.{name}"
    if family == "mimo":
        return f"model.mtp_layers.0.{name}"
    if family in _ERNIE:
        part, _, rest = name.partition(".")
        return f"model.{part}.0.{rest}"
    if family == "longcat_flash":
        if name == "norm.weight":
            return "model.mtp.norm.weight"
        name = name.replace("enorm.", "enorm.m.").replace("hnorm.", "hnorm.m.")
        name = name.replace("mlp.", "transformer_layer.mlp.")
        return f"model.mtp.layers.0.{name}"
    if family == "mimo_v2_flash":
        name = name.replace("shared_head.norm.", "final_layernorm.")
        return f"model.mtp.layers.0.{name.replace('post_attention', 'pre_mlp')}"
    if family == "step3p5":
        return f"model.layers.{layers}.{name.replace('shared_head', 'transformer.shared_head')}"
    if family == "nemotron_h" and not name.startswith("layers."):
        return f"mtp.layers.{int(name.startswith('final'))}.{name}"
    return f"language_model.mtp.{name}" if family in _QWEN_35 else f"mtp.{name}"


def _to_raw_step(weights: Weights) -> Weights:
    names = {"switch_mlp.": "moe.", "gate.gate.": "moe.gate.", "gate.router": "moe.router"}
    names |= {"share_expert.": "share_expert."}
    raw: Weights = {}
    for name, value in weights.items():
        to = name
        for ours, theirs in names.items():
            to = to.replace(f"mlp.{ours}", theirs)
        raw[to] = value - 1 if _is_norm(name) else value
    return raw


def _to_raw_nemotron(weights: Weights) -> Weights:
    raw: Weights = {}
    for name, value in weights.items():
        if name.endswith("conv1d.weight"):
            raw[name] = value.moveaxis(1, 2)
            continue
        before, stacked, part = name.partition("switch_mlp.")
        if not stacked:
            raw[name] = value
            continue
        to = "up_proj" if part.startswith("fc1") else "down_proj"
        raw |= {f"{before}experts.{i}.{to}.weight": expert for i, expert in enumerate(value)}
    return raw


def _quantized(weights: Weights, bits: int, paths: set[str]) -> Weights:
    packed: Weights = {}
    for name, value in weights.items():
        stem = name.removesuffix(".weight")
        if stem == name or stem not in paths:
            packed[name] = value
            continue
        parts = mx.quantize(value, group_size=GROUP_SIZE, bits=bits)
        packed |= zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True)
    return packed


def _typed(weights: Weights, dtype: str) -> Weights:
    return {
        name: value
        if name.endswith(_FLOAT32) or value.dtype == mx.uint32
        else value.astype(getattr(mx, dtype))
        for name, value in weights.items()
    }


def _to_raw(weights: Weights, family: Family, experts: Experts) -> Weights:
    raw: Weights = {}
    for name, value in weights.items():
        if "mtp." in name:
            name, layout = name.removeprefix("language_model."), experts
        else:
            name, layout = name.replace("language_model.model.", "model.language_model."), "fused"
            name = name.removeprefix("language_model.")
        if family == "qwen3_next":
            layout = "unfused"
        if name.endswith("conv1d.weight"):
            value = value.moveaxis(1, 2)
        if _is_shifted(name):
            value = value - 1.0
        raw |= _raw_experts(name, value, layout) if ".switch_mlp." in name else {name: value}
    return _fuse_gate_and_up(raw)


def _to_raw_nextn(weights: Weights, config: dict[str, Any]) -> Weights:
    raw: Weights = {}
    for name, value in weights.items():
        raw |= _raw_experts(name, value, "unfused") if ".switch_mlp." in name else {name: value}
    for name in [name for name in raw if name.endswith(".embed_q.weight")]:
        stem = name.removesuffix("embed_q.weight")
        keys = raw.pop(name).swapaxes(-1, -2)
        values = raw.pop(f"{stem}unembed_out.weight")
        both = mx.concatenate([keys, values], axis=1)
        raw[f"{stem}kv_b_proj.weight"] = both.reshape(-1, config["kv_lora_rank"])
    return raw


def _is_shifted(name: str) -> bool:
    """Every norm but the gated one inside linear attention is stored as w - 1."""
    return _is_norm(name) and ".linear_attn." not in name


def _raw_experts(name: str, value: mx.array, layout: Experts) -> Weights:
    stem, part = name.removesuffix(".weight").split(".switch_mlp.")
    if layout == "fused":
        return {f"{stem}.experts.{part}": value}
    return {f"{stem}.experts.{index}.{part}.weight": row for index, row in enumerate(value)}


def _fuse_gate_and_up(weights: Weights) -> Weights:
    for name in [name for name in weights if name.endswith(".experts.gate_proj")]:
        up = name.replace("gate_proj", "up_proj")
        fused = mx.concatenate([weights.pop(name), weights.pop(up)], axis=-2)
        weights[name.replace("gate_proj", "gate_up_proj")] = fused
    return weights


def _save(folder: Path, weights: Weights, shards: int, layout: str) -> None:
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": layout})
        return
    weight_map: dict[str, str] = {}
    names = list(weights)
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = names[index * len(names) // shards : (index + 1) * len(names) // shards]
        mx.save_safetensors(str(folder / file), {k: weights[k] for k in part}, {"format": layout})
        weight_map |= dict.fromkeys(part, file)
    index_file = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))


def bytes_of_layers(checkpoint: Checkpoint, first: int, end: int) -> int:
    """The bytes of the backbone's decoder layers [first, end), as stored."""
    prefixes = tuple(f"layers.{layer}." for layer in range(first, end))
    return sum(nbytes for name, nbytes in _backbone(checkpoint) if any(w in name for w in prefixes))


def bytes_of_ends(checkpoint: Checkpoint) -> int:
    """The bytes of the backbone beside its layers: embeddings, final norm, lm_head."""
    return sum(nbytes for name, nbytes in _backbone(checkpoint) if "layers." not in name)


def _backbone(checkpoint: Checkpoint) -> list[tuple[str, int]]:
    """Names with bytes, without a draft head's."""
    return [
        (tensor.name, tensor.nbytes)
        for tensor in checkpoint.tensors.values()
        if tensor.file not in HEAD_FILES and not tensor.name.startswith("mtp.")
    ]
