"""Products that are no linear layer have the bits of single rows too, and none is overlooked."""

import ast
import importlib
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import pytest
from chips import M1, M3_MAX, M5, Chip, on_chip
from mlx import nn
from mlx_lm.models.deepseek_v3 import MoEGate
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from mlx_lm.utils import MODEL_REMAPPING

from exo_node.shard.kernels import row_sets
from exo_node.shard.kernels.row_groups import group_rows
from exo_node.shard.kernels.row_products import ROUTERS, kind_of
from exo_node.shard.kernels.row_sets import RowRange

EXPERTS, CHOSEN, HEADS, SIZE = 16, 4, 4, 64
CARDS = Path(__file__).parents[3] / "placement" / "cards"
MODELS = Path(next(iter(find_spec("mlx_lm.models").submodule_search_locations)))  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def _few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coarse deviation shows in each number, so few are compared."""
    monkeypatch.setattr(row_sets, "VALUES", 64)


def experts(kind: str, layer: type[Any] = SwitchGLU) -> Any:
    """`kind`: "bfloat16", or a mode of quantisation and its bits."""
    mx.random.seed(3)
    module = layer(SIZE, 96, EXPERTS, bias=layer is SwitchMLP)
    _ = module.set_dtype(mx.bfloat16)
    return quantised(module, kind)


def quantised(module: Any, kind: str) -> Any:
    if kind != "bfloat16":
        mode, bits = kind.split()
        nn.quantize(module, group_size=32, bits=int(bits), mode=mode)
    return module


def router() -> Any:
    mx.random.seed(3)
    config: Any = type("Config", (), {})()
    config.num_experts_per_tok, config.norm_topk_prob, config.n_routed_experts = CHOSEN, True, 96
    config.routed_scaling_factor, config.n_group, config.topk_group = 1.5, 2, 1
    config.hidden_size, config.topk_method = SIZE, "noaux_tc"
    gate = MoEGate(config)
    gate.weight = mx.random.normal(gate.weight.shape).astype(mx.bfloat16)
    return gate


class Heads(nn.Module):
    """Projections of heads, of rows like those of the other layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        mx.random.seed(3)
        self.embed_q = MultiLinear(SIZE, 96, HEADS)
        _ = self.set_dtype(mx.bfloat16)
        _ = quantised(self, kind)

    def __call__(self, x: mx.array) -> mx.array:
        heads = mx.stack([x * (i + 1) for i in range(HEADS)], axis=1)
        return self.embed_q(heads).swapaxes(1, 2)


def outcome(layer: Any, x: mx.array) -> list[mx.array]:
    """What a layer gives for x (B, rows, SIZE), each flat over the rows."""
    if isinstance(layer, SwitchGLU | SwitchMLP):
        out = layer(x, mx.argsort(x[..., :EXPERTS], axis=-1)[..., :CHOSEN])
    else:
        out = layer(x)
    count = x.shape[0] * x.shape[1]
    return [each.reshape(count, -1) for each in (out if isinstance(out, tuple) else (out,))]


LAYERS = {
    "experts, bfloat16": lambda: experts("bfloat16"),
    "experts, affine": lambda: experts("affine 4"),
    "experts, mxfp4": lambda: experts("mxfp4 4"),
    "experts with bias": lambda: experts("bfloat16", SwitchMLP),
    "router": router,
    "heads, bfloat16": lambda: Heads("bfloat16"),
    "heads, affine": lambda: Heads("affine 8"),
}


@pytest.fixture(params=[M1, M3_MAX, M5], ids=lambda chip: chip.name)
def chip(request: pytest.FixtureRequest) -> Iterator[Chip]:
    with on_chip(request.param):
        yield request.param


@pytest.mark.usefixtures("chip")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("with_groups", [True, False], ids=["grouped", "as it is"])
def test_a_row_has_its_bits_in_every_block(name: str, *, with_groups: bool) -> None:
    layer = LAYERS[name]()
    if with_groups:
        [choice] = group_rows([m for _, m in layer.named_modules()], mx.bfloat16, perf_counter)
        assert choice.used
    x = mx.random.normal((64, SIZE), key=mx.random.key(5)).astype(mx.bfloat16)
    singles = [outcome(layer, x[None, i : i + 1]) for i in range(64)]
    expected = [mx.concatenate(list(each)) for each in zip(*singles, strict=True)]

    def same(batch: int, rows: int) -> bool:
        count = batch * rows
        found = outcome(layer, x[:count].reshape(batch, rows, SIZE))
        pairs = zip(expected, found, strict=True)
        return all(mx.array_equal(one[:count], many).item() for one, many in pairs)

    shapes = [*((1, n) for n in (*range(2, 18), 31, 33, 64)), (2, 1), (8, 4), (3, 7), (64, 1)]
    assert all(same(*shape) for shape in shapes) == with_groups


@pytest.mark.smoke
def test_experts_are_grouped_by_all_choices_of_their_rows() -> None:
    """4 of 16 experts a row: 64 choices in all are sorted, or another kernel's."""
    with on_chip(M3_MAX):
        for kind, ceiling in (("bfloat16", 63), ("affine 4", 63)):
            layer = experts(kind)
            assert len(group_rows([layer], mx.bfloat16, perf_counter)) == 1
            assert layer.agreeing == RowRange(1, ceiling)


@pytest.mark.smoke
def test_more_rows_than_64_of_a_prompt_are_one_call() -> None:
    layer = experts("bfloat16")
    x = mx.random.normal((1, 65, SIZE), key=mx.random.key(5)).astype(mx.bfloat16)
    with on_chip(M3_MAX):
        expected = outcome(layer, x)
        _ = group_rows([layer], mx.bfloat16, perf_counter)
        assert mx.array_equal(outcome(layer, x)[0], expected[0])


@pytest.mark.smoke
def test_a_class_that_multiplies_by_itself_is_named() -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = mx.zeros((4, 4))

    with on_chip(M3_MAX):
        [choice] = group_rows([Unknown()], mx.float32, perf_counter)
    assert not choice.used and "Unknown" in choice.shape


_ATTENTION = {
    "base.quantized_scaled_dot_product_attention",
    "deepseek_v3.DeepseekV3Attention",
    "deepseek_v32.DeepseekV32Attention",
    "deepseek_v32.Indexer",
    "glm4_moe_lite.Glm4MoeLiteAttention",
    "mistral4.Mistral4Attention",
}
"""Their products are between rows and keys: they are attention's, which is no matter of groups."""
_CALLS = {
    *("matmul", "addmm", "inner", "einsum", "tensordot", "quantized_matmul"),
    *("gather_mm", "gather_qmm", "block_masked_mm", "segmented_mm"),
}


@pytest.mark.smoke
def test_each_raw_product_of_a_model_with_a_card_is_grouped() -> None:
    """mlx-lm's source is searched: a new version that multiplies elsewhere is named here."""
    found = {place for module in _modules_of_cards() for place in _raw_products(module)}
    known = _ATTENTION | {place for place in found if _is_grouped(place)}
    assert found - known == set() and found >= _ATTENTION
    assert {place.partition(".")[2] for place in found & known} > {"MoEGate", "MultiLinear"}


def _is_grouped(place: str) -> bool:
    module, _, name = place.partition(".")
    if name in {"SwitchLinear", "QuantizedSwitchLinear"}:
        return kind_of(experts("bfloat16"), mx.float32) is not None
    if name in ROUTERS:
        return True
    layer: Any = getattr(importlib.import_module(f"mlx_lm.models.{module}"), name)
    tries: list[Any] = [Heads("bfloat16").embed_q, Heads("affine 8").embed_q]
    return any(type(each) is layer and kind_of(each, mx.float32) for each in tries)


def _modules_of_cards() -> set[str]:
    """Modules of mlx-lm that run the models of the shipped cards, with what they import."""
    texts = [tomllib.loads(each.read_text()) for each in CARDS.glob("*.toml")]
    waiting = [kind for text in texts for kind in _values(text, "model_type")]
    assert len(set(waiting)) > 10
    seen = set[str]()
    while waiting:
        name = MODEL_REMAPPING.get(waiting[-1], waiting.pop())
        file = MODELS / f"{name}.py"
        if name in seen or not file.exists():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                waiting += [node.module] if node.module else [each.name for each in node.names]
    return seen


def _values(text: Any, key: str) -> Iterator[str]:
    if isinstance(text, dict):
        for name, value in text.items():
            yield from [value] if name == key else _values(value, key)


def _raw_products(module: str) -> Iterator[str]:
    for top in ast.parse((MODELS / f"{module}.py").read_text()).body:
        for node in ast.walk(top):
            match node:
                case ast.BinOp(op=ast.MatMult()):
                    yield f"{module}.{getattr(top, 'name', '')}"
                case ast.Call(func=ast.Attribute(attr=name)) if name in _CALLS:
                    yield f"{module}.{getattr(top, 'name', '')}"
                case _:
                    pass
