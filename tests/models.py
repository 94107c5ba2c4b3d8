"""Makes tiny random checkpoints of several families, in the layouts that publishers use."""

# mlx's stubs leave the types of tree_flatten and save_safetensors partly unknown.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

import importlib
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

DEMO = Path(__file__).parent.parent / "shard" / "models" / "demo"

Family = Literal["qwen3_5", "qwen3_5_moe", "qwen3", "llama"]
Experts = Literal["fused", "unfused"]
Weights = dict[str, mx.array]

_HYBRID = ("qwen3_5", "qwen3_5_moe")


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
    experts: Experts = "fused",
    tied: bool = False,
    shards: int = 1,
    seed: int = 0,
) -> Path:
    """Write a random checkpoint into `folder`, which is made, and return it.

    For the qwen3_5 families `raw` is the original repositories' layout: `model.language_model.*`,
    norms stored as w - 1, conv1d as (C, 1, K), `experts.gate_up_proj`, the head as `mtp.*` with
    its experts as `experts` says. `raw=False` is mlx-lm's layout with the head, if any, as
    `language_model.mtp.*`. Other families have one layout and no head. More `shards` than one
    come with an index. A vocabulary of 4096 brings the demo's tokenizer with it.
    """
    mx.random.seed(seed)
    config = _config(family, dtype, layers, hidden, vocab, mtp=mtp, tied=tied)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    weights = _random_parameters(module.Model(module.ModelArgs.from_dict(config)))
    if family in _HYBRID:
        if mtp:
            weights |= {f"language_model.mtp.{k}": v for k, v in _head(config, hidden).items()}
        if raw:
            weights = _to_raw(weights, experts)
    kept = {
        k: v if k.endswith("A_log") else v.astype(getattr(mx, dtype)) for k, v in weights.items()
    }
    folder.mkdir(parents=True)
    _save(folder, kept, shards, "pt" if raw else "mlx")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if vocab == 4096:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(DEMO / name, folder / name)
    return folder


def _config(
    family: Family, dtype: str, layers: int, hidden: int, vocab: int, *, mtp: bool, tied: bool
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
    if family not in _HYBRID:
        return text | eos
    text |= {
        "model_type": f"{family}_text",
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "mtp_num_hidden_layers": int(mtp),
    }
    if family == "qwen3_5_moe":
        text |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden,
            "shared_expert_intermediate_size": hidden,
        }
    return {"model_type": family, "tie_word_embeddings": tied, "text_config": text} | eos


def _random_parameters(model: nn.Module) -> Weights:
    """MLX's own random start, with norms spread around 1 so that a lost shift shows."""
    return {
        name: value + 0.1 * mx.random.normal(value.shape) if _is_norm(name) else value
        for name, value in dict(tree_flatten(model.parameters())).items()
    }


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight") or "norm_" in name


def _head(config: dict[str, Any], hidden: int) -> Weights:
    """A head in mlx's layout: one decoder layer with full attention, as mlx-lm builds it."""
    qwen = importlib.import_module("mlx_lm.models.qwen3_5")
    args = qwen.TextModelArgs.from_dict(config["text_config"])
    layer = qwen.DecoderLayer(args, layer_idx=args.full_attention_interval - 1)
    head = {f"layers.0.{name}": value for name, value in _random_parameters(layer).items()}
    head["fc.weight"] = nn.Linear(2 * hidden, hidden, bias=False).weight
    for name in ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm"):
        head[f"{name}.weight"] = 1.0 + 0.1 * mx.random.normal((hidden,))
    return head


def _to_raw(weights: Weights, experts: Experts) -> Weights:
    raw: Weights = {}
    for name, value in weights.items():
        if ".mtp." in name:
            name, layout = name.removeprefix("language_model."), experts
        else:
            name, layout = name.replace("language_model.model.", "model.language_model."), "fused"
            name = name.removeprefix("language_model.")
        if name.endswith("conv1d.weight"):
            value = value.moveaxis(1, 2)
        if _is_shifted(name):
            value = value - 1.0
        raw |= _raw_experts(name, value, layout) if ".switch_mlp." in name else {name: value}
    return _fuse_gate_and_up(raw)


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
