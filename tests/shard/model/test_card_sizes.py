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

from exo_node.placement.ids import ModelId
from exo_node.placement.library import packaged_cards

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
