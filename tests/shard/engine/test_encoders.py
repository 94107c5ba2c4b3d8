"""Encoders' embeddings are transformers', alone and in batches; other encoders are refused."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from embedders import (
    ENCODERS,
    NEAR,
    SIZE,
    copied,
    difference,
    embedded,
    encoder,
    encoder_engine,
    rows_of,
)

from exo_node.placement.errors import InvalidCheckpoint, LoadFailed
from exo_node.shard.checkpoint.vision import LIGHT_WAY
from exo_node.shard.engine.answers.embedding_engine import EmbeddingEngine
from exo_node.shard.engine.prefill_forward import PrefillForward
from exo_node.shard.model import embedder as module
from exo_node.shard.model import open_model
from exo_node.shard.model.layer_probe import probe_layers
from exo_node.shard.model.stage_model import StageModel


@pytest.fixture(scope="module", params=ENCODERS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(family: str) -> EmbeddingEngine:
    return encoder_engine(family)


def inputs(family: str) -> dict[int, list[int]]:
    return {number: row["ids"] for number, row in enumerate(rows_of(encoder(family)))}


def worst(vectors: dict[int, list[float]], family: str) -> float:
    rows = rows_of(encoder(family))
    return max(difference(vector, rows[n]["embedding"]) for n, vector in vectors.items())


def test_an_input_alone_is_transformers_and_the_same_bits_each_time(
    engine: EmbeddingEngine, family: str
) -> None:
    for number, ids in inputs(family).items():
        first, second = (embedded(engine, {number: ids}) for _ in range(2))
        assert worst(first, family) < NEAR
        assert first == second


def test_inputs_together_share_forwards_and_are_transformers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, build = list[int](), PrefillForward._build  # pyright: ignore[reportPrivateUsage]

    def counted(self: PrefillForward, *args: Any) -> Any:
        sizes.append(len(self.requests))
        return build(self, *args)

    monkeypatch.setattr(PrefillForward, "_build", counted)
    engine = encoder_engine(family, prefill_chunk=8192)
    vectors = embedded(engine, inputs(family))
    assert engine.batching_reason == ""
    assert sizes == [len(vectors)]  # a long input beside short ones: most rows are padding
    assert worst(vectors, family) < NEAR


def test_an_input_longer_than_a_chunk_is_read_at_once_and_holds_no_caches(family: str) -> None:
    engine = encoder_engine(family, prefill_chunk=32)
    long = {3: inputs(family)[3]}
    assert len(long[3]) > 300
    assert worst(embedded(engine, long), family) < NEAR
    assert (engine.live_requests, engine.cache_bytes()) == (0, 0)


def test_attention_a_few_queries_at_a_time_changes_no_embedding(
    engine: EmbeddingEngine, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_SCORES", 20_000)
    assert worst(embedded(engine, inputs(family)), family) < NEAR


def rewritten(folder: Path, change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> Path:
    path = str(folder / "model.safetensors")
    weights = mx.load(path)
    assert isinstance(weights, dict)
    mx.save_safetensors(path, change(weights), {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("family", "prefix", "others"),
    [
        ("bert", "bert.", ("cls.predictions.bias", "bert.pooler.dense.bias")),
        ("bert", "", ("pooler.dense.weight", "embeddings.position_ids")),
        ("xlm_roberta", "roberta.", ("lm_head.bias",)),
        ("modernbert", "model.", ("head.dense.weight", "decoder.bias")),
    ],
)
def test_published_layouts_load(
    tmp_path: Path, family: str, prefix: str, others: tuple[str, ...]
) -> None:
    folder = rewritten(
        copied(tmp_path / family, encoder(family)),
        lambda weights: {
            **{f"{prefix}{name}": value for name, value in weights.items()},
            **dict.fromkeys(others, mx.zeros((3,))),
        },
    )
    vectors = embedded(encoder_engine(family, folder), {0: inputs(family)[0]})
    assert worst(vectors, family) < NEAR


def test_fields_of_a_newer_modernbert_mean_the_same(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    newer = {
        "global_attn_every_n_layers": None,
        "global_rope_theta": 7.0,
        "local_rope_theta": 7.0,
        "layer_types": (kinds * 2)[:5],
        "rope_parameters": ropes,
    }
    folder = copied(tmp_path / "newer", encoder("modernbert"), **newer)
    engine = encoder_engine("modernbert", folder)
    assert worst(embedded(engine, inputs("modernbert")), "modernbert") < NEAR


def test_the_layers_of_an_encoder_are_timed(family: str) -> None:
    """By its class, whose masks are arrays."""
    pooling = "mean" if family == "bert" else "cls"
    model = open_model.open_model(encoder(family), pooling=pooling)
    layers = len(cast(Any, model).layers)
    stage, ticks = StageModel(model, 0, layers), count()
    times = probe_layers(stage, SIZE, mx.float32, lambda: next(ticks) / 100, drafts=0, tail=True)
    assert min(times.decode_s, times.prefill_s, times.tail_s) > 0


def test_a_quantised_encoder_embeds_nearly_the_same(tmp_path: Path) -> None:
    quantization = {"group_size": 32, "bits": 8}
    folder = copied(tmp_path / "quantised", encoder("bert"), quantization=quantization)

    def quantised(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        changed = dict[str, mx.array]()
        for name, value in weights.items():
            if value.ndim == 2 and "token_type" not in name:
                parts = mx.quantize(value, group_size=32, bits=8)
                names = ("weight", "scales", "biases")
                changed |= {name.replace("weight", n): p for n, p in zip(names, parts, strict=True)}
            else:
                changed[name] = value
        return changed

    engine = encoder_engine("bert", rewritten(folder, quantised))
    assert 0 < worst(embedded(engine, inputs("bert")), "bert") < 0.02


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("bert", {"hidden_act": "relu"}, "hidden_act"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("xlm_roberta", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("modernbert", {"hidden_activation": "silu"}, "hidden_activation"),
        ("modernbert", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("modernbert", {"layer_types": 7}, "layer_types"),
        ("modernbert", {"rope_parameters": 7}, "rope_parameters"),
        ("modernbert", {"rope_parameters": {"full_attention": 7}}, "rope_parameters"),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters",
        ),
        *[("modernbert", {"local_attention": n}, "local_attention") for n in (1, -1, 1.5, True)],
        ("modernbert", {"global_attn_every_n_layers": -1}, "global_attn_every_n_layers"),
    ],
    ids=str,
)
def test_an_encoder_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], field: str
) -> None:
    folder = copied(tmp_path / family, encoder(family), **changes)
    with pytest.raises(InvalidCheckpoint) as refused:
        _ = encoder_engine(family, folder)
    assert refused.value.param == f"config.json: {field}"
    assert field in refused.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 7},
        {"num_attention_heads": 0},
        {"intermediate_size": "wide"},
        {"layer_norm_eps": "small"},
        {"type_vocab_size": 3},
        {"vocab_size": 7},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_the_tensors_is_one_clear_error(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = copied(tmp_path / "mutated", encoder("bert"), **changes)
    with pytest.raises((InvalidCheckpoint, LoadFailed)):
        _ = embedded(encoder_engine("bert", folder), {0: inputs("bert")[0]})


def test_a_number_that_the_class_cannot_use_names_config_json(tmp_path: Path) -> None:
    folder = copied(tmp_path / "mutated", encoder("modernbert"), global_rope_theta="x")
    with pytest.raises(LoadFailed, match=r"take the publisher's config\.json"):
        _ = encoder_engine("modernbert", folder)


def test_the_error_of_many_wrong_tensors_is_one_short_line(tmp_path: Path) -> None:
    folder = copied(tmp_path / "mutated", encoder("bert"), num_hidden_layers=400)
    with pytest.raises(InvalidCheckpoint, match="Missing 6352 parameters") as refused:
        _ = encoder_engine("bert", folder)
    assert "\n" not in refused.value.message and len(refused.value.message) < 1000


def test_a_context_beyond_the_positions_is_refused() -> None:
    with pytest.raises(LoadFailed, match="positions for 1024 tokens") as refused:
        _ = encoder_engine("xlm_roberta", context_length=1025)
    assert refused.value.param == "context_length"


def test_without_the_extra_the_load_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_model, "has_extra", lambda: False)
    with pytest.raises(LoadFailed) as refused:
        _ = encoder_engine("bert")
    assert LIGHT_WAY in refused.value.message and "encoders" in refused.value.message


def test_pooling_that_the_files_do_not_declare_is_refused_at_the_load(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="by 'cls' pooling"):
        _ = encoder_engine("bert", pooling="cls")
    folder = copied(tmp_path / "silent", encoder("bert"))
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(InvalidCheckpoint, match="no 1_Pooling") as refused:
        _ = encoder_engine("bert", folder, pooling="")
    assert refused.value.param == "pooling"
    vectors = embedded(encoder_engine("bert", folder, pooling="mean"), {0: inputs("bert")[0]})
    assert worst(vectors, "bert") < NEAR
