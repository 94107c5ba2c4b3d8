"""A person's own cards: TOML files in a folder, which win over those that ship. Blocks."""

from collections.abc import Mapping
from pathlib import Path

from ...placement.card import ModelCard
from ...placement.errors import ExoNodeError, InvalidCard
from ...placement.ids import ModelId
from ...placement.library import parse_card, read_card_file
from .model_folder import Stamp, stamp

_Facts = Mapping[str, object]


class UserCards:
    """Read again where a file has changed; a bad one is a fault, and the others stay in use."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._stamp: Stamp | None = None
        self._cards: dict[ModelId, tuple[Path, _Facts]] = {}
        self._faults: dict[str, ExoNodeError] = {}
        self._merged: tuple[object, Mapping[ModelId, ModelCard]] | None = None

    def over(self, shipped: Mapping[ModelId, ModelCard]) -> Mapping[ModelId, ModelCard]:
        """`shipped` with the fields of the cards of the same id replaced, and new cards added.

        A card of a model on this disk may have any few fields; others must be whole.
        """
        self._read()
        if self._merged is None or self._merged[0] is not shipped:
            self._merged = (shipped, self._merge(shipped))
        return self._merged[1]

    def facts_of(self, model: ModelId) -> _Facts:
        """The fields of a model's card, without its id."""
        self._read()
        if model not in self._cards:
            return {}
        return {name: value for name, value in self._cards[model][1].items() if name != "id"}

    def faults(self) -> Mapping[str, ExoNodeError]:
        """The bad cards, by their files' names."""
        self._read()
        return self._faults

    def _merge(self, shipped: Mapping[ModelId, ModelCard]) -> Mapping[ModelId, ModelCard]:
        merged = dict(shipped)
        for model, (path, facts) in self._cards.items():
            base = shipped.get(model)
            if base is None and "model_type" not in facts:
                continue  # a few fields of a model that is on the disk
            whole = {**(base.model_dump(exclude_unset=True) if base else {}), **facts}
            try:
                merged[model] = parse_card(whole, str(path))
            except InvalidCard as fault:
                self._faults[path.name] = fault
        return merged

    def _read(self) -> None:
        current = stamp(self._folder) if self._folder else ()
        if current == self._stamp:
            return
        paths = sorted(self._folder.glob("*.toml")) if self._folder else []
        self._stamp, self._merged, self._cards, self._faults = current, None, {}, {}
        for path in paths:
            try:
                facts = read_card_file(path)
                self._cards[_id_of(path, facts)] = (path, facts)
            except InvalidCard as fault:
                self._faults[path.name] = fault


def _id_of(path: Path, facts: _Facts) -> ModelId:
    model = facts.get("id")
    if not isinstance(model, str) or not model:
        raise InvalidCard(f'{path}: id is missing; write `id = "OWNER/NAME"`', param="id")
    return ModelId(model)
