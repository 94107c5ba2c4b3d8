"""A packaged card's bytes are those of the model that it describes, as mlx-lm's class makes it.

Its layers, widths, experts and size come from different sources; one wrong figure parts them.
Nothing is computed: arrays that were never evaluated know their size.
"""

import copy
import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from exo_node.mtp.families.table import family_of
from exo_node.placement.ids import ModelId
from exo_node.placement.library import derive_card, packaged_cards
from exo_node.shard.model.open_model import model_classes

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "card_configs.json").read_text()
)
TOKENIZER = 40_000_000
"""Sizes of whole repositories count the tokenizer's files."""


def text_bytes(config: dict[str, Any]) -> int:
    """The bytes of the text model under mlx-lm's quantisation."""
    from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage]

    how = config["quantization"]
    model_class, arguments = _get_classes(config)
    model: Any = model_class(arguments.from_dict(copy.deepcopy(config)))
    model.set_dtype(mx.bfloat16)
    keeps = getattr(model, "quant_predicate", None)

    def quantised(path: str, module: Any) -> Any:
        return hasattr(module, "to_quantized") and (keeps is None or keeps(path, module))

    nn.quantize(model, **how, class_predicate=quantised)
    return sum(cast(mx.array, array).nbytes for _, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize("model", CONFIGS)
def test_a_card_weighs_what_its_figures_make(model: str) -> None:
    fixture, card = CONFIGS[model], packaged_cards()[ModelId(model)]
    text, beyond = text_bytes(fixture["config"]), fixture["beyond_text"]
    assert 0.997 * text <= card.weight_bytes <= text * 1.005 + beyond + TOKENIZER


def test_flash_next_weighs_what_its_class_makes() -> None:
    """mlx-lm has no class of it. Its tables' rows do not divide into groups of 64."""
    fixture = json.loads((Path(__file__).parents[2] / "qwen4_config.json").read_text())
    card, config = packaged_cards()[ModelId("Qwen/Qwen3.8-Flash-Next")], fixture["config"]
    free = ("repository", "native_mtp", "variants", "capabilities", "mapped_bytes")
    derived = derive_card(card.id, config, card.weight_bytes)
    assert derived.model_copy(update={name: getattr(card, name) for name in free}) == card
    model_class, arguments = cast(Any, model_classes(config))
    model: Any = model_class(arguments.from_dict(copy.deepcopy(config)))
    model.set_dtype(mx.bfloat16)
    head = cast(Any, family_of(model)).make_head()
    head.set_dtype(mx.bfloat16)
    assert card.weight_bytes == nbytes_of(model) + nbytes_of(head)
    assert card.mapped_bytes == nbytes_of(model, ".ngram_embedding.")
    keeps = model.language_model.quant_predicate

    def quantised(path: str, module: Any) -> Any:
        how = hasattr(module, "to_quantized") and keeps(path, module)
        is_table = isinstance(how, dict) and "fallback_group_size" in how
        return {"group_size": 32, "bits": 4} if is_table else cast(Any, how)

    nn.quantize(model, 64, 4, class_predicate=quantised)
    packed = card.variants[0]
    assert packed.weight_bytes == nbytes_of(model)
    assert packed.mapped_bytes == nbytes_of(model, ".ngram_embedding.")


def nbytes_of(module: nn.Module, part: str = "") -> int:
    flat = cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))
    return sum(array.nbytes for name, array in flat if part in name)
