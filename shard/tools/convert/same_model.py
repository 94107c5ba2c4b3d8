"""Checks by sizes and tokens that the MTP head of one checkpoint belongs to another."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from ....placement.errors import InvalidCheckpoint
from ...checkpoint.checkpoint import Checkpoint, text_config

_SIZES: Final = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "kv_lora_rank",
)
"""Sizes of a head, or of the backbone that it was trained with."""
_TOKENIZER: Final = "tokenizer.json"
_MAX_TOKENIZER_BYTES: Final = 256 << 20


def require_same_model(target: Checkpoint, source: Checkpoint) -> str:
    """Raises InvalidCheckpoint if the head would draft nonsense.

    Returns a note about a missing check, or "".
    """
    ours, theirs = text_config(target.config), text_config(source.config)
    for key in _SIZES:
        if ours.get(key) != theirs.get(key):
            raise InvalidCheckpoint(
                f"the head of {source.folder.name} does not belong to {target.folder.name}: {key} "
                f"is {theirs.get(key)!r} there and {ours.get(key)!r} here; take it from the model "
                "that this one was made of",
                param=key,
            )
    tokens, others = _vocabulary(target.folder), _vocabulary(source.folder)
    if tokens is None or others is None:
        without_tokens = target if tokens is None else source
        return f"{without_tokens.folder.name} has no {_TOKENIZER}, so the tokens were not compared"
    if tokens != others:
        raise InvalidCheckpoint(
            f"{source.folder.name} has other tokens than {target.folder.name} ({_TOKENIZER}): its "
            "head would draft the wrong ones; take it from the model that this one was made of",
            param=_TOKENIZER,
        )
    return ""


def _vocabulary(folder: Path) -> Mapping[str, Any] | list[Any] | None:
    """The tokenizer's table of tokens; None if there is no such file or table."""
    path = folder / _TOKENIZER
    if not path.is_file() or path.stat().st_size > _MAX_TOKENIZER_BYTES:
        return None
    try:
        whole: object = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(
            f"{folder.name}/{_TOKENIZER} is no JSON ({error}); download the model again",
            param=_TOKENIZER,
        ) from error
    model = cast("dict[str, Any]", whole).get("model") if isinstance(whole, dict) else None
    return cast("dict[str, Any]", model).get("vocab") if isinstance(model, dict) else None
