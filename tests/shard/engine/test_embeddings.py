"""Embeddings are transformers', alone and in batches, however the engine comes to them."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from embedders import (
    INPUTS,
    NEAR,
    ROWS,
    SIZE,
    Inline,
    begin,
    copied,
    difference,
    embedded,
    embedding_engine,
)

from exo_node.placement.errors import InvalidCheckpoint, LoadFailed, NumericError, StateLost
from exo_node.shard.engine.answers import embedding_engine as module
from exo_node.shard.engine.answers.embedding_engine import MOST_RUNNING, EmbeddingEngine
from exo_node.shard.engine.prefill_forward import PrefillForward
from exo_node.shard.model.embedder import Embedder
from exo_node.shard.model.open_model import open_model


@pytest.fixture(scope="module")
def engine() -> EmbeddingEngine:
    return embedding_engine()


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of inputs of each forward that begins."""
    sizes, build = list[int](), PrefillForward._build  # pyright: ignore[reportPrivateUsage]

    def counted(self: PrefillForward, *args: Any) -> Any:
        sizes.append(len(self.requests))
        return build(self, *args)

    monkeypatch.setattr(PrefillForward, "_build", counted)
    return sizes


@pytest.mark.parametrize("number", INPUTS)
def test_an_input_alone_is_transformers_and_the_same_bits_each_time(
    engine: EmbeddingEngine, number: int
) -> None:
    first, second = (embedded(engine, {0: INPUTS[number]})[0] for _ in range(2))
    assert difference(first, ROWS[number]["embedding"]) < NEAR
    assert first == second


def test_inputs_together_share_forwards_and_are_transformers(
    engine: EmbeddingEngine, forwards: list[int]
) -> None:
    vectors = embedded(engine, INPUTS)
    assert engine.batching_reason == "" and max(forwards) > 1
    for number, row in enumerate(ROWS):
        assert difference(vectors[number], row["embedding"]) < NEAR
        assert difference(vectors[number], embedded(engine, {0: row["ids"]})[0]) < NEAR


def test_a_batch_that_changes_more_than_the_limit_is_not_used(
    monkeypatch: pytest.MonkeyPatch, forwards: list[int]
) -> None:
    monkeypatch.setattr(module, "NEAR", -1.0)
    strict = embedding_engine()
    assert "a batch changes embeddings by" in strict.batching_reason
    vectors = embedded(strict, INPUTS)
    assert set(forwards) == {1}
    assert all(difference(vectors[n], row["embedding"]) < NEAR for n, row in enumerate(ROWS))


@pytest.mark.parametrize("change", [3.6e-3, float("nan")])
@pytest.mark.parametrize(("rows", "shares"), [(257, True), (256, False), (100, False)])
def test_a_batch_that_only_many_rows_change_is_not_used(
    monkeypatch: pytest.MonkeyPatch, rows: int, shares: bool, change: float
) -> None:
    compute = module.prefill_together

    def other_kernels(target: Any, prompts: Any, caches: Any, begins: Any) -> list[mx.array]:
        states = compute(target, prompts, caches, begins)
        if len(prompts) * max(len(ids) for ids in prompts) < rows:
            return states
        return [*states[:-1], states[-1] + change * mx.arange(SIZE)]

    monkeypatch.setattr(module, "prefill_together", other_kernels)
    assert (embedding_engine(prefill_chunk=256).batching_reason == "") == shares


@pytest.mark.parametrize("size", [1, 7, SIZE])
def test_dimensions_are_the_first_numbers_normalised_again(
    engine: EmbeddingEngine, size: int
) -> None:
    cut = embedded(engine, INPUTS, dimensions=size)
    for number, row in enumerate(ROWS):
        part = row["embedding"][:size]
        length = sum(x * x for x in part) ** 0.5
        assert difference(cut[number], [x / length for x in part]) < NEAR


def test_more_inputs_than_run_at_once_all_come(engine: EmbeddingEngine) -> None:
    many = {7 * n: INPUTS[n % len(INPUTS)][-9:] for n in range(3 * MOST_RUNNING)}
    inline = Inline()
    running = begin(engine, inline, many)
    while not running.has_ended:
        assert engine.live_requests <= MOST_RUNNING
        assert inline.step()
    assert running.vectors.keys() == many.keys() and running.fault is None
    assert (engine.live_requests, engine.cache_bytes()) == (0, 0)


def test_an_input_of_a_later_request_is_not_behind_all_of_an_earlier_one(
    engine: EmbeddingEngine,
) -> None:
    inline = Inline()
    large = begin(engine, inline, {n: INPUTS[3] for n in range(4 * MOST_RUNNING)}, name="large")
    small = begin(engine, inline, {0: INPUTS[0]}, name="small")
    while not small.has_ended:
        assert inline.step()
    assert len(large.vectors) < 2 * MOST_RUNNING
    large.run.cancel()
    assert difference(small.vectors[0], ROWS[0]["embedding"]) < NEAR
    assert (engine.live_requests, engine.cache_bytes()) == (0, 0)


def test_inputs_in_the_background_wait(engine: EmbeddingEngine) -> None:
    inline = Inline()
    behind = begin(engine, inline, {0: INPUTS[3]}, name="behind", background=True)
    ahead = begin(engine, inline, {0: INPUTS[3]}, name="ahead")
    while not ahead.has_ended:
        assert inline.step()
    assert not behind.has_ended
    while not behind.has_ended:
        assert inline.step()


def test_a_cancelled_request_leaves_nothing(engine: EmbeddingEngine) -> None:
    inline = Inline()
    running = begin(engine, inline, dict.fromkeys(range(200), INPUTS[3]))
    for _ in range(5):
        assert inline.step()
    assert engine.live_requests
    count = len(running.vectors)
    running.run.cancel()
    while inline.step():
        pass
    assert len(running.vectors) == count and not running.has_ended
    assert (engine.live_requests, engine.cache_bytes()) == (0, 0)


def test_a_fault_of_a_shared_forward_is_of_the_forward_and_alone_the_inputs_come(
    engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch, forwards: list[int]
) -> None:
    hidden = Embedder.hidden

    def failing(self: Embedder, tokens: mx.array, caches: Any) -> mx.array:
        if tokens.shape[0] > 1:
            raise RuntimeError("a shared forward fails")
        return hidden(self, tokens, caches)

    monkeypatch.setattr(Embedder, "hidden", failing)
    with pytest.raises(StateLost):
        _ = embedded(engine, INPUTS)
    assert (engine.live_requests, engine.cache_bytes()) == (0, 0)
    forwards.clear()
    vectors = embedded(engine, INPUTS, name="again", after_fault=True)
    assert set(forwards) == {1}
    assert all(difference(vectors[n], row["embedding"]) < NEAR for n, row in enumerate(ROWS))


def test_numbers_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    folder = copied(tmp_path / "broken")
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    weights["norm.weight"] = weights["norm.weight"] * float("nan")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    with pytest.raises(NumericError):
        _ = embedded(embedding_engine(folder), {0: INPUTS[0]})


@pytest.mark.parametrize("kind", ["untied without lm_head", "untied with lm_head", "with model."])
def test_published_layouts_load(tmp_path: Path, kind: str) -> None:
    folder = copied(tmp_path / "layout", tie_word_embeddings="untied" not in kind)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    if kind == "with model.":
        weights = {f"model.{name}": value for name, value in weights.items()}
    elif kind == "untied with lm_head":
        weights["lm_head.weight"] = weights["embed_tokens.weight"] * 2
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    vectors = embedded(embedding_engine(folder), {0: INPUTS[2]})
    assert difference(vectors[0], ROWS[2]["embedding"]) < NEAR


def test_other_pooling_is_refused_at_the_load(tmp_path: Path) -> None:
    folder = copied(tmp_path / "mean")
    _ = (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with pytest.raises(InvalidCheckpoint, match="computes last alone"):
        _ = embedding_engine(folder)


def test_a_class_without_hidden_states_is_refused_at_the_load() -> None:
    model = open_model(Path(__file__).parents[2] / "oracle" / "qwen3_embedding", pooling="last")
    with pytest.raises(LoadFailed, match="capabilities"):
        _ = Embedder(model, SIZE + 1)
    model.pop("model")
    with pytest.raises(LoadFailed, match="capabilities"):
        _ = Embedder(model, SIZE)
