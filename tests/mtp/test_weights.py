"""A head is filled right from every layout that publishers use, or refused with the reason."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache
from tiny import family, tiny_qwen

from exo_node.mtp.families.head import DraftHead, HeadSource, HeadUnusable, renamed
from exo_node.mtp.families.qwen35 import Qwen35Family
from exo_node.mtp.families.weights import cast_parameters, load_head

Tensors = dict[str, mx.array]
NORMS = {
    "pre_fc_norm_hidden.weight",
    "pre_fc_norm_embedding.weight",
    "norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.q_norm.weight",
    "layers.0.self_attn.k_norm.weight",
}
EXPERTS = "layers.0.mlp.experts."
SWITCH = "layers.0.mlp.switch_mlp."
PARTS = ("gate_proj", "up_proj", "down_proj")


CANONICAL = {ours: theirs for theirs, ours in Qwen35Family.head_names.items()}


def parameters_of(module: nn.Module) -> Tensors:
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())))


def tensors_of(head: DraftHead) -> Tensors:
    """The head's parameters as a checkpoint names them."""
    return {renamed(name, CANONICAL): value for name, value in parameters_of(head).items()}


def filled(head: DraftHead, tensors: Tensors) -> DraftHead:
    """The head with some of its tensors, as a checkpoint names them."""
    named = {renamed(name, Qwen35Family.head_names): value for name, value in tensors.items()}
    _ = head.load_weights(list(named.items()), strict=False)
    return head


def spread_norms(head: DraftHead) -> DraftHead:
    """Norms around 1, as trained ones are, no two alike."""
    shapes = {name: tensors_of(head)[name].shape for name in sorted(NORMS)}
    keys = map(mx.random.key, range(len(shapes)))
    norms = zip(shapes.items(), keys, strict=True)
    return filled(
        head, {name: 1 + 0.2 * mx.random.normal(shape, key=key) for (name, shape), key in norms}
    )


@pytest.fixture(scope="module")
def dense() -> Qwen35Family:
    return family()


@pytest.fixture(scope="module")
def moe() -> Qwen35Family:
    return family(moe=True)


@pytest.fixture(params=["dense", "moe"])
def kind(request: pytest.FixtureRequest) -> Qwen35Family:
    return request.getfixturevalue(request.param)


def raw(tensors: Mapping[str, mx.array]) -> Tensors:
    return {name: value - 1 if name in NORMS else value for name, value in tensors.items()}


def assert_loads(
    kind: Qwen35Family, tensors: Tensors, reference: DraftHead, backbone_is_raw: bool | None = False
) -> DraftHead:
    head = load_head(kind, HeadSource(tensors, backbone_is_raw), None)
    expected = tensors_of(reference)
    got = tensors_of(head)
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert value.dtype == expected[name].dtype
        assert mx.allclose(value, expected[name], rtol=0, atol=1e-6), name
    return head


def refusal(kind: Qwen35Family, tensors: Tensors, backbone_is_raw: bool | None = False) -> str:
    with pytest.raises(HeadUnusable) as refused:
        _ = load_head(kind, HeadSource(tensors, backbone_is_raw), None)
    return str(refused.value)


def output(head: DraftHead) -> mx.array:
    hidden, embedding = mx.random.normal((2, 1, 5, 64), key=mx.random.key(9))
    return head(hidden, embedding, KVCache())


@pytest.mark.parametrize("backbone_is_raw", [True, None])
def test_raw_norms_are_shifted_by_the_backbones_rule_or_by_their_means(
    kind: Qwen35Family, backbone_is_raw: bool | None
) -> None:
    head = spread_norms(kind.make_head())
    loaded = assert_loads(kind, raw(tensors_of(head)), head, backbone_is_raw)
    assert mx.allclose(output(loaded), output(head), atol=1e-5)


@pytest.mark.parametrize("backbone_is_raw", [False, None])
def test_converted_norms_are_left_alone(kind: Qwen35Family, backbone_is_raw: bool | None) -> None:
    head = spread_norms(kind.make_head())
    _ = assert_loads(kind, tensors_of(head), head, backbone_is_raw)


def test_the_backbones_rule_goes_before_the_means(dense: Qwen35Family) -> None:
    """A trained head's raw norms may well lie nearer to 1."""
    head = spread_norms(dense.make_head())
    far = {k: v + 1 if k in NORMS else v for k, v in tensors_of(head).items()}
    other = filled(dense.make_head(), far)
    _ = assert_loads(dense, tensors_of(head), other, backbone_is_raw=True)


def test_norms_between_the_layouts_are_refused_where_only_means_could_tell(
    dense: Qwen35Family,
) -> None:
    head = spread_norms(dense.make_head())
    between = {k: v - 0.5 if k in NORMS else v for k, v in tensors_of(head).items()}
    assert "norm weights average 0.49" in refusal(dense, between, None)
    _ = load_head(dense, HeadSource(between, True), None)


def fused(tensors: Tensors) -> Tensors:
    """Stores experts in Qwen3.6's layout."""
    rest = {k: v for k, v in tensors.items() if not k.startswith(SWITCH)}
    gate, up, down = (tensors[f"{SWITCH}{part}.weight"] for part in PARTS)
    both = mx.concatenate([gate, up], axis=-2)
    return rest | {f"{EXPERTS}gate_up_proj": both, f"{EXPERTS}down_proj": down}


def unfused(tensors: Tensors) -> Tensors:
    """Stores experts in Qwen3.5's layout; in an order in which 10 would come before 2."""
    split = {k: v for k, v in tensors.items() if not k.startswith(SWITCH)}
    for name, value in tensors.items():
        if name.startswith(SWITCH):
            part, rest = name.removeprefix(SWITCH).split(".")
            split |= {f"{EXPERTS}{i}.{part}.{rest}": row for i, row in enumerate(value)}
    return dict(sorted(split.items()))


@pytest.mark.parametrize("layout", [fused, unfused, dict])
def test_experts_are_the_same_from_every_layout(layout: Callable[[Tensors], Tensors]) -> None:
    many = family(moe=True, num_experts=12)
    head = spread_norms(many.make_head())
    _ = assert_loads(many, layout(tensors_of(head)), head)


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "layers.0.self_attn.k_norm.weight"])
@pytest.mark.parametrize("backbone_is_raw", [False, None])
def test_a_missing_tensor_is_named(
    kind: Qwen35Family, name: str, backbone_is_raw: bool | None
) -> None:
    tensors = tensors_of(spread_norms(kind.make_head()))
    del tensors[name]
    assert f"lacks {name}" in refusal(kind, tensors, backbone_is_raw)


def test_a_head_without_any_norm_is_refused_too(dense: Qwen35Family) -> None:
    tensors = {k: v for k, v in tensors_of(dense.make_head()).items() if k not in NORMS}
    assert "lacks pre_fc_norm_embedding.weight" in refusal(dense, tensors, None)


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "layers.0.self_attn.o_proj.weight"])
def test_a_misshaped_tensor_is_named_with_both_shapes(kind: Qwen35Family, name: str) -> None:
    tensors = tensors_of(kind.make_head())
    shape = tensors[name].shape
    tensors[name] = mx.zeros((*shape[:-1], shape[-1] + 2))
    reason = refusal(kind, tensors)
    assert all(word in reason for word in (name, str(shape), str(tensors[name].shape)))


def test_a_partial_set_of_experts_is_refused(moe: Qwen35Family) -> None:
    tensors = tensors_of(moe.make_head())
    short, half = unfused(tensors), fused(tensors)
    for part in PARTS:
        short[f"{EXPERTS}4.{part}.weight"] = short.pop(f"{EXPERTS}2.{part}.weight")
    assert f"gaps in {SWITCH}" in refusal(moe, short)
    for part in PARTS:
        del short[f"{EXPERTS}3.{part}.weight"], short[f"{EXPERTS}4.{part}.weight"]
    assert f"{SWITCH}gate_proj.weight has shape (2, 64, 64)" in refusal(moe, short)
    del half[f"{EXPERTS}down_proj"]
    assert f"lacks {SWITCH}down_proj.weight" in refusal(moe, half)


@pytest.mark.parametrize("layout", [fused, unfused])
def test_experts_in_two_forms_are_refused(
    moe: Qwen35Family, layout: Callable[[Tensors], Tensors]
) -> None:
    tensors = tensors_of(moe.make_head())
    assert "a part twice" in refusal(moe, layout(tensors) | tensors)


def test_experts_of_unlike_shapes_are_refused(moe: Qwen35Family) -> None:
    tensors = unfused(tensors_of(moe.make_head()))
    tensors[f"{EXPERTS}1.up_proj.weight"] = mx.zeros((64, 32))
    assert f"2 shapes for {SWITCH}up_proj.weight" in refusal(moe, tensors)


def quantised(head: DraftHead, choose: Callable[[int], dict[str, int]]) -> DraftHead:
    """`head` with its n-th layer quantised as `choose(n)` says."""
    paths = [path for path, m in head.named_modules() if hasattr(m, "to_quantized")]
    nn.quantize(head, class_predicate=lambda path, _: path in paths and choose(paths.index(path)))
    return head


@pytest.mark.parametrize("layout", [unfused, dict])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64])
def test_a_quantised_head_keeps_its_bits(
    moe: Qwen35Family, layout: Callable[[Tensors], Tensors], bits: int, group_size: int
) -> None:
    head = quantised(
        spread_norms(moe.make_head()), lambda _: {"bits": bits, "group_size": group_size}
    )
    loaded = assert_loads(moe, layout(tensors_of(head)), head)
    assert mx.array_equal(output(loaded), output(head))


def test_bits_and_group_sizes_may_differ_from_layer_to_layer(kind: Qwen35Family) -> None:
    """config.json gives one of each for the whole checkpoint; publishers mix them in a head."""
    mixed = [(3, 64), (4, 32), (5, 64), (6, 32), (8, 64), (2, 32)]
    head = quantised(
        spread_norms(kind.make_head()),
        lambda n: dict(zip(("bits", "group_size"), mixed[n % len(mixed)], strict=True)),
    )
    loaded = assert_loads(kind, raw(tensors_of(head)), head, backbone_is_raw=True)
    assert mx.array_equal(output(loaded), output(head))


def test_some_layers_may_be_left_unquantised(dense: Qwen35Family) -> None:
    head = spread_norms(dense.make_head())
    packed = nn.QuantizedLinear.from_linear(head.eh_proj, 64, 4)
    head.eh_proj = packed  # pyright: ignore[reportAttributeAccessIssue]
    _ = assert_loads(dense, tensors_of(head), head)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fc.weight", (64, 15)),
        ("fc.scales", (64, 3)),
        ("fc.scales", (64, 8)),
        ("fc.biases", (64, 1)),
    ],
)
def test_a_quantised_layer_that_fits_no_quantisation_is_named(
    dense: Qwen35Family, name: str, shape: tuple[int, int]
) -> None:
    head = quantised(dense.make_head(), lambda _: {"bits": 4, "group_size": 64})
    tensors = tensors_of(head)
    tensors[name] = mx.zeros(shape, dtype=tensors[name].dtype)
    assert "fc." in refusal(dense, tensors)


def test_a_quantised_layer_without_its_biases_is_refused(dense: Qwen35Family) -> None:
    tensors = tensors_of(quantised(dense.make_head(), lambda _: {"bits": 4, "group_size": 64}))
    del tensors["fc.biases"]
    assert "lacks fc.biases" in refusal(dense, tensors)


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "fc.scales"])
def test_numbers_that_are_not_read_are_refused_by_their_type(
    dense: Qwen35Family, name: str
) -> None:
    """FP8 as Qwen publishes it, scales of an mx format, and integers."""
    tensors = tensors_of(dense.make_head())
    if name == "fc.scales":
        tensors = tensors_of(quantised(dense.make_head(), lambda _: {"bits": 4, "group_size": 64}))
    tensors[name] = tensors[name].astype(mx.uint8)
    assert f"{name} is stored as mlx.core.uint8, not read" in refusal(dense, tensors)


def test_a_tensor_that_nothing_reads_is_named(kind: Qwen35Family) -> None:
    tensors = tensors_of(kind.make_head()) | {"fc.weight_scale_inv": mx.zeros((1, 1))}
    assert "1 tensors that config.json does not predict, the first fc.weight_scale_inv" in (
        refusal(kind, tensors)
    )


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, None])
def test_the_head_takes_the_wanted_dtype_packed_weights_aside(
    dense: Qwen35Family, dtype: mx.Dtype | None
) -> None:
    head = quantised(spread_norms(dense.make_head()), lambda _: {"bits": 4, "group_size": 32})
    loaded = load_head(dense, HeadSource(tensors_of(head), False), dtype)
    dtypes = {value.dtype for value in tensors_of(loaded).values()}
    assert dtypes == {mx.uint32, dtype or mx.float32}


def test_what_models_compute_with_in_float32_is_not_cast() -> None:
    """mlx-lm converts models this way: a rounded decay or routing bias is another model's."""
    model = tiny_qwen()
    before = parameters_of(model)
    cast_parameters(model, mx.bfloat16)
    float32_names = {
        name for name, value in parameters_of(model).items() if value.dtype == mx.float32
    }
    assert float32_names == {name for name in before if name.endswith("A_log")}
    assert len(float32_names) == 3


_NAMES = (
    *("A_log", "dt_bias", "sinks", "conv1d.weight", "gate.gate_alpha", "gate.gate_beta"),
    *("feed_forward.expert_bias", "mlp.gate.e_score_correction_bias", "mlp.gate.router_bias"),
    *("attn_hc.weight", "compressor.weight", "self_attn.q_proj.weight"),
)


@pytest.mark.parametrize(
    "model_type",
    [
        *("Klear", "afmoe", "bailing_moe", "deepseek_v41", "glm4_moe", "kimi_linear", "lfm2_moe"),
        *("longcat_flash_ngram", "minimax", "muse_spark", "nemotron_h", "step3p5"),
    ],
)
def test_dtypes_follow_the_models_own_predicate(model_type: str) -> None:
    """mlx-lm converts by this rule: routers' biases decide between experts."""
    stock: Any = importlib.import_module(f"mlx_lm.models.{model_type}").Model

    class Shaped(nn.Module):
        cast_predicate = stock.cast_predicate

    model = Shaped()
    layer = tree_unflatten([(name, mx.zeros((1,))) for name in _NAMES])
    model.layers = [layer]
    cast_parameters(model, mx.bfloat16)
    float32_names = {
        name for name, value in parameters_of(model).items() if value.dtype == mx.float32
    }
    always = ("A_log", "e_score_correction_bias")
    casts: Any = model.cast_predicate
    every = [f"layers.0.{name}" for name in _NAMES]
    assert float32_names == {name for name in every if name.endswith(always) or not casts(name)}
    assert any(not casts(name) for name in every)
