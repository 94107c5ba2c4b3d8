"""Model cards from what files say, with one sentence about the first fault."""

import difflib
from collections.abc import Collection

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from .card import MAX_K, ModelCard, NativeMtp, SamplingDefaults, Variant
from .config import Facts, config_facts, printable
from .errors import InvalidCard
from .ids import ModelId


def parse_card(
    facts: Facts, source: str, *, max_k: int = MAX_K, derived: Collection[str] = ()
) -> ModelCard:
    """The card that `facts` spell out.

    Raises InvalidCard with one sentence: `source` (a file's name; config.json for the fields in
    `derived`), the field and the remedy.
    """
    try:
        card = ModelCard.model_validate(dict(facts))
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False)[0], source, derived) from error
    if card.native_mtp is not None and card.native_mtp.max_k > max_k:
        raise InvalidCard(
            f"{source}: native_mtp.max_k is {card.native_mtp.max_k}; set it to {max_k} or less",
            param="native_mtp.max_k",
        )
    return card


def derive_card(
    model_id: ModelId, config: Facts, weight_bytes: int, overrides: Facts | None = None
) -> ModelCard:
    """The card of a checkpoint: fields of `overrides` (its exo-card.toml), the rest from config.

    `config` is config.json, `weight_bytes` the size of all its tensors. MTP is declared by
    `overrides` or not at all: configs claim heads whose weights were stripped.
    Raises InvalidCard naming `config.json: field` or `exo-card.toml: field`.
    """
    overrides = overrides or {}
    if weight_bytes < 1:
        raise InvalidCard(f"{model_id}: the checkpoint holds no tensors; download it again")
    derived = config_facts(config, overrides)
    facts = {"id": model_id, "weight_bytes": weight_bytes, **derived, **overrides}
    return parse_card(facts, "exo-card.toml", derived=derived)


def _invalid(detail: ErrorDetails, source: str, derived: Collection[str]) -> InvalidCard:
    """One sentence for a person from pydantic's first finding."""
    path = [str(part) for part in detail["loc"]]
    if detail["type"] == "cross_check":
        path.append(detail.get("ctx", {})["field"])
    field = ".".join(path)
    match detail["type"]:
        case "cross_check":
            what = detail["msg"].replace(path[-1], field, 1)
        case "extra_forbidden":
            what = f"{field} is not a field of a card; {_nearest(field)}"
        case "missing":
            what = f"{field} is missing; write `{path[-1]} = …`"
        case _:
            rule = detail["msg"].removeprefix("Input should ").removeprefix("String should ")
            what = f"{field} is {printable(detail['input'])}; it must {rule}"
    if path[0] in derived:
        return InvalidCard(f"config.json: {what}", param=f"config.json: {field}")
    return InvalidCard(f"{source}: {what}", param=field)


def _nearest(field: str) -> str:
    table, _, name = field.rpartition(".")
    tables = {"native_mtp": NativeMtp, "sampling": SamplingDefaults, "variants": Variant}
    model = tables.get(table.partition(".")[0], ModelCard)
    fields = list(model.model_fields)
    close = difflib.get_close_matches(name[:100], fields, n=1)
    return f"did you mean {close[0]}?" if close else f"the fields are {', '.join(fields)}"
