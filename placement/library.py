"""Cards from files: those of this package and a person's exo-card.toml. The folder's only I/O."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path

from .card import SHIPPED_MAX_K, ModelCard
from .errors import InvalidCard
from .ids import ModelId
from .parse_card import parse_card

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
