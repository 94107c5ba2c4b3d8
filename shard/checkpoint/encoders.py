"""An encoder's config.json, as mlx-vlm's classes compute it."""

from collections.abc import Mapping
from typing import Any, Final, cast

from ...placement.config import ENCODERS, context_length
from ...placement.errors import InvalidCheckpoint, LoadFailed

_EXPECTED: Final = {
    "hidden_act": "gelu",
    "hidden_activation": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "rope_scaling": None,
}
"""The only values that the classes compute; they ignore the fields."""
_LEAST: Final = {"local_attention": 2, "global_attn_every_n_layers": 1}
"""Least values of ModernBERT's numbers; its class computes others, to no purpose."""
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether the rows of this model attend to all rows of their text."""
    return config.get("model_type") in ENCODERS


def encoder_family(config: Mapping[str, Any]) -> str:
    """mlx-vlm's module for an encoder."""
    kind = str(config["model_type"])
    return "xlm_roberta" if kind.endswith("roberta") else kind


def encoder_changes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Changes to an encoder's config.json: ModernBERT's newer fields under their older names, which
    the class reads. Raises InvalidCheckpoint for what it would compute wrongly."""
    for field, expected in _EXPECTED.items():
        if config.get(field) not in (None, expected):
            raise _refused(field, config[field], repr(expected))
    return _modernbert_changes(config) if config["model_type"] == "modernbert" else {}


def require_positions(config: Mapping[str, Any], tokens: int) -> None:
    """Raises LoadFailed for an encoder that has no positions for so many tokens."""
    if is_encoder(config) and tokens > (most := context_length(config)):
        raise LoadFailed(
            f"the model's card has a context_length of {tokens}, and its config.json positions for "
            f"{most} tokens; set context_length to {most} or less",
            param="context_length",
        )


def _modernbert_changes(config: Mapping[str, Any]) -> dict[str, Any]:
    for field, least in _LEAST.items():
        number = least if config.get(field) is None else config[field]
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise _refused(field, number, f"a whole number from {least} up")
    changes: dict[str, Any] = {}
    if (types := config.get("layer_types")) is not None:
        layers = config["num_hidden_layers"]
        if not isinstance(types, list) or _FULL not in types:
            raise _refused("layer_types", types, f"a list with {_FULL!r}")
        every = next((i for i in range(1, len(types)) if types[i] == _FULL), max(1, layers))
        if types != [_SLIDING if i % every else _FULL for i in range(layers)]:
            raise _refused("layer_types", types, f"{_FULL!r} every so many layers, from the first")
        changes["global_attn_every_n_layers"] = every
    ropes: object = config.get("rope_parameters") or {}
    for field, kind in (("global_rope_theta", _FULL), ("local_rope_theta", _SLIDING)):
        rope = _table(_table(ropes).get(kind) or {})
        if rope.get("rope_type", "default") != "default":
            raise _refused("rope_parameters", rope, "rope_type 'default'")
        if "rope_theta" in rope:
            changes[field] = rope["rope_theta"]
    return changes


def _table(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refused("rope_parameters", value, "a table for each kind of layer")
    return cast("dict[str, Any]", value)


def _refused(field: str, value: object, expected: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(
        f"config.json: {field} is {str(value)[:60]!r}, and encoders are computed with {expected} "
        "only; use another embedder",
        param=f"config.json: {field}",
    )
