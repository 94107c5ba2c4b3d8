"""A block drafter's checkpoint: for which models it drafts, and what it takes, by config.json."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

from ...placement.config import hidden_size, vocabulary_size
from ...placement.errors import ExoNodeError
from .checkpoint import Checkpoint

SECOND: Final = "DFlash2DraftModel"
"""The layout whose drafts follow each other: a draft's logits depend on the one before it."""
_ARCHITECTURES: Final = ("DFlashDraftModel", SECOND)
_MAX_SIZE: Final = 1 << 20
_MAX_LAYERS: Final = 64
_BOUNDS: Final = {
    "num_hidden_layers": (1, _MAX_LAYERS),
    "num_attention_heads": (1, _MAX_SIZE),
    "num_key_value_heads": (1, _MAX_SIZE),
    "head_dim": (1, _MAX_SIZE),
    "intermediate_size": (1, _MAX_SIZE),
    "block_size": (2, _MAX_SIZE),
    "num_target_layers": (0, _MAX_SIZE),
}
"""The least and the largest number in config.json, by its field."""
_FORMS: Final = {
    "layer_types": (list, "a list"),
    "sliding_window": (int, "a whole number"),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, "an object")),
}
"""Types of fields that may be left out, and their words."""
_REMEDY: Final = "name the drafter of this model, in its card (drafter.model) or by --drafter"


class DrafterUnusable(Exception):
    """Why a drafter cannot draft for a model, and what to do about it."""


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """The facts of a drafter by which it is fitted to a model, and counted in memory."""

    name: str
    hidden_size: int
    vocabulary: int
    target_layers: int
    """Layers of the target, or 0 where config.json does not say."""
    layer_ids: tuple[int, ...]
    """The target's layers whose outputs it reads."""
    block_size: int
    """Rows of a block, one more than it drafts at most."""
    cached_numbers: int
    """Numbers that a row adds to its caches."""
    weight_bytes: int
    """Its tensors, without copies of the target's, which are not loaded."""

    @property
    def most_drafts(self) -> int:
        """Tokens of a round, at most."""
        return self.block_size - 1

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that a card may have of it."""
        return {"weight_bytes": self.weight_bytes, "cached_numbers": self.cached_numbers}

    def require_fit(self, vocabulary: int, hidden: int, layers: int, most: int) -> None:
        """Checks that it drafts up to `most` tokens for a model of these sizes. Raises
        DrafterUnusable."""
        drafter = f"the block drafter {self.name}"
        for part, own, other in (
            ("a vocabulary of {} ids", self.vocabulary, vocabulary),
            ("hidden states of {} numbers", self.hidden_size, hidden),
            ("{} layers", self.target_layers or layers, layers),
        ):
            if own != other:
                raise DrafterUnusable(
                    f"{drafter} is for a model with {part.format(own)}, and this one has {other}; "
                    + _REMEDY
                )
        if max(self.layer_ids) >= layers:
            raise DrafterUnusable(
                f"{drafter} reads layer {max(self.layer_ids)}, and the model has {layers}; "
                + _REMEDY
            )
        if most > self.most_drafts:
            raise DrafterUnusable(
                f"{drafter} drafts at most {self.most_drafts} tokens a round; set "
                "drafter.max_k in the model's card to that or less"
            )


def is_own(tensor: str) -> bool:
    """Whether a tensor is the drafter's own, and no copy of the target's ends."""
    return not tensor.removeprefix("model.").startswith(("embed_tokens.", "lm_head."))


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a block drafter, which answers nothing by itself."""
    return "dflash_config" in config or any("DFlash" in name for name in _architectures(config))


def absent_drafter(name: str) -> DrafterUnusable:
    """The error for a drafter that is not on this disk."""
    return DrafterUnusable(
        f"the block drafter {name} is not on this machine; `exo-node models pull {name}` gets it"
    )


@contextmanager
def reading_drafter(name: str) -> Generator[None]:
    """Names the drafter in errors about files that are damaged or may not be read. Raises
    DrafterUnusable."""
    try:
        yield
    except ExoNodeError as fault:
        raise DrafterUnusable(
            f"the block drafter {name} cannot be read: {fault.message.removesuffix('.')}"
        ) from fault


def read_drafter(checkpoint: Checkpoint, name: str) -> DrafterFacts:
    """The facts of a drafter. Raises DrafterUnusable."""
    config = checkpoint.config
    kinds = _architectures(config)
    if len(kinds) != 1 or kinds[0] not in _ARCHITECTURES:
        kind = ", ".join(kinds)[:100] or "no architecture"
        raise DrafterUnusable(
            f"{name} is no block drafter that is implemented here ({kind}); name a checkpoint "
            f"whose config.json has {' or '.join(_ARCHITECTURES)}"
        )
    own: Any = config.get("dflash_config")
    merged: dict[str, Any] = {
        "num_target_layers": 0,
        **config,
        **(own if isinstance(own, dict) else {}),
    }
    if any(merged.get(name) for name in ("causal", "is_causal", "dflash_query_causal")):
        raise DrafterUnusable(
            f"the block drafter {name} masks its block, which is not implemented; name another one"
        )
    vocabulary = vocabulary_size(config)
    for field, (least, most) in {**_BOUNDS, "mask_token_id": (0, vocabulary - 1)}.items():
        if type(value := merged.get(field)) is not int or not least <= value <= most:
            raise _of_no_drafter(name, field, value, f"a number from {least} to {most}")
    for field, (form, words) in _FORMS.items():
        if (value := merged.get(field)) is not None and type(value) is not form:
            raise _of_no_drafter(name, field, value, words)
    ids: Any = merged.get("target_layer_ids")
    read = cast("list[Any]", ids) if isinstance(ids, list) else []
    are_numbers = all(type(each) is int and 0 <= each < _MAX_SIZE for each in read)
    if not read or not are_numbers or len({*read}) < len(read):
        raise _of_no_drafter(name, "target_layer_ids", ids, "a list of layers, each once")
    rows = merged["num_hidden_layers"] * merged["num_key_value_heads"]
    return DrafterFacts(
        name=name,
        hidden_size=hidden_size(config),
        vocabulary=vocabulary,
        target_layers=merged["num_target_layers"],
        layer_ids=tuple(read),
        block_size=merged["block_size"],
        cached_numbers=2 * rows * merged["head_dim"],
        weight_bytes=sum(t.nbytes for name, t in checkpoint.tensors.items() if is_own(name)),
    )


def _of_no_drafter(name: str, field: str, value: object, right: str) -> DrafterUnusable:
    """The error for a field of config.json. `right`: what it has to be."""
    return DrafterUnusable(
        f"{field} in config.json of the block drafter {name} is {str(value)[:80]}, not {right}; "
        "use a whole copy of the publisher's checkpoint"
    )


def is_second(config: Mapping[str, Any]) -> bool:
    """Whether a drafter's config.json is of the SECOND layout."""
    return SECOND in _architectures(config)


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names: Any = config.get("architectures")
    return [str(name) for name in cast("list[Any]", names)] if isinstance(names, list) else []
