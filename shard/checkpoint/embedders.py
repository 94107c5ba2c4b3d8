"""An embedder's files: what an encoder's config.json means, as mlx-vlm's classes compute it, and
how the publisher makes one embedding of all hidden states.

The latter is in sentence-transformers' files: `modules.json` lists the steps,
`1_Pooling/config.json` sets how hidden states are pooled, and `sentence_bert_config.json` how many
tokens are read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from ...placement.config import ENCODERS, context_length
from ...placement.errors import InvalidCheckpoint, LoadFailed
from .headers import (
    MAX_OBJECT_BYTES,
    fault,
    parse_json,
    parse_object,
    quote,
    read_object,
    read_whole,
)

POOLING_FILE: Final = "1_Pooling/config.json"
_STEPS_FILE: Final = "modules.json"
_TEXT_FILE: Final = "sentence_bert_config.json"
_MOST_TOKENIZER_BYTES: Final = 64 << 20
_COMPUTED_STEPS: Final = ("Transformer", "Pooling", "Normalize")
_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}

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
    """Checks that an encoder has positions for `tokens` tokens. Raises LoadFailed."""
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


def pooling_of(folder: Path) -> str | None:
    """The pooling that the files declare: a card's, or names of what this engine does not compute.

    None if they do not say. Raises InvalidCheckpoint.
    """
    path = folder / POOLING_FILE
    if not path.exists():
        return None
    config = read_object(path)
    modes = [mode for flag, mode in _FLAGS.items() if config.get(flag) is True]
    if (mode := config.get("pooling_mode")) is not None:
        modes = [str(mode).replace("lasttoken", "last")]
    if modes == ["mean"] and config.get("include_prompt") is False:
        modes.append("include_prompt false")
    return " + ".join([*modes, *_other_steps(folder)]) or "nothing"


def embedder_facts(
    folder: Path, config: Mapping[str, Any], card: Mapping[str, object]
) -> dict[str, object]:
    """A card's fields that the files decide and `card` leaves open; none: it answers.

    Raises InvalidCheckpoint for an encoder whose embeddings would be other than the publisher's.
    """
    if not is_encoder(config):
        return {"capabilities": ["embeddings"]} if pooling_of(folder) == "last" else {}
    pooling = card.get("pooling") or pooling_of(folder) or ""
    require_pooling(folder, config, str(pooling))
    return {"pooling": pooling, **_longest(folder, config)}


def require_pooling(folder: Path, config: Mapping[str, Any], pooling: str) -> None:
    """Checks that `pooling` gives the embeddings that the files declare. Raises InvalidCheckpoint.

    `pooling` is "" if no file sets it.
    """
    published, computed = pooling_of(folder), ("last", "cls", "mean")
    if not is_encoder(config):  # hidden states of earlier chunks are gone
        computed = ("last",)
    if published not in (None, pooling) or (pooling and pooling not in computed):
        raise InvalidCheckpoint(
            f"{folder.name}: its card says that embeddings are made by {quote(pooling or 'no')} "
            f"pooling, and {POOLING_FILE} with {_STEPS_FILE} by {quote(published)}; this engine "
            f"computes {', '.join(computed)} alone; mend `pooling` in the card, or use another "
            "embedder",
            param=POOLING_FILE,
        )
    if not pooling:
        raise InvalidCheckpoint(
            f"{folder.name}: no {POOLING_FILE} says how its hidden states become an embedding; put "
            "that file there, or write the publisher's way into exo-card.toml: `pooling = "
            '"mean"`, "cls" or "last"',
            param="pooling",
        )


def _other_steps(folder: Path) -> list[str]:
    path = folder / _STEPS_FILE
    if not path.exists():
        return []
    steps = parse_json(path, read_whole(path, MAX_OBJECT_BYTES), strict=False)
    if not isinstance(steps, list):
        raise fault(path, "does not hold a JSON list")
    kinds = [
        str(cast("dict[str, object]", step).get("type")) if isinstance(step, dict) else "nothing"
        for step in cast("list[object]", steps)
    ]
    names = [kind.rpartition(".")[2] for kind in kinds]
    return [name for name in names if name not in _COMPUTED_STEPS]


def _longest(folder: Path, config: Mapping[str, Any]) -> dict[str, object]:
    path = folder / _TEXT_FILE
    if not path.exists():
        return {}
    text = read_object(path)
    if text.get("do_lower_case") is True and not _lowers(folder):
        raise fault(
            path,
            "wants text in lower case, which tokenizer.json does not make; use another embedder",
        )
    longest = text.get("max_seq_length")
    if longest is None:
        return {}
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        raise fault(path, f"has a max_seq_length of {str(longest)[:60]!r}, not a whole number")
    return {"context_length": min(longest, context_length(config))}


def _lowers(folder: Path) -> bool:
    path = folder / "tokenizer.json"
    raw = read_whole(path, _MOST_TOKENIZER_BYTES)
    normalizer = json.dumps(parse_object(path, raw, strict=False).get("normalizer"))
    return '"lowercase": true' in normalizer or '"Lowercase"' in normalizer
