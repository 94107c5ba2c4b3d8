"""Cards from files: those of this package, a person's exo-card.toml, and a checkpoint's config.

The folder's only I/O. A fault is one sentence on the first one.
"""

import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping
from importlib.resources import files
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from .card import (
    MAX_K,
    SHIPPED_MAX_K,
    BlockDrafter,
    ModelCard,
    NativeMtp,
    SamplingDefaults,
    Variant,
)
from .config import Facts, config_facts, printable
from .errors import InvalidCard
from .ids import ModelId

CARD_FILE = "exo-card.toml"
"""Inside a model's folder, beside config.json."""
_MAX_CARD_BYTES = 65536
_MAX_ID = 200  # the match below takes quadratic time


def packaged_cards() -> dict[ModelId, ModelCard]:
    """The cards that ship with exo-node, by id, in the order of their ids.

    A card's file is named after its id, with `--` for `/`.
    """
    cards = [
        parse_card(_toml(entry.read_bytes(), entry.name), entry.name, max_k=SHIPPED_MAX_K)
        for entry in files(__name__.rpartition(".")[0]).joinpath("cards").iterdir()
        if entry.name.endswith(".toml")
    ]
    return {card.id: card for card in sorted(cards, key=lambda card: card.id)}


def read_card_file(path: Path) -> Mapping[str, object]:
    """The fields of a person's card, not validated yet: the `overrides` of `derive_card`.

    Raises InvalidCard, with file and line, where it cannot be read as TOML.
    """
    if not path.is_file():  # a pipe would block for ever
        raise InvalidCard(f"{path} is not a file; remove it or write a card there", param=path.name)
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_CARD_BYTES + 1)
    except OSError as error:
        raise InvalidCard(
            f"{path} cannot be read ({error.strerror}); mend its permissions", param=path.name
        ) from error
    if len(raw) > _MAX_CARD_BYTES:
        raise InvalidCard(
            f"{path} is over {_MAX_CARD_BYTES} bytes; a card is a screenful", param=path.name
        )
    return _toml(raw, str(path))


def nearest_ids(unknown: str, ids: Iterable[ModelId], n: int = 3) -> list[ModelId]:
    """Up to `n` of `ids` that a person may have meant by `unknown`, the likeliest first."""
    query = unknown[:_MAX_ID].casefold().rpartition("/")[2]  # many have one publisher

    def likeness(model: ModelId) -> float:
        name = model.casefold()
        short = name.rpartition("/")[2]
        if len(query) > 2 and (query in name or short in query):
            return 1.0
        return max(difflib.SequenceMatcher(None, query, text).ratio() for text in (name, short))

    ranked = sorted((-likeness(model), model) for model in ids)
    return [model for score, model in ranked if -score >= 0.5][:n]


def not_here(model: str) -> str:
    """Why a model of the catalogue cannot answer, and the command that changes it."""
    return f"{model} is not on this machine; `exo-node models pull {model}` downloads it"


def _toml(raw: bytes, source: str) -> Mapping[str, object]:
    try:
        return tomllib.loads(raw.decode())
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InvalidCard(
            f"{source}, line {line}: not UTF-8; save the file as UTF-8", param=source
        ) from error
    except (ValueError, RecursionError) as error:
        # Beside TOMLDecodeError: a number of too many digits, brackets nested too deep.
        what, _, place = str(error).partition(" (at ")
        where = f", {place.rstrip(')')}" if place else ""
        raise InvalidCard(f"{source}{where}: {what}; mend the TOML there", param=source) from error


def parse_card(
    facts: Facts, source: str, *, max_k: int = MAX_K, derived: Collection[str] = ()
) -> ModelCard:
    """The card that `facts` spell out. Raises InvalidCard with one sentence: `source` (a file's
    name; config.json for the fields in `derived`), the field and the remedy."""
    try:
        card = ModelCard.model_validate(dict(facts))
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False)[0], source, derived) from error
    for table, depth in (("native_mtp", card.native_mtp), ("drafter", card.drafter)):
        if depth is not None and depth.max_k > max_k:
            raise InvalidCard(
                f"{source}: {table}.max_k is {depth.max_k}; set it to {max_k} or less",
                param=f"{table}.max_k",
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
    tables = {
        "native_mtp": NativeMtp,
        "drafter": BlockDrafter,
        "sampling": SamplingDefaults,
        "variants": Variant,
    }
    model = tables.get(table.partition(".")[0], ModelCard)
    fields = list(model.model_fields)
    close = difflib.get_close_matches(name[:100], fields, n=1)
    return f"did you mean {close[0]}?" if close else f"the fields are {', '.join(fields)}"
