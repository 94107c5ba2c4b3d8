"""Small model cards, and the bytes of their stages."""

from exo_node.placement.card import ModelCard
from exo_node.placement.cost import ModelSizes
from exo_node.placement.library import parse_card

MTP = {"default_k": 1, "max_k": 3}


def card(layers: int = 12, /, **changes: object) -> ModelCard:
    """A card whose ends and caches are so small that `weight_bytes` are the layers."""
    facts = {
        "id": "m",
        "model_type": "llama",
        "num_layers": layers,
        "hidden_size": 1,
        "vocab_size": 1,
        "num_attention_layers": layers,
        "num_key_value_heads": 1,
        "head_dim": 1,
        "context_length": 1,
        "weight_bytes": 1_000_000,
    }
    return parse_card(facts | changes, "test.toml")


def stage_bytes(
    model: ModelCard, first: int, end: int, generator: bool, context: int, mtp: bool = False
) -> int:
    """Bytes that layers [first, end) need on a node, headroom included."""
    return ModelSizes.of(model, context).need(first, end, generator=generator, mtp=mtp)
