"""Quantised copies and grafted heads, loaded as a runner loads them."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conversions import convert_request, strip_head
from engines import DEMO, ORACLE, answer, engine_of, load_quietly, request, spec
from families import ORACLE as FAMILIES
from families import generated, with_head
from models import Experts, Family, make_checkpoint

from exo_node.mtp.families.head import HeadSource
from exo_node.placement.errors import InvalidCheckpoint
from exo_node.shard.checkpoint.chat_format import capabilities
from exo_node.shard.checkpoint.checkpoint import read_checkpoint
from exo_node.shard.checkpoint.head_tensors import HeadFound, HeadMissing, find_head
from exo_node.shard.model.open_model import backbone_is_raw, head_arrays
from exo_node.shard.tools.convert.graft import HEAD_FILE
from exo_node.shard.tools.convert.main import convert, run

CASES: list[tuple[Family, Experts]] = [
    ("qwen3_5", "fused"),
    ("qwen3_5_moe", "fused"),
    ("qwen3_5_moe", "unfused"),
    ("qwen3_next", "unfused"),
    ("deepseek_v3", "unfused"),
    ("glm4_moe", "unfused"),
]


def head_of(folder: Path) -> HeadFound | HeadMissing:
    return find_head(read_checkpoint(folder))


@pytest.mark.parametrize(("family", "experts"), CASES)
@pytest.mark.parametrize("head_bits", [None, 8])
def test_a_quantised_copy_keeps_its_head_and_answers(
    family: Family, experts: Experts, head_bits: int | None, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "raw", family, vocab=4096, experts=experts)
    result = run(convert_request(source, tmp_path / "4bit", bits=4, head_bits=head_bits))
    assert result == {"folder": str(tmp_path / "4bit"), "head": "found", "note": ""}
    head = head_of(tmp_path / "4bit")
    assert isinstance(head, HeadFound)
    assert (head.quantised, head.files) == (head_bits is not None, (HEAD_FILE,))
    stage_spec = spec(tmp_path / "4bit", 0, 4, num_layers=4, native_mtp=True)
    loaded = load_quietly(stage_spec)
    assert loaded.head_state == "loaded"
    plain, drafted = (
        answer(engine_of(loaded, stage_spec), request([5, 6, 7, 8], k, 6, ignore_eos=True))
        for k in (0, 2)
    )
    assert drafted.ids == plain.ids and drafted.stats.proposed_draft_tokens > 0


def test_a_source_with_slips_is_quantised_and_keeps_its_templates(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "raw", "qwen3_5", vocab=4096)
    config = (source / "config.json").read_text().rstrip().removesuffix("}")
    _ = (source / "config.json").write_text(f"\ufeff{config}, }}")
    (source / "additional_chat_templates").mkdir()
    _ = (source / "additional_chat_templates" / "tool_use.jinja").write_text(
        '{{ tools }}<tool_call>{"name": ..., "arguments": ...}</tool_call>'
    )
    (source / "generation_config.json").unlink(missing_ok=True)
    (source / "generation_config.json").mkdir()
    _ = run(convert_request(source, tmp_path / "4bit", bits=4))
    assert read_checkpoint(tmp_path / "4bit").config["quantization"]["bits"] == 4
    assert capabilities(tmp_path / "4bit") == ("tools",)


def test_a_stripped_demo_says_why_and_a_graft_brings_its_drafts_back(tmp_path: Path) -> None:
    """With the oracle's counts: the head drafts what the original's drafts, bit for bit."""
    folder = strip_head(DEMO, tmp_path / "demo")
    missing = head_of(folder)
    assert isinstance(missing, HeadMissing)
    result = run(convert_request(folder, tmp_path / "4bit", bits=4))
    assert missing.reason in result["head"]
    assert isinstance(head_of(tmp_path / "4bit"), HeadMissing)
    assert "they were stripped" in missing.reason and "`exo-node models graft`" in missing.reason
    run(convert_request(folder, folder, head=str(DEMO)))
    assert isinstance(head_of(folder), HeadFound)
    stage_spec = spec(folder, native_mtp=True)
    engine = engine_of(load_quietly(stage_spec), stage_spec)
    row = min(ORACLE, key=lambda each: len(each["greedy_ids"]))
    got = answer(engine, request(row["prompt_ids"], 2, len(row["greedy_ids"]) + 2))
    counts = row["K"]["2"]
    assert list(got.ids) == row["greedy_ids"]
    assert got.stats.proposed_draft_tokens == counts["drafted"]
    assert got.stats.accepted_draft_tokens == counts["accepted"]


def test_acceptance_of_a_quantised_demo_is_near_its_own(tmp_path: Path) -> None:
    run(convert_request(DEMO, tmp_path / "4bit", bits=4))
    share: list[float] = []
    for folder in (DEMO, tmp_path / "4bit"):
        stage_spec = spec(folder, native_mtp=True)
        engine = engine_of(load_quietly(stage_spec), stage_spec)
        wanted_answers = [request(row["prompt_ids"], 1, 32) for row in ORACLE]
        stats = [answer(engine, each).stats for each in wanted_answers]
        accepted = sum(each.accepted_draft_tokens for each in stats)
        share.append(accepted / sum(each.proposed_draft_tokens for each in stats))
    assert share[0] > 0.3
    assert abs(share[0] - share[1]) <= 0.05, share


def test_a_graft_into_a_new_folder_leaves_the_old_one_as_it_was(tmp_path: Path) -> None:
    folder = strip_head(DEMO, tmp_path / "demo")
    before = sorted(path.name for path in folder.iterdir())
    run(convert_request(folder, tmp_path / "new", head=str(DEMO)))
    assert sorted(path.name for path in folder.iterdir()) == before
    assert isinstance(head_of(tmp_path / "new"), HeadFound)


def test_a_head_of_another_model_is_refused_by_what_differs(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "a", "qwen3_5", vocab=4096, mtp=False)
    other = make_checkpoint(tmp_path / "wide", "qwen3_5", vocab=4096, hidden=128)
    with pytest.raises(InvalidCheckpoint, match="hidden_size is 128 there and 64 here"):
        run(convert_request(target, target, head=str(other)))
    same = make_checkpoint(tmp_path / "b", "qwen3_5", vocab=4096)
    tokenizer = json.loads((same / "tokenizer.json").read_text())
    first = next(iter(tokenizer["model"]["vocab"]))
    tokenizer["model"]["vocab"][first + "x"] = tokenizer["model"]["vocab"].pop(first)
    (same / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidCheckpoint, match="has other tokens"):
        run(convert_request(target, target, head=str(same)))
    headless = make_checkpoint(tmp_path / "c", "qwen3_5", vocab=4096, mtp=False)
    with pytest.raises(InvalidCheckpoint, match="gives no head"):
        run(convert_request(target, target, head=str(headless)))
    assert not (target / HEAD_FILE).exists()


def test_a_second_graft_and_a_second_quantisation_are_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "raw", "qwen3_5", vocab=4096)
    with pytest.raises(InvalidCheckpoint, match="has its MTP head"):
        run(convert_request(source, source, head=str(source)))
    run(convert_request(source, tmp_path / "4bit", bits=4))
    with pytest.raises(InvalidCheckpoint, match="is quantised already"):
        run(convert_request(tmp_path / "4bit", tmp_path / "2bit", bits=2))
    assert not (tmp_path / "2bit").exists() and not (tmp_path / ".2bit.part").exists()
    with pytest.raises(InvalidCheckpoint, match="is there already"):
        run(convert_request(source, tmp_path / "4bit", bits=4))


def test_a_conversion_holds_a_few_tensors_at_a_time(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "raw", "llama", layers=24, hidden=256, vocab=512)
    whole = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    target = tmp_path / "4bit"
    target.mkdir()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    convert(
        read_checkpoint(source), target, 4, lambda _written, _all: None, shard_bytes=whole // 32
    )
    assert mx.get_peak_memory() - before < whole / 3
    assert len(list(target.glob("model-*.safetensors"))) > 4


@pytest.mark.parametrize("experts", ["unfused", "fused"])
def test_a_mixtures_grafted_head_drafts_with_the_oracles_counts(
    experts: Experts, tmp_path: Path
) -> None:
    name = "qwen3_5_moe"
    original = tmp_path / "original"
    _ = shutil.copytree(FAMILIES / name, original)
    if experts == "fused":
        fuse(original / "model.safetensors")
    folder = strip_head(original, tmp_path / "stripped")
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
