"""Tiny random checkpoints of Qwen3.8-Flash-Next in the published layout, and mlx-vlm's own forward
of them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from models import DEMO

from exo_node.shard.model.open_model import model_classes
from exo_node.shard.text.bare_packages import bare_package

LAYERS: Final = 5
VOCABULARY: Final = 512
BUDGET: Final = 16
"""Keys that attention reads beside the last ones: fewer than the tests' prompts have."""


def config_of(
    dtype: str = "float32", vocabulary: int = VOCABULARY, **changes: Any
) -> dict[str, Any]:
    text: dict[str, Any] = {
        "model_type": "qwen4_exp_text",
        "dtype": dtype,
        "hidden_size": 64,
        "num_hidden_layers": LAYERS,
        "layer_types": [
            "full_attention" if i in (2, 4) else "linear_attention" for i in range(LAYERS)
        ],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "hc_count": 4,
        "hc_lowrank": 32,
        "ple_layer_ids": [2],
        "ple_embed_dim": 128,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 200,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 3,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": BUDGET,
        "indexer_compress_ratio": 4,
        "output_gate_type": "sigmoid",
        "eos_token_id": vocabulary - 1,
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
        },
        **changes,
    }
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "tie_word_embeddings": False,
        "eos_token_id": vocabulary - 1,
        "text_config": text,
    }


def theirs(config: dict[str, Any], seed: int = 0) -> Any:
    """mlx-vlm's own language model with random weights; norms and biases are no constants."""
    _ = model_classes(config)
    from mlx_vlm.models.qwen4_exp.language import LanguageModel

    mx.random.seed(seed)
    outer = SimpleNamespace(
        vision_config=SimpleNamespace(spatial_merge_size=2),
        image_token_id=config.get("image_token_id", -1),
        video_token_id=-2,
        vision_start_token_id=config.get("vision_start_token_id", -3),
    )
    model = LanguageModel(_text(config), cast("Any", outer))
    _fill(model, getattr(mx, config["text_config"]["dtype"]))
    return model


def their_tower(config: dict[str, Any], seed: int = 2) -> Any:
    """mlx-vlm's own vision tower with random weights."""
    bare_package("mlx_vlm.models.qwen3_vl")
    from mlx_vlm.models.qwen3_vl.vision import VisionModel
    from mlx_vlm.models.qwen4_exp.config import VisionConfig

    mx.random.seed(seed)
    tower = VisionModel(VisionConfig.from_dict(dict(config["vision_config"])))
    _fill(tower, mx.float32)
    return tower


def _fill(model: nn.Module, dtype: mx.Dtype) -> None:
    flat = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    _ = model.load_weights([(name, _drawn(name, value, dtype)) for name, value in flat])
    _ = model.eval()
    mx.eval(model.parameters())


def _text(config: dict[str, Any]) -> Any:
    from mlx_vlm.models.qwen4_exp.config import TextConfig

    return TextConfig.from_dict(dict(config["text_config"]))


def _drawn(name: str, value: mx.array, dtype: mx.Dtype) -> mx.array:
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    noise = mx.random.normal(value.shape)
    if value.ndim == 1:
        drawn = value + 0.2 * noise
    elif "conv1d" in name:
        drawn = noise * value.shape[1] ** -0.5
    elif "embed" in name:
        drawn = noise
    else:
        drawn = noise * value.shape[-1] ** -0.5
    return drawn.astype(mx.float32 if name.endswith("A_log") else dtype)


def their_head(config: dict[str, Any], seed: int = 1) -> Any:
    """mlx-vlm's own class of the head with random weights."""
    bare_package("mlx_vlm.speculative.drafters.qwen4_exp_mtp")
    from mlx_vlm.speculative.drafters.qwen4_exp_mtp.config import Qwen4ExpMTPConfig
    from mlx_vlm.speculative.drafters.qwen4_exp_mtp.qwen4_exp_mtp import Qwen4ExpMTPDraftModel

    mx.random.seed(seed)
    head = Qwen4ExpMTPDraftModel(Qwen4ExpMTPConfig(text_config=_text(config)))
    _fill(head, getattr(mx, config["text_config"]["dtype"]))
    return head


def fit(model: Any, head: Any) -> None:
    """Makes an embedding decide most of what follows, so that the head drafts right at times."""
    for module in (model, head):
        for name, value in cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())):
            if name.endswith(
                ("o_proj.weight", "out_proj.weight", "down_proj.weight", "value_proj.weight")
            ):
                _ = module.load_weights([(name, 0.3 * value)], strict=False)
    same = {"fc_embedding.weight": mx.eye(64), "fc_hidden.weight": mx.zeros((64, 64))}
    same["pre_fc_norm_embedding.weight"] = mx.zeros(64)
    mixer = tree_flatten(model.model.hyper_connection_mixer.parameters())
    same |= {f"hyper_connection_mixer.{name}": value for name, value in mixer}
    _ = head.load_weights(list(same.items()), strict=False)


def published(model: nn.Module, head: nn.Module | None = None) -> dict[str, mx.array]:
    """The model's tensors as the publisher names and shapes them."""
    named = dict[str, mx.array]()
    for name, value in cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())):
        name = name.replace("ngram_embedding.shards.", "ngram_embedding.shard_")
        name = (
            name
            if name.startswith("lm_head")
            else name.replace("model.", "model.language_model.", 1)
        )
        named[name] = value.moveaxis(2, 1) if "conv1d" in name else value
    stored = tree_flatten(head.parameters()) if head is not None else []
    named |= {f"mtp.{name}": value for name, value in cast("list[tuple[str, mx.array]]", stored)}
    for name in [each for each in named if "switch_mlp.gate_proj" in each]:
        stem = name.removesuffix(".switch_mlp.gate_proj.weight")
        gate, up, down = (
            named.pop(f"{stem}.switch_mlp.{p}_proj.weight") for p in ("gate", "up", "down")
        )
        named[f"{stem}.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
        named[f"{stem}.experts.down_proj"] = down
    return named


def in_fp8(weights: dict[str, mx.array]) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """The publisher's tensors with experts and n-gram tables in FP8, and the same numbers as they
    are without it."""
    packed, whole = dict(weights), dict(weights)
    for name, value in weights.items():
        if ".ngram_embedding.shard_" in name:
            packed[name] = mx.to_fp8(value)
            packed[name.partition(".shard_")[0] + ".weight_scale"] = mx.array([0.5], mx.bfloat16)
            whole[name] = mx.from_fp8(packed[name], dtype=mx.bfloat16) * mx.array(0.5, mx.bfloat16)
        stem, has_experts, part = name.rpartition(".experts.")
        if not has_experts:
            continue
        del packed[name]
        half = value.shape[1] // 2
        rows = (("gate", value[:, :half]), ("up", value[:, half:]))
        for projection, each in rows if part == "gate_up_proj" else (("down", value),):
            for expert, matrix in enumerate(each):
                of_expert = f"{stem}.experts.{expert}.{projection}_proj.weight"
                scale = mx.array([[0.25 + expert / 8]])
                packed[of_expert] = mx.to_fp8(matrix / scale)
                packed[f"{of_expert}_scale_inv"] = scale
        scales = [mx.array(0.25 + expert / 8) for expert in range(len(value))]
        numbers = [
            mx.from_fp8(mx.to_fp8(matrix / scale), dtype=mx.float32) * scale
            for matrix, scale in zip(value, scales, strict=True)
        ]
        whole[name] = mx.stack(numbers)
    return packed, whole


def save(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> Path:
    """Writes a checkpoint of two files; with the demo's tokenizer if the vocabulary is its."""
    folder.mkdir(parents=True)
    names = sorted(weights)
    for number in range(2):
        part = {name: mx.contiguous(weights[name]) for name in names[number::2]}
        mx.save_safetensors(
            str(folder / f"model-0000{number + 1}-of-00002.safetensors"), part, {"format": "pt"}
        )
    (folder / "config.json").write_text(json.dumps(config))
    if config["text_config"]["vocab_size"] == 4096:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(DEMO / name, folder / name)
    return folder


def name_fp8(folder: Path) -> None:
    """Names bytes in safetensors headers as the publisher does; MLX writes another type."""
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = data[8:end].replace(b'"U8"', b'"F8_E4M3"')
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


def greedy(model: Any, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[mx.array]]:
    """mlx-vlm's own ids and logits, one token after the other."""
    cache, ids, logits = model.make_cache(), list[int](), list[mx.array]()
    rows = mx.array([list(prompt)])
    for _ in range(tokens):
        logits.append(model(rows, cache=cache).logits[0, -1])
        ids.append(cast("int", logits[-1].argmax().item()))
        rows = mx.array([[ids[-1]]])
    return ids, logits
