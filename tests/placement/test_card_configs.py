"""Cards of quantised repositories say what their config.json does; `card_configs.json` has those.

Each is as public sources give it, named there or in the card.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from exo_node.placement.ids import ModelId
from exo_node.placement.library import derive_card, packaged_cards

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "card_configs.json").read_text()
)
CLASSES = {"minimax_m2": "minimax", "kimi_k2": "deepseek_v3", "mistral": "llama"}
"""The modules that mlx-lm runs these types with, which cards name."""
FREE = ("repository", "native_mtp", "sampling", "variants", "capabilities")
"""What config.json does not tell."""


@pytest.mark.parametrize("model", CONFIGS)
def test_the_card_says_what_config_json_says(model: str) -> None:
    card, fixture = packaged_cards()[ModelId(model)], CONFIGS[model]
    assert fixture["source"]
    derived = derive_card(card.id, fixture["config"], card.weight_bytes)
    fields = {field: getattr(card, field) for field in FREE}
    kind = CLASSES.get(derived.model_type, derived.model_type)
    assert derived.model_copy(update={**fields, "model_type": kind}) == card
    assert card.repository == card.id


def test_published_sizes_are_those_of_their_bits() -> None:
    """A vision tower and unquantised ends add up to a quarter to what the bits tell."""
    for card in packaged_cards().values():
        for variant in card.variants:
            size = card.as_variant(variant.model_copy(update={"weight_bytes": None})).weight_bytes
            assert 0.9 < (variant.weight_bytes or size) / size < 1.25, (variant, size)
