"""A class of models is split over nodes only after a small one of it gave the same bits split."""

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from engines import DEMO, load_quietly, spec
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import TransformerBlock
from zoo import LAYERS, VOCABULARY, tiny_config

from exo_node.placement.errors import LoadFailed
from exo_node.shard.model import split_check as self_check
from exo_node.shard.model.small_config import small_config
from exo_node.shard.model.split_check import (
    SplitTrial,
    require_splittable,
    small_model,
    stage_fault,
)
from exo_node.shard.model.stage_model import StageModel

HEADERS = Path(__file__).parents[2] / "headers"
PLAIN: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def plain(model_type: str, **more: Any) -> dict[str, Any]:
    """A config.json with the sizes of an 8B model."""
    return PLAIN | {"model_type": model_type} | more


def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((HEADERS / f"{name}.json").read_text())["config"]
    return config


CONFIGS: dict[str, dict[str, Any]] = {
    "the demo": json.loads((DEMO / "config.json").read_text()),
    "llama": plain("llama", rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "qwen3": plain("qwen3", head_dim=128, tie_word_embeddings=True),
    "recurrent and attention layers": published("qwen3.6-27b"),
    "those with experts": published("qwen3.5-35b-a3b"),
    "qwen3_next": published("qwen3-next-80b-a3b"),
    "latent attention, groups of experts": published("deepseek-v3"),
    "dense layers before experts": published("glm-4.5-air"),
    "a pattern of windows": plain(
        "cohere2",
        head_dim=128,
        layer_norm_eps=1e-5,
        logit_scale=0.25,
        sliding_window=4096,
        sliding_window_pattern=4,
        attention_bias=False,
        layer_norm_bias=False,
    ),
    "layers without positions": plain(
        "smollm3", no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 8
    ),
    "state-space layers": plain(
        "mamba2",
        num_heads=80,
        head_dim=64,
        hidden_size=2560,
        intermediate_size=5120,
        state_size=128,
        n_groups=1,
        expand=2,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_limit=[0.0, 1e9],
        time_step_rank=160,
        layer_norm_epsilon=1e-5,
        chunk_size=256,
    ),
}


def check_result(
    config: Mapping[str, Any], first: int = 0, end: int = 1, layers: int = 0
) -> tuple[str, tuple[int, ...]]:
    """The result of the check for a stage of this config with `layers` layers."""
    return stage_fault(json.dumps(small_config(shorter(config, layers))), first, end)


def shorter(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The first layers of it."""
    if not layers:
        return dict(config)
    text: Mapping[str, Any] = config.get("text_config", config)
    whole: int = text["num_hidden_layers"]
    cut: dict[str, Any] = {
        name: value[:layers]
        if isinstance(value, list) and len(cast("Any", value)) == whole
        else value
        for name, value in text.items()
    }
    cut["num_hidden_layers"] = layers
    return {**config, "text_config": cut} if "text_config" in config else cut


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_class_that_can_be_split_passes(kind: str) -> None:
    for first, end in ((0, 3), (3, 5)):
        assert check_result(CONFIGS[kind], first, end, layers=5) == ("", ())


def test_a_stage_of_a_mixed_model_is_checked_as_it_is_planned() -> None:
    """Ling's linear layers take their place in the text from an attention layer's cache."""
    config = tiny_config("bailing_hybrid")
    fault, borders = stage_fault(json.dumps(config), 0, 1)
    assert "differ" in fault
    assert borders == (3, 4, 5)
    assert [stage_fault(json.dumps(config), a, b)[0] for a, b in ((0, 3), (3, 6), (2, 3))] == [
        ""
    ] * 3


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("gemma4_text", (1, 2, 3, 4, 5)),
        ("gemma4 with shared keys", (1,)),
        ("hunyuan with shared keys", (2, 4)),
        ("olmo_hybrid", (1, 2, 3, 4, 5)),
        ("baichuan_m1", (1, 2, 3, 4, 5)),
        ("longcat_flash_ngram", (1, 2, 3, 4, 5)),
        ("bailing_moe_linear", (3, 4, 5)),
        ("gemma4 with inputs for each layer", ()),
        ("talkie", ()),
        ("rwkv7", ()),
        ("gemma3n", ()),
    ],
)
def test_each_border_is_judged_by_itself(name: str, good: tuple[int, ...]) -> None:
    trial = SplitTrial(small_model(tiny_config(name)), VOCABULARY)
    assert trial.layers == LAYERS
    assert trial.borders_near({3}) == good


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nanbeige in loops", "runs its layers more than once for a token"),
        ("iquestloopcoder", "runs parts of its layers itself"),
        ("talkie", "depend on weights that other stages hold"),
        ("gemma4 with inputs for each layer", "depend on weights that other stages hold"),
        ("rwkv7", "need more than the hidden states of the layers before"),
    ],
)
def test_what_cannot_be_split_is_told_in_a_sentence(name: str, why: str) -> None:
    for first, end in ((0, 3), (3, 6)):
        with contextlib.suppress(LoadFailed):
            require_splittable(tiny_config(name), first, end, "")
    with pytest.raises(LoadFailed, match=why) as caught:
        require_splittable(tiny_config(name), 3, 6, "")
    assert caught.value.param == "pipeline"
    assert caught.value.message.endswith("place it on one node")


def test_a_class_whose_numbers_depend_on_the_cut_is_not_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As mlx-lm's plamo3, whose mask has a row more than its ring keeps; our windows have it."""
    require_splittable(tiny_config("plamo3"), 3, 6, "")
    trial = SplitTrial(small_model(tiny_config("plamo3")), VOCABULARY)
    assert trial.cut_fault() == ""
    monkeypatch.setattr("exo_node.shard.model.stage_model.with_windows", list)
    assert "other logits where a prompt is read in other forwards" in trial.cut_fault()


def test_a_refusal_names_the_borders_that_do() -> None:
    with pytest.raises(LoadFailed, match="other splits may do") as caught:
        require_splittable(tiny_config("gemma4 with shared keys"), 3, 6, "")
    assert caught.value.param == "pipeline:1"


def wrong_entry(stage: StageModel) -> None:
    """The list of layers begins one too late."""
    view = stage._body  # pyright: ignore[reportPrivateUsage]
    stage.__dict__["_body"] = [*view[1:], view[0]]


def wrong_mask(stage: StageModel) -> None:
    """Masks take their offset from caches that nothing writes."""

    def fresh() -> list[Any]:
        return make_prompt_cache(stage.model)

    stage.make_caches = fresh  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("damage", [wrong_entry, wrong_mask])
def test_a_stage_that_is_cut_wrongly_does_not_pass(
    damage: Callable[[StageModel], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Damaged(StageModel):
        def __init__(self, model: Any, first: int, end: int) -> None:
            super().__init__(model, first, end)
            if first:
                damage(self)

    config = json.dumps(tiny_config("gemma3_text"))
    stage_fault.cache_clear()
    assert stage_fault(config, 1, 6) == ("", ())
    stage_fault.cache_clear()
    monkeypatch.setattr(self_check, "StageModel", Damaged)
    assert stage_fault(config, 1, 6)[0]
    stage_fault.cache_clear()


@pytest.mark.smoke
def test_borders_at_which_a_failed_stage_already_begins_and_ends_are_not_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A split there would be the refused one again."""

    class DamagedMiddle(StageModel):
        def __init__(self, model: Any, first: int, end: int) -> None:
            super().__init__(model, first, end)
            if first and end < self.num_layers:
                wrong_entry(self)

    config = json.dumps(tiny_config("gemma3_text"))
    monkeypatch.setattr(self_check, "StageModel", DamagedMiddle)
    stage_fault.cache_clear()
    fault, borders = stage_fault(config, 1, 5)
    stage_fault.cache_clear()
    assert fault and borders == ()


def through_the_class(layer: Any, x: mx.array, out: mx.array) -> mx.array:
    """State that every layer of the process sees, and no other process does."""
    mixed = out + getattr(TransformerBlock, "seen", mx.zeros(1))[..., -1:, :1]
    TransformerBlock.seen = 0.01 * out  # pyright: ignore[reportAttributeAccessIssue]
    return mixed


def through_the_object(layer: Any, x: mx.array, out: mx.array) -> mx.array:
    """State of a layer's own that its cache does not hold, and that a rollback leaves."""
    before = getattr(layer, "before", mx.zeros(1))
    object.__setattr__(layer, "before", 0.01 * mx.mean(out))
    return out + before


@pytest.mark.parametrize("leak", [through_the_class, through_the_object])
def test_a_class_whose_layers_share_state_aside_does_not_pass(
    leak: Callable[[Any, mx.array, mx.array], mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock: Any = TransformerBlock.__call__
    monkeypatch.setattr(TransformerBlock, "seen", mx.zeros((1, 1, 1)), raising=False)

    def leaking(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return leak(self, x, stock(self, x, *args, **kwargs))

    monkeypatch.setattr(TransformerBlock, "__call__", leaking)
    stage_fault.cache_clear()
    assert check_result(CONFIGS["llama"], 2, 4, layers=4)[0].startswith("their hidden states ")
    stage_fault.cache_clear()


def test_a_class_that_cannot_be_built_does_not_pass() -> None:
    assert "nosuch" in check_result(plain("nosuch"))[0]
    assert "cannot be run" in stage_fault('{"model_type": "llama"}', 0, 1)[0]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes that are checked from now on; `nosuch` fails, the others pass."""
    ran: list[str] = []

    def check(small: str, _first: int, _end: int) -> tuple[str, tuple[int, ...]]:
        kind = json.loads(small)["model_type"]
        ran.append(kind)
        return ("there is no class nosuch", (3, 4)) if kind == "nosuch" else ("", ())

    monkeypatch.setattr(self_check, "stage_fault", check)
    return ran


def test_a_result_is_kept_for_the_structure_and_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = counted(monkeypatch)
    bigger = CONFIGS["llama"] | {"hidden_size": 8192}
    for config in (CONFIGS["llama"], CONFIGS["llama"], bigger):
        require_splittable(config, 0, 4, str(tmp_path))
    assert ran == ["llama"], "sizes alone are no other structure"
    require_splittable(CONFIGS["llama"], 4, 32, str(tmp_path))
    assert len(ran) == 2

    def another(name: str) -> str:
        return f"another {name}"

    monkeypatch.setattr(self_check, "version", another)
    require_splittable(CONFIGS["llama"], 0, 4, str(tmp_path))
    assert len(ran) == 3


def test_a_refusal_is_kept_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = counted(monkeypatch)
    for _ in range(2):
        with pytest.raises(LoadFailed, match="other splits may do") as caught:
            require_splittable(plain("nosuch"), 0, 4, str(tmp_path))
        assert caught.value.param == "pipeline:3,4"
        assert "nosuch" in caught.value.message
    assert ran == ["nosuch"]


@pytest.mark.parametrize("content", ["", "{}", '{"refusal": "no"}', "x" * 100_000])
def test_a_file_that_says_nothing_is_checked_anew(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: str,
) -> None:
    ran = counted(monkeypatch)
    require_splittable(CONFIGS["qwen3"], 0, 4, str(tmp_path))
    [file] = tmp_path.iterdir()
    _ = file.write_text(content)
    with caplog.at_level(logging.WARNING):
        require_splittable(CONFIGS["qwen3"], 0, 4, str(tmp_path))
    assert ran == ["qwen3", "qwen3"]
    assert "cannot be used" in caplog.text


def test_every_stages_load_checks_its_layers_and_a_whole_models_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = counted(monkeypatch)
    folder = str(tmp_path)
    _ = load_quietly(spec(profile_folder=folder))
    assert ran == []
    _ = load_quietly(spec(first=8, stage=1, num_stages=2, profile_folder=folder))
    _ = load_quietly(spec(end=8, num_stages=2, profile_folder=folder))
    assert ran == ["qwen3_5"] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_check_leaves_the_process_as_it_was(dtype: str) -> None:
    mx.random.seed(7)
    expected = mx.random.normal((4,)).tolist()
    mx.random.seed(7)
    before = mx.get_active_memory()
    stage_fault.cache_clear()
    assert check_result(CONFIGS["the demo"] | {"dtype": dtype}, 4, 8) == ("", ())
    mx.random.seed(7)
    assert mx.random.normal((4,)).tolist() == expected
    assert mx.get_active_memory() - before < 1 << 20


@pytest.mark.parametrize("cuda", [True, False])
def test_small_models_are_not_tried_on_cuda(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    """There float32 is rounded so coarsely that every class seemed to depend on its chunks."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert self_check.trial_device() == mx.Device(mx.cpu if cuda else mx.gpu)
