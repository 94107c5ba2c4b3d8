"""Heads that conversions drop and a graft adds again, of dense models and of mixtures."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conversions import convert_request, strip_head
from engines import answer, engine_of, load_quietly, request, spec
from families import ORACLE, generated, with_head
from models import Experts, Family, make_checkpoint

from exo_node.mtp.families.head import HeadSource
from exo_node.shard.checkpoint.checkpoint import read_checkpoint
from exo_node.shard.checkpoint.head_tensors import HeadFound, HeadMissing, find_head
from exo_node.shard.model.open_model import backbone_is_raw, head_arrays
from exo_node.shard.tools.convert.main import run

CASES: list[tuple[Family, Experts]] = [
    ("qwen3_5", "fused"),
    ("qwen3_5_moe", "fused"),
    ("qwen3_5_moe", "unfused"),
]


def why_not(folder: Path) -> str:
    missing = find_head(read_checkpoint(folder))
    assert isinstance(missing, HeadMissing)
    return missing.reason


@pytest.mark.parametrize(("family", "experts"), CASES)
def test_a_quantised_copy_without_a_head_says_why_and_answers_with_the_grafted_one(
    family: Family, experts: Experts, tmp_path: Path
) -> None:
    original = make_checkpoint(tmp_path / "raw", family, vocab=4096, experts=experts)
    folder = tmp_path / "4bit"
    result = run(convert_request(strip_head(original, tmp_path / "stripped"), folder, bits=4))
    assert "they were stripped" in result["head"] and "they were stripped" in why_not(folder)
    run(convert_request(folder, folder, head=str(original)))
    stage_spec = spec(folder, 0, 4, num_layers=4, native_mtp=True)
    loaded = load_quietly(stage_spec)
    assert loaded.head_state == "loaded"
    plain, drafted = (
        answer(engine_of(loaded, stage_spec), request([5, 6, 7, 8], k, 8, ignore_eos=True))
        for k in (0, 2)
    )
    assert drafted.ids == plain.ids and drafted.stats.proposed_draft_tokens > 0


@pytest.mark.parametrize("experts", ["unfused", "fused"])
def test_a_mixtures_grafted_head_drafts_with_the_oracles_counts(
    experts: Experts, tmp_path: Path
) -> None:
    name = "qwen3_5_moe"
    original = tmp_path / "original"
    _ = shutil.copytree(ORACLE / name, original)
    if experts == "fused":
        fuse(original / "model.safetensors")
    folder = strip_head(original, tmp_path / "stripped")
    assert why_not(folder)
    run(convert_request(folder, folder, head=str(original)))
    checkpoint = read_checkpoint(folder)
    head = find_head(checkpoint)
    assert isinstance(head, HeadFound)
    source = HeadSource(head_arrays(checkpoint, head), backbone_is_raw(checkpoint, head))
    it = with_head(folder, name, "post_norm", source)
    for prompt, expected in zip(it.prompts, it.expected, strict=True):
        rounds = generated(it, prompt, 2, chunk=512)
        drafted = [r for r in rounds if r.drafted]
        assert [token for r in rounds for token in r.tokens] == expected["greedy_ids"]
        assert expected["K"]["2"] == {
            "rounds": len(drafted),
            "drafted": sum(r.drafted for r in drafted),
            "accepted": sum(r.accepted for r in drafted),
        }


def fuse(path: Path) -> None:
    """The experts of the head as one tensor each, as some publishers have them."""
    weights: dict[str, Any] = dict(mx.load(str(path)))  # type: ignore[arg-type]
    part = "mtp.layers.0.mlp.experts."
    count = len([name for name in weights if name.startswith(part)]) // 3
    kinds = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (
        mx.stack([weights.pop(f"{part}{expert}.{kind}.weight") for expert in range(count)])
        for kind in kinds
    )
    weights |= {
        f"{part}gate_up_proj": mx.concatenate([gate, up], axis=-2),
        f"{part}down_proj": down,
    }
    mx.eval(weights)
    mx.save_safetensors(str(path), weights, {"format": "pt"})
