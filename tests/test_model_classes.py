"""mlx-lm's model classes, tiny and random: the ids of `generate_step`, on one node and split.

`bench/families.py` runs all of them, at every border; this is a class each at one border.
"""

import pytest
from zoo import LAYERS, tiny_config
from zoo_runs import as_two_stages, mlx_lms, on_one_node, small

from exo_node.placement.card import derive_card
from exo_node.placement.ids import ModelId

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
    wanted = mlx_lms(small(config, stock=True), TOKENS)
    model = small(config)
    assert on_one_node(model, tokens=TOKENS) == wanted
    # Of Ling's, a stage needs an attention layer, the third.
    at = 3 + CLASSES.index(name) % 3 if name.startswith("bailing") else 1 + len(name) % (LAYERS - 1)
    assert as_two_stages(model, config, at, tokens=TOKENS) == wanted


@pytest.mark.parametrize("name", ["gemma4 with shared keys", "iquestloopcoder", "rwkv7", "talkie"])
def test_what_is_not_split_runs_on_one_node(name: str) -> None:
    config = tiny_config(name)
    wanted = mlx_lms(small(config, stock=True), TOKENS)
    assert on_one_node(small(config), tokens=TOKENS) == wanted


@pytest.mark.parametrize("name", ["gpt2", "gptj", "dbrx", "openelm", "phixtral", "mamba", "rwkv7"])
def test_a_card_is_made_of_such_a_config(name: str) -> None:
    card = derive_card(ModelId("m"), tiny_config(name) | {"max_seq_len": 4096}, 10**6)
    assert (card.num_layers, card.hidden_size, card.vocab_size) == (LAYERS, 128, 128)
