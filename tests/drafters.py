"""Tiny block drafters in the published layout, and a drafter that knows the answer."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from exo_node.shard.text.bare_packages import bare_package

LAYER_IDS = [0, 2, 3]
BLOCK = 8
MASK = 5
_LAYOUTS = ("qwen3_dflash", "dflash2")


def drafter_config(vocab: int, hidden: int = 64, layers: int = 4, **changes: Any) -> dict[str, Any]:
    """config.json of a drafter for a target of these sizes."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "block_size": BLOCK,
        "num_target_layers": layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": LAYER_IDS},
        **changes,
    }


def second_config(vocab: int, **changes: Any) -> dict[str, Any]:
    """config.json of a drafter in the second layout, whose drafts follow each other."""
    sizes = {"conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}
    scales = {"input_embedding_scale": 0.5, "output_multiplier": 2.0}
    config = drafter_config(vocab, architectures=["DFlash2DraftModel"], **changes)
    return {**config, "dflash_config": {**config["dflash_config"], **sizes, **scales}}


def make_drafter(folder: Path, config: dict[str, Any], *, seed: int = 3) -> Path:
    """A drafter's checkpoint of random numbers."""
    module = stock_module(config)
    mx.random.seed(seed)
    stored: Any = tree_flatten(module.parameters())
    weights = {
        _published(name): mx.random.normal(value.shape) / max(1, value.shape[-1]) ** 0.5
        if value.ndim > 1
        else 1 + 0.1 * mx.random.normal(value.shape)
        for name, value in stored
    }
    folder.mkdir(parents=True)
    _ = (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    return folder


def _published(name: str) -> str:
    return name.removesuffix(".weight") if name.endswith("codebook.weight") else name


def stock_module(config: dict[str, Any]) -> Any:
    """mlx-vlm's own model, as this project does not change it."""
    for package in ("mlx_vlm.models", *(f"mlx_vlm.speculative.drafters.{d}" for d in _LAYOUTS)):
        bare_package(package)
    if config["architectures"] == ["DFlash2DraftModel"]:
        from mlx_vlm.speculative.drafters.dflash2.config import DFlash2Config
        from mlx_vlm.speculative.drafters.dflash2.dflash2 import DFlash2DraftModel

        return DFlash2DraftModel(DFlash2Config.from_dict(config))
    from mlx_vlm.speculative.drafters.qwen3_dflash.config import DFlashConfig
    from mlx_vlm.speculative.drafters.qwen3_dflash.dflash import DFlashDraftModel

    return DFlashDraftModel(DFlashConfig.from_dict(config))


def force(drafter: Any, texts: Sequence[Sequence[int]], wrong: Callable[[int], bool]) -> None:
    """Has a `BlockDrafter` draft each of `texts`, prompts with their answers, where it is given
    that text's last token, and another token at the positions that are `wrong`.

    It takes the positions from its caches, so that it is right only as long as they are.
    """
    drafter = getattr(drafter, "drafter", drafter)  # of a pair
    longest = max(map(len, texts)) + 32
    table = mx.array([[*text, *[0] * (longest - len(text))] for text in texts])
    is_wrong = mx.array([wrong(i) for i in range(longest)])
    size = drafter.module.config.vocab_size

    def block(first: mx.array, k: int, cache: Any) -> mx.array:
        part = getattr(cache, "caches", [cache])[0]
        rows = mx.broadcast_to(mx.array(part.offset).reshape(-1), (first.shape[0],))
        last = drafter.embed(table[:, rows].T)  # (B, texts, H)
        which = mx.argmin(mx.abs(last - first).sum(axis=-1), axis=1)
        at = rows[:, None] + 1 + mx.arange(k)
        tokens = mx.take_along_axis(table[which], at, axis=1)
        tokens = mx.where(is_wrong[at], (tokens + 1) % size, tokens)
        return mx.where(mx.arange(size) == tokens[..., None], 20.0, 0.0)

    drafter.block, drafter.logits = block, _as_it_is


def _as_it_is(output: mx.array) -> mx.array:
    return output
