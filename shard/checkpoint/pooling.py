"""How an embedder's publisher makes one embedding of all hidden states, in files of its own.

They are sentence-transformers': `modules.json` lists the steps, `1_Pooling/config.json` says how
hidden states are pooled, and `sentence_bert_config.json` how many tokens are read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from ...placement.config import context_length
from ...placement.errors import InvalidCheckpoint
from .encoders import is_encoder
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


def pooling_of(folder: Path) -> str | None:
    """The pooling that the files declare: a card's, or names of what this engine does not compute.

    None: they do not say. Raises InvalidCheckpoint.
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
    """Raises InvalidCheckpoint unless `pooling` gives the embeddings that the files declare.

    `pooling` "": nothing says how the model pools.
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
