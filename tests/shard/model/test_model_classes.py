"""mlx-lm's model classes, tiny and random: the ids of `generate_step`, on one node and split.

`bench/families.py` runs all of them, at every border; this is a class each at one border.
"""

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from engines import DEMO, answer, engine_of, load_quietly, request, spec
from mlx.utils import tree_flatten
from runners import running
from zoo import LAYERS, tiny_config
from zoo_runs import PROMPT, as_two_stages, mlx_lms, on_one_node, small

from exo_node.node.store.library import ModelLibrary
from exo_node.placement.errors import InvalidCard
from exo_node.placement.ids import ModelId
from exo_node.placement.library import derive_card

_NAMES = (
    "afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear cohere cohere2 "
    "dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone "
    "exaone4 exaone_moe falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text glm glm4 "
    "glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoehybrid "
    "helium hunyuan hunyuan_v1_dense internlm2 jamba kimi_linear lfm2 lfm2_moe lille-130m llama "
    "llama4_text longcat_flash_ngram mamba mamba2 mimo_v2_flash minicpm mistral4 mixtral "
    "nanbeige nemotron_h olmo2 olmo3 olmo_hybrid openelm phi phi3 phixtral plamo2 qwen2 qwen3 "
    "qwen3_5 qwen3_moe qwen3_next seed_oss smollm3 stablelm starcoder2 step3p5 "
)
CLASSES: list[str] = list(map(str, _NAMES.split()))
TOKENS = 3


@pytest.mark.parametrize("name", CLASSES)
def test_one_node_and_two_stages_give_mlx_lms_ids(name: str) -> None:
    config = tiny_config(name)
    expected = mlx_lms(small(config, stock=True), TOKENS)
    model = small(config)
    assert on_one_node(model, tokens=TOKENS) == expected
    # Of Ling's, a stage needs an attention layer, the third.
    at = 3 + CLASSES.index(name) % 3 if name.startswith("bailing") else 1 + len(name) % (LAYERS - 1)
    assert as_two_stages(model, config, at, tokens=TOKENS) == expected


@pytest.mark.parametrize("name", ["gemma4 with shared keys", "iquestloopcoder", "rwkv7", "talkie"])
def test_what_is_not_split_runs_on_one_node(name: str) -> None:
    config = tiny_config(name)
    expected = mlx_lms(small(config, stock=True), TOKENS)
    assert on_one_node(small(config), tokens=TOKENS) == expected


@pytest.mark.parametrize("name", ["gpt2", "gptj", "dbrx", "openelm", "phixtral", "mamba", "rwkv7"])
def test_a_card_is_made_of_such_a_config(name: str) -> None:
    card = derive_card(ModelId("m"), tiny_config(name) | {"max_seq_len": 4096}, 10**6)
    assert (card.num_layers, card.hidden_size, card.vocab_size) == (LAYERS, 128, 128)


def saved(config: dict[str, Any], folder: Path) -> Path:
    """A checkpoint with the demo's tokenizer."""
    folder.mkdir()
    model = small(config)
    weights = cast("dict[str, mx.array]", dict(tree_flatten(model.parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    _ = (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        _ = shutil.copyfile(DEMO / name, folder / name)
    return folder


def test_a_size_that_config_json_does_not_give_is_taken_from_the_card(tmp_path: Path) -> None:
    """The error names a line for exo-card.toml; written there, the model loads and answers."""
    config = tiny_config("phi")
    del config["vocab_size"]  # the class has a default, which nobody here knows
    folder = saved(config, tmp_path / "model")
    with pytest.raises(InvalidCard, match=r"write `vocab_size = …` into exo-card.toml") as caught:
        _ = ModelLibrary((tmp_path,), offline=True).get(ModelId("model"))
    line = re.search(r"`(\w+) = …`", caught.value.message)
    assert line is not None
    _ = (folder / "exo-card.toml").write_text(f"{line[1]} = 51200\n")
    card = ModelLibrary((tmp_path,), offline=True).get(ModelId("model")).card
    sizes = {"hidden_size": card.hidden_size, "vocabulary": card.vocab_size}
    loaded = load_quietly(spec(folder, 0, LAYERS, num_layers=LAYERS, **sizes))
    assert (loaded.expected.vocabulary, loaded.expected.hidden_size) == (51200, 128)


@pytest.mark.parametrize("name", ["gpt2", "openelm", "mamba", "gemma4 with shared keys"])
def test_an_engine_answers_as_mlx_lm_does_from_files(name: str, tmp_path: Path) -> None:
    config = tiny_config(name)
    folder = saved(config, tmp_path / "model")
    stage_spec = spec(folder, 0, LAYERS, num_layers=LAYERS)
    got = answer(
        engine_of(load_quietly(stage_spec), stage_spec), request(PROMPT, 0, 3, ignore_eos=True)
    )
    assert list(got.ids) == mlx_lms(small(config, stock=True), 3)


@pytest.mark.parametrize(
    ("name", "bounds", "timed"),
    [
        ("gemma4 with shared keys", (0, LAYERS), True),
        ("rwkv7", (0, 10), False),  # only the last layers are timed, and they need the first
        ("gemma4_text", (0, 4, LAYERS), True),
    ],
)
def test_runners_load_and_answer_where_layers_give_more_than_hidden_states(
    name: str, bounds: tuple[int, ...], timed: bool, tmp_path: Path
) -> None:
    """Layers that do not run alone are not timed; their models were refused for it, even whole."""
    config = tiny_config(name) | {"num_hidden_layers": bounds[-1]}
    folder = saved(config, tmp_path / "model")

    async def run() -> None:
        async with running(bounds, folder, measure_layers=True) as placement:
            for endpoint in placement.endpoints:
                assert endpoint.ready.HasField("layers") == timed
            got = await placement.answer(PROMPT, max_tokens=3, ignore_eos=True)
            assert got.ids == mlx_lms(small(config, stock=True), 3)

    asyncio.run(run())
