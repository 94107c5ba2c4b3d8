"""Text models of which mlx-vlm alone has a class: its ids on one node, together, and in stages."""

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from zoo import VOCABULARY
from zoo_runs import PROMPT, as_two_stages, on_one_node, small, together_on_one_node

from exo_node.node.store.listing import check
from exo_node.placement.errors import InvalidCheckpoint
from exo_node.shard.checkpoint.model_classes import has_class
from exo_node.shard.model.open_model import open_model
from exo_node.shard.model.small_config import small_config
from exo_node.shard.model.split_check import stage_fault

LAYERS = 4
TOKENS = 12
_USUAL: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 16,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_KOLIBRI = {"rms_norm_eps": 1e-6, "shared_expert_intermediate_size": 32}
_STEP = {
    "model_type": "step3p5",
    "num_attention_groups": 2,
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 32,
    "moe_layers_enum": [1, 2, 3],
    "attention_other_setting": {
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "head_dim": 16,
    },
    "use_head_wise_attn_gate": True,
    "partial_rotary_factors": [0.5, 1, 0.5, 1],
}
_FLINT = {
    "shared_expert_intermediate_size": 32,
    "no_rope_layer_indices": [1, 3],
    "mlp_only_layers": [0],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "cohere2_moe": {**_USUAL, **_SLIDING, **_EXPERTS, "num_key_value_heads": 2},
    "flint": {**_USUAL, **_SLIDING, **_EXPERTS, **_FLINT, "num_key_value_heads": 2},
    "k2_horizon": {**_USUAL, "num_key_value_heads": 2},
    "kolibri1": {**_USUAL, **_SLIDING, **_EXPERTS, **_KOLIBRI, "num_key_value_heads": 2},
    "step3p7": {"vision_config": {"width": 8}, "text_config": {**_USUAL, **_SLIDING, **_STEP}},
}


def config_of(name: str) -> dict[str, Any]:
    return {"model_type": name, **CONFIGS[name]}


def their_ids(model: Any, prompt: list[int]) -> list[int]:
    """By mlx-vlm's own model, with its own caches."""
    theirs, ids, rows = model.language_model, list[int](), mx.array([prompt])
    caches = theirs.make_cache()
    for _ in range(TOKENS):
        logits = theirs(rows, cache=caches).logits[0, -1]
        ids.append(cast("int", logits.argmax().item()))
        rows = mx.array([ids[-1:]])
    return ids


@pytest.mark.parametrize("name", CONFIGS)
def test_one_node_and_two_stages_have_mlx_vlms_ids(name: str) -> None:
    config = config_of(name)
    model = cast(Any, small(config))
    expected, other = their_ids(model, PROMPT), [(53 * i + 7) % 60 + 1 for i in range(40)]
    caches = zip(model.make_cache(), model.language_model.make_cache(), strict=True)
    assert all(type(ours).__name__ == type(theirs).__name__ for ours, theirs in caches)
    assert on_one_node(model, tokens=TOKENS) == expected
    assert together_on_one_node(model, [PROMPT, other], 8, TOKENS) == [
        expected,
        their_ids(model, other),
    ]
    for at in range(1, LAYERS):
        assert as_two_stages(model, config, at, tokens=TOKENS) == expected
    assert stage_fault(json.dumps(small_config(config)), 0, 2) == ("", ())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_in_mlx_vlms_names_is_read_without_its_towers(
    tmp_path: Path, name: str
) -> None:
    model = small(config_of(name))
    flat = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    parts = ("vision_model.x.weight", "vit_large_projector.weight") if name == "step3p7" else ()
    tower = dict.fromkeys(parts, mx.zeros((2, 2)))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(flat) | tower, {"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)))
    loaded, ids = cast(Any, open_model(tmp_path)), mx.array([PROMPT])
    assert mx.array_equal(loaded(ids), cast(Any, model)(ids))
    assert has_class({"model_type": name.replace("_", "")})


def test_flints_checkpoint_is_read_under_its_publishers_names(tmp_path: Path) -> None:
    """Each expert has tensors of its own, and the bias of a router belongs to its gate."""
    model, published = small(config_of("flint")), dict[str, mx.array]()
    for name, value in cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())):
        name = name.removeprefix("language_model.")
        stem, experts, projection = name.partition(".switch_mlp.")
        for i in range(value.shape[0] if experts else 0):
            published[f"{stem}.experts.{i}.{projection}"] = mx.contiguous(value[i])
        if not experts:
            published[name.replace(".expert_bias", ".gate.e_score_correction_bias")] = value
    mx.save_safetensors(str(tmp_path / "model.safetensors"), published, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config_of("flint")))
    loaded, ids = cast(Any, open_model(tmp_path)), mx.array([PROMPT])
    assert mx.array_equal(loaded(ids), cast(Any, model)(ids))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("glm5_next", "it keeps pooled keys"),
        ("hy_v4", "share the keys"),
        ("glm4v_moe", "positions"),
    ],
)
def test_a_class_that_is_not_used_is_refused_with_the_reason(
    tmp_path: Path, name: str, why: str
) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"x": mx.zeros(1)})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    says = rf"no class for model_type '{name}'.*{why}"
    with pytest.raises(InvalidCheckpoint, match=says):
        _ = open_model(tmp_path)
    with pytest.raises(InvalidCheckpoint, match=says):
        _ = check(tmp_path, "m")
