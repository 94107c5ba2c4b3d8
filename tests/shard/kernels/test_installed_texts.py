"""A small model with all the kernels that `install` finds, in the emulator or on the GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from emulated import use
from mlx import nn
from mlx_lm.models import qwen3_5
from mlx_lm.utils import dequantize_model

from exo_node.mtp.caches.batch_caches import left_aligned
from exo_node.mtp.caches.positions import Positions
from exo_node.mtp.caches.rollback import cache_arrays, rollback, with_tapes
from exo_node.mtp.families.table import prepare
from exo_node.mtp.families.taped_gated_delta import TapedGatedDelta
from exo_node.shard.kernels import (
    attention_choice,
    kernel_choice,
    layers,
    product,
    row_attention,
    trial,
)
from exo_node.shard.kernels.cuda import available
from exo_node.shard.kernels.install import used

DENSE: dict[str, Any] = {
    "model_type": "qwen3_5",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
EXPERTS = DENSE | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}


@pytest.fixture(autouse=True)
def kernels_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, monkeypatch)
    product._quantized.cache_clear()  # pyright: ignore[reportPrivateUsage]
    row_attention._kernels.cache_clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(kernel_choice, "available", lambda: True)
    monkeypatch.setattr(trial, "seconds_of", untimed)
    if not available():
        # One chunk of keys, and more than one: what a kernel of ours distinguishes.
        monkeypatch.setattr(attention_choice, "_CONTEXTS", (24, 70))
        # MLX adds the products of experts in bfloat16 there.
        monkeypatch.setitem(trial._TOLERANCE, mx.bfloat16, 0.1)  # pyright: ignore


def untimed(run: trial.Run, rows: int, layers: int, clock: trial.Clock) -> float:
    """A launch is a process here; what a trial compares is computed all the same."""
    del run, rows, layers, clock
    return 0.0


def small(config: dict[str, Any]) -> qwen3_5.Model:
    mx.random.seed(5)
    arguments = {"model_type": "qwen3_5", "text_config": config}
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(arguments))
    model.set_dtype(mx.bfloat16)
    predicate: Any = model.language_model.quant_predicate

    def quantises(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized"):
            return False
        return predicate(path, module) if predicate else True

    nn.quantize(model.language_model, group_size=64, bits=4, class_predicate=quantises)
    model.eval()
    prepare(model)
    mx.eval(model.parameters())
    return model


def logits(model: qwen3_5.Model, blocks: list[list[int]]) -> mx.array:
    caches: Any = with_tapes(model.make_cache())
    return mx.concatenate([model(mx.array([ids]), caches) for ids in blocks], axis=1)


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_verify_by_the_installed_kernels_is_single_steps_bit_for_bit(
    config: dict[str, Any], traced: set[tuple[int, ...]]
) -> None:
    model = small(config)
    prompt, verified = [7, 30, 2], [11, 5, 90, 41]
    exact: Any = dequantize_model(small(config))
    exact.set_dtype(mx.float32)
    expected = logits(exact, [prompt, verified])
    mlxs_error = trial.relative_error(expected, logits(model, [prompt, verified]))
    chosen = kernel_choice.choose_kernels([model], "auto", lambda: 0.0, lambda _: None)
    names = {"gated_delta", "product", "several_products", "traced_layer", "row_attention"}
    names |= {"experts"} if config is EXPERTS else {"gated_product"}
    assert names <= set(used(chosen)), [str(each) for each in chosen]
    kinds = [type(module) for _, module in model.named_modules()]
    assert row_attention.KernelAttention in kinds and layers.RowsLayer35 in kinds
    deltas = [m for _, m in model.named_modules() if isinstance(m, TapedGatedDelta)]
    assert all(m.together is not None for m in deltas)
    got = logits(model, [prompt, verified])
    assert trial.relative_error(expected, got) <= max(3e-2, 1.2 * mlxs_error)
    assert mx.array_equal(logits(model, [prompt, *([each] for each in verified)]), got).item()
    assert batch_is_each_alone(model, 2)
    assert config is EXPERTS or batch_is_each_alone(model, 6)
    assert {(2, 3), (2, 1)} <= traced
    assert config is EXPERTS or (6, 3) in traced


def test_many_rows_are_those_of_fewer_and_can_be_taken_back(
    traced: set[tuple[int, ...]],
) -> None:
    """As many as a verify of a copy has, which are traced, and one more than a piece of 16."""
    model = small(DENSE)
    _ = kernel_choice.choose_kernels([model], "auto", lambda: 0.0, lambda _: None)
    prompt, ids = [7, 30, 2], [(11 * i + 5) % 97 for i in range(33)]
    expected = logits(model, [prompt, ids[:16], ids[16:32], ids[32:]])
    for rows, kept in ((32, 19), (17, 3)):
        caches: Any = with_tapes(model.make_cache())
        mx.eval(model(mx.array([prompt]), caches))
        got = model(mx.array([ids[:rows]]), caches)
        assert mx.array_equal(got, expected[:, 3 : 3 + rows]).item()
        rollback(caches, rows - kept)
        after = model(mx.array([[ids[kept]]]), caches)
        assert mx.array_equal(after, expected[:, 3 + kept : 4 + kept]).item()
    assert (1, 32) in traced and (1, 17) not in traced


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    """The numbers of sequences and rows that traced layers computed."""
    sizes, finish = set[tuple[int, ...]](), layers.RowsLayer.finish

    def noted(layer: layers.RowsLayer, output: Sequence[mx.array]) -> mx.array:
        sizes.add(tuple(output[0].shape[:2]))
        return finish(layer, output)

    monkeypatch.setattr(layers.RowsLayer, "finish", noted)
    return sizes


def batch_is_each_alone(model: qwen3_5.Model, size: int) -> bool:
    """Requests after prompts of different lengths: three rows, then one, as by themselves."""
    prompts = [[(7 * i + 9 * j) % 97 for j in range(3 + i)] for i in range(size)]
    rows = [[11 + i, 5 + 3 * i, 90 - i] for i in range(size)]
    requests: list[Any] = [with_tapes(model.make_cache()) for _ in prompts]
    for ids, caches in zip(prompts, requests, strict=True):
        mx.eval(model(mx.array([ids]), caches), cache_arrays(caches))
    positions = Positions([len(ids) for ids in prompts])
    together: Any = left_aligned(requests, positions)
    got = [model(mx.array(rows), together)]
    positions.advance([3] * size)
    got.append(model(mx.array([each[:1] for each in rows]), together))
    for i, (ids, caches) in enumerate(zip(rows, requests, strict=True)):
        alone = [model(mx.array([ids]), caches), model(mx.array([ids[:1]]), caches)]
        if not all(mx.array_equal(a[0], b[i]).item() for a, b in zip(alone, got, strict=True)):
            return False
    return True
