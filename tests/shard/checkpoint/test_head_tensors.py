"""The native MTP head is found under every name that publishers use, or a reason says why not."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from models import DEMO, bytes_of_ends, bytes_of_layers, make_checkpoint

from exo_node.mtp.families.head import HeadSource
from exo_node.mtp.families.table import family_of
from exo_node.mtp.families.weights import load_head
from exo_node.shard.checkpoint.checkpoint import HEAD_FILES, read_checkpoint
from exo_node.shard.checkpoint.head_tensors import HeadFound, HeadMissing, find_head

Weights = dict[str, mx.array]


def load(path: Path) -> Weights:
    return importlib.import_module("mlx.core").load(str(path))


def save(path: Path, weights: Weights) -> None:
    path.parent.mkdir(exist_ok=True)
    # Written beside it: the arrays may still be lazy views of the file that is replaced.
    importlib.import_module("mlx.core").save_safetensors(str(path.with_suffix(".new")), weights)
    path.with_suffix(".new.safetensors").replace(path)


def rewrite(folder: Path, change: Callable[[Weights], object]) -> None:
    """Apply `change` to the tensors of a checkpoint of one file."""
    weights = load(folder / "model.safetensors")
    change(weights)
    save(folder / "model.safetensors", weights)


def move_head(folder: Path, file: str, prefix: str) -> None:
    """Put the head into a file of its own, or only rename it where `file` is the backbone's."""
    weights = load(folder / "model.safetensors")
    head = {f"{prefix}{k.removeprefix('mtp.')}": v for k, v in weights.items() if k[:4] == "mtp."}
    body = {k: v for k, v in weights.items() if k[:4] != "mtp."}
    if file == "model.safetensors":
        body |= head
    else:
        save(folder / file, head)
    save(folder / "model.safetensors", body)


def whole_head(folder: Path) -> HeadFound:
    head = find_head(read_checkpoint(folder))
    assert isinstance(head, HeadFound), head
    return head


def reason(folder: Path) -> str:
    head = find_head(read_checkpoint(folder))
    assert isinstance(head, HeadMissing)
    return head.reason


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "dense", "qwen3_5")


def test_the_demos_head_has_fifteen_tensors_in_the_backbones_last_file() -> None:
    head = whole_head(DEMO)
    assert len(head.tensors) == 15
    assert head.files == ("model-00003-of-00003.safetensors",)
    assert head.shares_file_with_backbone and not head.quantised
    assert head.tensors["fc.weight"].shape == (256, 512)
    assert head.tensors["fc.weight"].name == "mtp.fc.weight"
    assert head.nbytes == sum(tensor.nbytes for tensor in head.tensors.values()) == 1_968_896


@pytest.mark.parametrize(
    "prefix",
    [
        "mtp.",
        "language_model.mtp.",
        "model.language_model.mtp.",
        "language_model.model.mtp.",
        "model.mtp.",
    ],
)
@pytest.mark.parametrize(
    "file",
    ["model.safetensors", *HEAD_FILES],
)
def test_a_head_is_found_under_each_prefix_in_each_file(
    prefix: str, file: str, dense: Path
) -> None:
    move_head(dense, file, prefix)
    head = whole_head(dense)
    assert len(head.tensors) == 15 and "layers.0.self_attn.q_norm.weight" in head.tensors
    assert head.files == (file,)
    assert head.shares_file_with_backbone is (file == "model.safetensors")


def test_a_head_in_a_file_of_its_own_needs_no_prefix(dense: Path) -> None:
    before = read_checkpoint(dense)
    move_head(dense, "mtp/weights.safetensors", "")
    assert len(whole_head(dense).tensors) == 15
    after = read_checkpoint(dense)
    assert bytes_of_layers(after, 0, 1) == bytes_of_layers(before, 0, 1) > 0
    assert bytes_of_ends(after) == bytes_of_ends(before) > 0


def test_a_second_head_is_ambiguous(dense: Path) -> None:
    save(dense / "mtp.safetensors", {"model.mtp.fc.weight": mx.zeros((64, 128))})
    text = reason(dense)
    assert "fc.weight twice" in text and "model.mtp.fc.weight" in text


@pytest.mark.parametrize("experts", ["fused", "unfused", "stacked"])
def test_a_head_of_mixed_bits_is_loaded_as_it_is_found(experts: str, tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path / "m", "qwen3_5_moe", raw=experts != "stacked", experts=cast(Any, experts)
    )
    rewrite(folder, quantise_mixed)
    head = whole_head(folder)
    assert head.quantised
    files = {file: load(folder / file) for file in head.files}
    arrays = {key: files[tensor.file][tensor.name] for key, tensor in head.tensors.items()}
    model = importlib.import_module("mlx_lm.utils").load_model(folder)[0]
    loaded: Any = load_head(
        family_of(model) or pytest.fail("no family"),
        HeadSource(arrays, backbone_is_raw=experts != "stacked"),
        None,
    )
    bits = {path: module.bits for path, module in loaded.named_modules() if "bits" in vars(module)}
    assert set(bits.values()) == {3, 4, 5, 6, 8}
    assert bits["layer.self_attn.v_proj"] == 5
    assert bits["layer.mlp.switch_mlp.up_proj"] == 8
    assert bits["layer.mlp.gate"] == 6


def quantise_mixed(weights: Weights) -> None:
    """Every matrix but fc, each kind with its own bits; fused experts get the suffix of OptiQ's."""
    kinds = {"q_proj": 3, "k_proj": 4, "v_proj": 5, "o_proj": 3, "shared_expert": 4, ".gate.": 6}
    for name in [n for n in weights if "mtp.layers" in n and weights[n].ndim > 1]:
        bits = next((bits for part, bits in kinds.items() if part in name), 8)
        stem = name.removesuffix(".weight")
        packed: Any = mx.quantize(weights.pop(name), group_size=64, bits=bits)
        weights |= dict(
            zip((f"{stem}.{p}" for p in ("weight", "scales", "biases")), packed, strict=True)
        )
