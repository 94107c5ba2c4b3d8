"""The models on this node's disk by id: shipped, in `--models-dir`, in the Hugging Face cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, get_args

from ...placement.card import Capability, ModelCard
from ...placement.drafting import HeadState
from ...placement.errors import (
    ExoNodeError,
    InvalidCheckpoint,
    InvalidSettings,
    ModelNotFound,
    RemovalRefused,
)
from ...placement.ids import ModelId
from ...placement.library import (
    CARD_FILE,
    derive_card,
    nearest_ids,
    not_here,
    packaged_cards,
    read_card_file,
)
from ...shard.checkpoint.checkpoint import Checkpoint, is_weight_file, read_checkpoint, read_config
from ...shard.checkpoint.drafters import DrafterUnusable, is_drafter
from ...shard.checkpoint.embedders import embedder_facts
from ...shard.checkpoint.head_tensors import HeadFound, find_head
from ...shard.checkpoint.model_classes import mapped_bytes
from .block_drafters import BlockDrafters
from .file_facts import FileFacts, FolderCache, read_file_facts
from .gguf_places import by_name, by_path, in_model_folders
from .hub_cache import HubCache, is_own, offline_by
from .model_folder import CONFIG, Place, bytes_in, stamp
from .places import Removal, all_places, find_removal, in_folders
from .user_cards import UserCards

DEMO: Final = ModelId("demo")
DEFAULT_HEAD: Final = {"num_layers": 1, "default_k": 1, "max_k": 7}
"""`native_mtp` of a model whose files have a whole head and whose card does not say how to use it:
adaptive depth begins with one draft, and measured costs and acceptance decide, from 0 to 7."""
FIRST_OF_THREE: Final = {"num_layers": 1, "default_k": 1, "max_k": 3}
"""The same of a head of three layers, one for each draft, of which the first is used: how often its
fourth draft is accepted was not measured."""

_HEADS: Final[Mapping[str, Mapping[str, object]]] = {
    **dict.fromkeys(("mimo_v2", "step"), FIRST_OF_THREE),
    "streams": {**DEFAULT_HEAD, "hidden": "pre_norm"},
}
"""Fields by the layout of the head, where they are not those of DEFAULT_HEAD."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a request may name. `folder` is None while it is not on this machine."""

    card: ModelCard
    folder: Path | None


class ModelLibrary:
    """Reads cards and headers; its methods block, and never ask the hub."""

    def __init__(
        self, folders: Sequence[Path] = (), *, offline: bool, cards: Path | None = None
    ) -> None:
        """`cards`: a person's folder of cards, which win over those that ship."""
        self.offline = offline
        self._user = UserCards(cards)
        self._roots = tuple(folders)
        self._shipped_cards = packaged_cards()
        self._checkpoints = FolderCache(lambda folder, _: read_checkpoint(folder))
        self.drafters = BlockDrafters(self._roots, self.checkpoint)
        self._files = FolderCache(read_file_facts)
        self._opened: dict[Place, tuple[object, KnownModel | ExoNodeError]] = {}
        self.broken: Mapping[ModelId, ExoNodeError] = {}
        """The models that the last scan could not use, and why."""
        self.partial: Mapping[ModelId, int] = {}
        """The bytes of each partial copy that the last scan found."""
        self._access_faults: Sequence[str] = ()

    @property
    def offline_by(self) -> str:
        """The setting that forbids to ask the hub; "" where none does."""
        return offline_by(self.offline)

    @property
    def _packaged(self) -> Mapping[ModelId, ModelCard]:
        """The cards that ship, with a person's cards over them."""
        return self._user.over(self._shipped_cards)

    @property
    def _variants(self) -> Mapping[ModelId, ModelCard]:
        return {
            ModelId(variant.repository): card.as_variant(variant)
            for card in self._packaged.values()
            for variant in card.variants
        }

    def scan(self) -> Mapping[ModelId, KnownModel]:
        """Every model on this disk, by id; `broken` and `partial` have the others.

        Only what has changed since the last scan is read again.
        """
        models = {DEMO: self._of_card(self._packaged[DEMO])}
        broken: dict[ModelId, ExoNodeError] = {}
        partial: dict[ModelId, int] = {}
        on_disk = all_places(self._roots)
        for place in on_disk:
            if place.partial:
                partial[place.id] = bytes_in(place.folder)
                continue
            if place.id in models or place.id in broken:
                continue
            match self._open_changed(place):
                case KnownModel() as model:
                    models[place.id] = self._with_sizes(model)
                case fault:
                    broken[place.id] = fault
        self._opened = {place: result for place, result in self._opened.items() if place in on_disk}
        self._access_faults = [place.fault for place in on_disk if place.fault]
        self.partial = partial
        gguf = [each for each in in_model_folders(self._roots) if each.import_name not in models]
        files = {ModelId(each.id): each.fault for each in gguf}
        cards = {ModelId(name): fault for name, fault in self._user.faults().items()}
        self.broken = {**files, **broken, **cards}
        return models

    def catalogue(self) -> Mapping[ModelId, KnownModel]:
        """The models that there are cards of, on this disk or not."""
        cards = {**self._packaged, **self._variants}
        return {model: self._listed(card) for model, card in cards.items()}

    def original(self, model: ModelId) -> ModelId | None:
        """The model whose card lists `model` as a published quantisation."""
        cards = self._packaged.values()
        return next((c.id for c in cards if any(v.repository == model for v in c.variants)), None)

    def get(self, model: ModelId) -> KnownModel:
        """One model, its card read afresh.

        Raises ModelNotFound with the nearest ids, and what is wrong with a model's folder.
        """
        for place in in_folders(self._roots):
            if place.id == model and not place.partial:
                return self.open(place)
        if (card := self._packaged.get(model)) is not None:
            return self._of_card(card)
        if (folder := HubCache().find(model)) is not None:
            return self.open(Place(model, folder, hub=True))
        if (card := self._variants.get(model)) is not None:
            return self._of_card(card)
        if (file := by_name(model, in_model_folders(self._roots))) is not None:
            raise file.fault
        raise self._unknown(model)

    def absence(self, model: ModelId) -> ModelNotFound:
        """The error for a model without files on this disk, with the command that gets them."""
        try:
            _ = self.get(model)
        except ModelNotFound as fault:
            return fault
        return ModelNotFound(not_here(model), param="model")

    def folder(self, name: str) -> Path:
        """The folder of a model on this disk, by id or path. Raises ModelNotFound."""
        path = Path(name).expanduser()
        if (path / CONFIG).is_file():
            return path.absolute()
        if (file := by_path(name)) is not None:
            raise file.fault
        if (folder := self.get(ModelId(name)).folder) is None:
            raise ModelNotFound(
                f"{name} is not on this machine; `exo-node models pull {name}` gets it"
            )
        return folder

    def repository(self, model: str, bits: int | None = None) -> tuple[str, str | None]:
        """The repository to download for a model, and the revision that its card names.

        `bits`: of the published quantisation to download instead. Raises ModelNotFound, and
        InvalidSettings where no such quantisation is known.
        """
        if model == DEMO:
            raise ModelNotFound(f"{DEMO} ships with exo-node; there is nothing to download")
        entry = self.catalogue().get(ModelId(model))
        if bits is None:
            card = entry.card if entry else None
            return (card.repository or model, card.revision) if card else (model, None)
        variants = entry.card.variants if entry else ()
        for variant in variants:
            if variant.bits == bits:
                return variant.repository, None
        published = sorted({variant.bits for variant in variants})
        there = f"there is one of {' and of '.join(map(str, published))} bits; " * bool(published)
        raise InvalidSettings(
            f"--quant: no quantisation of {model} to {bits} bits is known; {there}give a "
            "repository's own id",
            param="--quant",
        )

    def removal(self, model: str, own_folder: Path, *, only_own: bool = False) -> Removal:
        """The removal of a model of the cache, or of exo-node's own folder.

        `only_own`: of the cache only what exo-node brought there. Raises ModelNotFound, and
        RemovalRefused where it is not exo-node's to delete.
        """
        if model == DEMO:
            raise RemovalRefused(f"{DEMO} is part of exo-node and stays", param="model")
        removal = find_removal(ModelId(model), own_folder)
        if removal is None:  # a card may name another repository, or one revision
            repository, revision = self.repository(model)
            name = f"{repository}@{revision}" if revision else repository
            removal = find_removal(ModelId(name), own_folder)
        if removal is not None and only_own and not removal.own:
            raise RemovalRefused(
                f"{model} was brought into the Hugging Face cache by another program, which may "
                f"use it; `exo-node models rm {model}` on this machine deletes it all the same",
                param="model",
            )
        if removal is not None:
            return removal
        try:
            folder = self.get(ModelId(model)).folder
        except ModelNotFound as fault:
            raise self._unknown(ModelId(model), here=True) from fault
        if folder is None:
            raise ModelNotFound(
                f"{model} is not on this machine; there is nothing to delete", param="model"
            )
        raise RemovalRefused(
            f"{model} lies in {folder}, a folder of yours; delete that folder yourself",
            param="model",
        )

    def kept_reason(self, model: KnownModel) -> str:
        """Why a node deletes none of the model's files here for the page; "" where it does."""
        if model.card.id == DEMO:
            return "it is part of exo-node"
        folder = model.folder
        if folder is None or (self._roots and folder.is_relative_to(self._roots[-1])):
            return ""
        if not folder.is_relative_to(HubCache().folder):
            return f"{folder} is a folder of yours"
        return "" if is_own(folder) else "another program brought it"

    def card_of(self, model: ModelId, config: Mapping[str, Any], size: int) -> ModelCard:
        """The card of a repository that is not here. Raises InvalidCard."""
        if (card := self._packaged.get(model)) is not None:
            return card
        return derive_card(model, config, size, self._user.facts_of(model))

    def checkpoint(self, folder: Path) -> Checkpoint:
        """The validated headers of a folder. Raises InvalidCheckpoint."""
        return self._checkpoints.get(folder)

    def head(self, model: KnownModel) -> HeadState:
        """Whether what drafts for the model is in its files, or on this disk, by their headers."""
        if model.folder is None:
            return HeadState(False, not_here(model.card.id))
        try:
            if model.card.drafter is not None:
                _ = self.drafters.facts(model.card)
                return HeadState(True)
            head = find_head(self.checkpoint(model.folder))
        except DrafterUnusable as fault:
            return HeadState(False, str(fault))
        except ExoNodeError as fault:
            return HeadState(False, fault.message)
        return HeadState(True) if isinstance(head, HeadFound) else HeadState(False, head.reason)

    def file_facts(self, model: KnownModel) -> FileFacts:
        """The facts of the model's files that lists show; its card adds capabilities."""
        if model.folder is None:
            return FileFacts(model.card.capabilities)
        facts = self._files.get(model.folder)
        if model.card.embeds:  # its chat template is its base model's
            return replace(facts, capabilities=model.card.capabilities)
        union = {*facts.capabilities, *model.card.capabilities}
        ordered = tuple(name for name in get_args(Capability) if name in union)
        return replace(facts, capabilities=ordered)

    def open(self, place: Place) -> KnownModel:
        """The model as its files are now. Raises InvalidCheckpoint and InvalidCard."""
        return self._with_sizes(self._open(place))

    def _with_sizes(self, model: KnownModel) -> KnownModel:
        return replace(model, card=self.drafters.with_sizes(model.card))

    def _open(self, place: Place) -> KnownModel:
        if place.fault:
            raise InvalidCheckpoint(place.fault, param="model")
        if place.missing:
            raise _incomplete(place)
        folder = place.folder
        if place.hub and (card := self._packaged.get(place.id)) is not None:
            return KnownModel(card, folder)
        config = read_config(folder)
        if is_drafter(config):
            raise InvalidCheckpoint(
                f"{place.id} is a block drafter, which answers nothing by itself; name it in the "
                "card of the model that it drafts for, under drafter.model",
                param="model",
            )
        card_file = folder / CARD_FILE
        overrides = dict(read_card_file(card_file)) if card_file.exists() else {}
        overrides |= self._user.facts_of(place.id)
        overrides = {**embedder_facts(folder, config, overrides), **overrides}
        size = sum(
            path.stat().st_size
            for path in folder.rglob("*.safetensors")
            if is_weight_file(path.relative_to(folder).as_posix())
        )
        checkpoint = self.checkpoint(folder)
        overrides = {"mapped_bytes": mapped_bytes(checkpoint), **overrides}
        card = derive_card(place.id, config, size, overrides)
        if card.native_mtp is None and isinstance(head := find_head(checkpoint), HeadFound):
            native_mtp = _HEADS.get(head.layout, DEFAULT_HEAD)
            card = derive_card(place.id, config, size, {**overrides, "native_mtp": native_mtp})
        return KnownModel(card, folder)

    def _open_changed(self, place: Place) -> KnownModel | ExoNodeError:
        """A place's model or what is wrong with it, read again where a file of it has changed."""
        current = (stamp(place.folder), self._user.facts_of(place.id))
        cached = self._opened.get(place)
        if cached is None or cached[0] != current:
            try:
                cached = (current, self._open(place))
            except ExoNodeError as fault:
                cached = (current, fault)
            self._opened[place] = cached
        return cached[1]

    def _listed(self, card: ModelCard) -> KnownModel:
        try:
            return self._of_card(card)
        except InvalidCheckpoint:  # `scan` names what is wrong with its files
            return KnownModel(card, None)

    def _of_card(self, card: ModelCard) -> KnownModel:
        if card.id == DEMO:
            return KnownModel(card, Path(str(files("exo_node.shard"))) / "models" / "demo")
        if card.repository is None:
            return KnownModel(card, None)
        folder = HubCache().locate(card.repository, card.revision)
        return self._with_sizes(KnownModel(card, folder))

    def _unknown(self, model: ModelId, *, here: bool = False) -> ModelNotFound:
        """`here`: the error names models on this disk alone, and no download."""
        names = {*self.scan(), *self.partial} - ({DEMO} if here else set())
        near = nearest_ids(model, names if here else {*self._packaged, *names})
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        name = str(model)[:200]
        # A folder that cannot be read may have that model.
        hint += f" {self._access_faults[0]}." if self._access_faults else ""
        get = "" if here else ", and `exo-node models recommend` others that fit, to download"
        if not here and name.count("/") == 1 and name.isprintable() and " " not in name:
            get = f", and `exo-node models pull {name}` downloads that one if the hub has it"
        return ModelNotFound(
            f"no model {name!r} is on this machine.{hint} `exo-node models` lists those that "
            f"are{get}",
            param="model",
        )


def _incomplete(place: Place) -> InvalidCheckpoint:
    """The error for a download that has not ended."""
    more = f" and {len(place.missing) - 3} more" if len(place.missing) > 3 else ""
    return InvalidCheckpoint(
        f"{place.id} is not completely downloaded (missing: {', '.join(place.missing[:3])}{more}); "
        f"`exo-node models pull {place.id}` goes on with it",
        param="model",
    )
