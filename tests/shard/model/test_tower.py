"""Which models read images, and why others do not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from engines import DEMO, answer, load_quietly, request
from mlx import nn
from pictures import (
    DENSE,
    GEMMA,
    MISTRAL,
    conversations,
    loaded,
    picture_engine,
    picture_spec,
    prepared,
)

from exo_node.mtp.families.placed_rope import PlacedRope
from exo_node.placement.errors import InvalidRequest
from exo_node.shard.checkpoint.checkpoint import read_checkpoint
from exo_node.shard.checkpoint.vision import vision_of
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.model import tower as tower_module
from exo_node.shard.model.tower import load_tower

CONFIG: dict[str, Any] = json.loads((DENSE / "config.json").read_text())


def test_a_tower_is_counted_with_the_weights() -> None:
    model = loaded()
    assert model.tower is not None and model.images == "read"
    text = sum(t.nbytes for n, t in read_checkpoint(DENSE).tensors.items() if "visual" not in n)
    assert model.tower.bytes > 0 and model.weight_bytes + model.head_bytes > text


@pytest.mark.parametrize("prefix", ["visual.", "vision_tower."])
def test_other_names_of_a_towers_tensors_are_known(tmp_path: Path, prefix: str) -> None:
    folder = Path(shutil.copytree(DENSE, tmp_path / "model"))
    tensors: dict[str, mx.array] = {}
    stored = cast("dict[str, mx.array]", mx.load(str(DENSE / "model.safetensors")))
    for name, value in stored.items():
        if name.startswith("model.visual."):
            name = prefix + name.removeprefix("model.visual.")
            if prefix == "vision_tower." and name.endswith("patch_embed.proj.weight"):
                value = value.transpose(0, 2, 3, 4, 1)
        tensors[name] = value
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    checkpoint = read_checkpoint(folder)
    tower, state = load_tower(checkpoint, vision_of(checkpoint.config), mx.float32, 4)
    same = loaded().tower
    assert state == "read" and tower is not None and same is not None
    image = prepared(conversations()[0].files[0])
    assert mx.array_equal(tower.features(image).rows, same.features(image).rows).item()


@pytest.mark.parametrize("folder", [GEMMA, MISTRAL])
@pytest.mark.parametrize("outer", ["", "model."])
@pytest.mark.parametrize("inner", ["vision_tower.", "vision_tower.vision_model."])
def test_names_of_several_versions_are_known(
    tmp_path: Path, folder: Path, outer: str, inner: str
) -> None:
    copy, tensors = Path(shutil.copytree(folder, tmp_path / "model")), dict[str, mx.array]()
    stored = cast("dict[str, mx.array]", mx.load(str(folder / "model.safetensors")))
    for name, value in stored.items():
        if name.startswith("vision_tower."):
            bare = name.removeprefix("vision_tower.").removeprefix("vision_model.")
            name = f"{outer}{inner}{bare}"
            if inner.count(".") == 2 and value.ndim == 4:  # as mlx-vlm's conversions have it
                value = value.transpose(0, 2, 3, 1)
        elif name.startswith("multi_modal_projector."):
            name = outer + name
        tensors[name] = value
    mx.save_safetensors(str(copy / "model.safetensors"), tensors, {"format": "pt"})
    checkpoint = read_checkpoint(copy)
    tower, state = load_tower(checkpoint, vision_of(checkpoint.config), mx.float32, 4)
    same = loaded(folder).tower
    assert state == "read" and tower is not None and same is not None
    image = prepared(conversations(folder)[0].files[0], folder)
    assert mx.array_equal(tower.features(image).rows, same.features(image).rows).item()


def test_attention_over_a_large_image_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, image = loaded(MISTRAL).tower, prepared(conversations(MISTRAL)[0].files[0], MISTRAL)
    assert tower is not None
    sizes, plain = list[int](), mx.fast.scaled_dot_product_attention

    def attend(q: mx.array, *args: Any, **named: Any) -> mx.array:
        sizes.append(q.shape[2])
        return plain(q, *args, **named)

    whole = tower.features(image).rows
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(tower_module, "MOST_SCORES", 1000)
    cut = tower.features(image).rows
    count, layers = image.grid[1] * image.grid[2], 3
    assert sum(sizes) == layers * count and max(sizes) == 1000 // count
    assert mx.allclose(whole, cut, rtol=0, atol=1e-5).item()


@pytest.mark.parametrize("folder", [DENSE, GEMMA, MISTRAL])
def test_images_of_other_sizes_do_not_fit(folder: Path) -> None:
    tower, image = loaded(folder).tower, prepared(conversations(folder)[0].files[0], folder)
    assert tower is not None
    time, height, width = image.grid
    others = [replace(image, pixels=image.pixels[:-1])]
    if folder != DENSE:  # Qwen's have any grid
        others.append(replace(image, grid=(time, height * width * 14, 1)))
        others.append(replace(image, grid=(2, height // 2, width)))
    for other in others:
        with pytest.raises(InvalidRequest, match=r"preprocessor_config\.json"):
            _ = tower.features(other)


@pytest.mark.parametrize(
    ("folder", "change"),
    [
        (GEMMA, {"mm_tokens_per_image": 15}),
        (GEMMA, {"mm_tokens_per_image": 1024}),
        (GEMMA, {"mm_tokens_per_image": 9}),
        (GEMMA, {"boi_token_index": None}),
        (GEMMA, {"vision_config": {"image_size": 8, "patch_size": 14}}),
        (MISTRAL, {"vision_feature_layer": [-2, -1]}),
        (MISTRAL, {"projector_hidden_act": "relu"}),
        (MISTRAL, {"spatial_merge_size": 0}),
        (MISTRAL, {"vision_config": {"image_size": 224, "patch_size": 14, "hidden_act": "gelu"}}),
        (DENSE, {"vision_config": None}),
        (DENSE, {"vision_config": []}),
        (DENSE, {"image_token_id": "x"}),
        (DENSE, {"image_token_id": -1}),
        (DENSE, {"image_token_id": 2**40}),
        (DENSE, {"vision_config": {"spatial_merge_size": 0}}),
        (DENSE, {"text_config": {"rope_parameters": {"mrope_section": [3, 3]}}}),
        (DENSE, {"text_config": {"rope_parameters": {"mrope_section": "332"}}}),
        (DENSE, {"text_config": {"rope_parameters": 7}}),
        (DENSE, {"model_type": "another"}),
    ],
)
def test_kinds_that_are_not_built_in_are_text(folder: Path, change: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert vision_of(config) is not None and vision_of(config | change) is None


def test_without_the_extra_a_model_answers_text_and_says_how_to_add_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tower_module, "has_extra", lambda: False)
    model = load_quietly(picture_spec())
    assert model.tower is None and model.images.count("pip install") == 2
    prompt = request(conversations()[0].prompt_ids[:9], 2, 12)
    engine = TextEngine(model, picture_engine()._options)  # pyright: ignore[reportPrivateUsage]
    assert answer(engine, prompt).ids == answer(picture_engine(), prompt).ids


def test_a_conversion_for_text_alone_says_so(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "demo"))
    config = json.loads((folder / "config.json").read_text())
    for field in ("image_token_id", "vision_config"):
        config[field] = CONFIG[field]
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = read_checkpoint(folder)
    assert vision_of(checkpoint.config) is not None
    tower, why = load_tower(checkpoint, vision_of(checkpoint.config), mx.float32, 4)
    assert tower is None and "no vision tower" in why


def test_a_model_of_text_keeps_the_ropes_that_it_has() -> None:
    checkpoint = read_checkpoint(DEMO)
    assert vision_of(checkpoint.config) is None
    model = load_quietly(picture_spec(DEMO, num_layers=16, end=16))
    kinds = {type(m) for _, m in model.model.model.named_modules() if isinstance(m, nn.RoPE)}
    assert kinds == {nn.RoPE} and PlacedRope not in kinds
    assert model.tower is None and "reads text only" in model.images


@pytest.mark.parametrize("field", ["depth", "hidden_size", "num_position_embeddings"])
@pytest.mark.parametrize("value", [10**9, -1, "x", 3])
def test_a_tower_of_other_sizes_is_refused_in_words(field: str, value: Any) -> None:
    config = CONFIG | {"vision_config": CONFIG["vision_config"] | {field: value}}
    tower, why = load_tower(read_checkpoint(DENSE), vision_of(config), mx.float32, 4)
    assert tower is None and ("cannot be loaded" in why or "vision_config" in why)
