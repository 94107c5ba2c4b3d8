"""Checkpoints whose draft head is stripped, partial, or another model's."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import re
from pathlib import Path
from typing import cast

import mlx.core as mx
from families import head_tensors
from models import make_checkpoint
from tiny import taped_qwen

from exo_node.mtp.family import family_of
from exo_node.mtp.weights import HeadSource, HeadUnusable, load_head
from exo_node.shard.checkpoint.checkpoint import read_checkpoint
from exo_node.shard.checkpoint.head_tensors import HeadMissing, find_head


def loaded(file: Path) -> dict[str, mx.array]:
    """Copies, so that the file may be written anew."""
    weights = {k: mx.array(v) for k, v in cast("dict[str, mx.array]", mx.load(str(file))).items()}
    mx.eval(weights)
    return weights


def test_a_stripped_head_is_missing_whatever_the_config_claims(tmp_path: Path) -> None:
    """Everywhere: conversions drop mtp.* and keep the config."""
    folder = make_checkpoint(tmp_path / "m", "qwen3_5", mtp=True)
    file = folder / "model.safetensors"
    mx.save_safetensors(str(file), {k: v for k, v in loaded(file).items() if "mtp." not in k})
    head = find_head(read_checkpoint(folder))
    assert isinstance(head, HeadMissing)
    assert "stripped" in head.reason
    assert "original repository" in head.reason


def test_a_partial_set_of_experts_is_not_used(tmp_path: Path) -> None:
    """Everywhere: missing experts draft nonsense without any error."""
    folder = make_checkpoint(tmp_path / "m", "qwen3_5_moe", experts="unfused")
    file = folder / "model.safetensors"
    weights = loaded(file)
    expert = next(name for name in weights if re.search(r"mtp.*experts\.1\.up_proj", name))
    mx.save_safetensors(str(file), {k: v for k, v in weights.items() if k != expert})
    head = find_head(read_checkpoint(folder))
    assert isinstance(head, HeadMissing)
    assert "experts.1.up_proj" in head.reason


def test_a_head_of_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    """exo's forks: a head was grafted on whatever was loaded."""
    small = make_checkpoint(tmp_path / "small", "qwen3_5", hidden=64)
    grafted = make_checkpoint(tmp_path / "grafted", "qwen3_5", hidden=128)
    large = make_checkpoint(tmp_path / "large", "qwen3_5", hidden=128, mtp=False)
    other = {f"mtp.{k}": v for k, v in head_tensors(small).items()}
    mx.save_safetensors(str(large / "mtp.safetensors"), other)
    head = find_head(read_checkpoint(large))
    assert isinstance(head, HeadMissing)
    assert "shape" in head.reason
    own = family_of(taped_qwen())  # of 64 wide hiddens, and other projections
    assert own is not None
    unusable = load_head(own, HeadSource(head_tensors(grafted), False), mx.float32)
    assert isinstance(unusable, HeadUnusable)
    assert "has shape" in unusable.reason
