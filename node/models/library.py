"""The models on this node's disk: shipped, in `--models-dir`, in the Hugging Face cache."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import get_args

from ...placement.card import Capability, ModelCard, derive_card
from ...placement.drafting import HeadState
from ...placement.errors import ExoNodeError, InvalidCheckpoint, ModelNotFound
from ...placement.ids import ModelId
from ...placement.library import CARD_FILE, nearest_ids, not_here, packaged_cards, read_card_file
from ...shard.checkpoint.checkpoint import (
    Checkpoint,
    is_weight_file,
    read_checkpoint,
    read_config,
)
from ...shard.checkpoint.download import Progress, download, offline_by
from ...shard.checkpoint.head_tensors import HeadFound, find_head
from ...shard.checkpoint.hub_cache import locate
from .file_facts import FileFacts, read_file_facts
from .places import Part, Place, Source, Stamp, from_cache, in_cache, in_folders, parts, stamp
from .user_cards import UserCards

log = logging.getLogger(__name__)

DEMO = ModelId("demo")
FOUND_HEAD = {"num_layers": 1, "default_k": 1, "max_k": 3}
"""`native_mtp` of a model whose files hold a whole head and whose card does not say how to use it:
measured costs lower K, to 0 where drafts do not pay."""
OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a request may name. `folder` None: not on this machine yet."""

    card: ModelCard
    folder: Path | None
    source: Source = "cache"


class ModelLibrary:
    """Reads cards and headers; blocking methods are called through `asyncio.to_thread`."""

    def __init__(
        self, folders: Sequence[Path] = (), *, offline: bool, cards: Path | None = None
    ) -> None:
        """`cards`: a person's folder of cards, which win over those that ship."""
        self._user = UserCards(cards)
        self._roots = tuple(folders)
        self._offline = offline
        self._shipping = packaged_cards()
        self._headers: dict[Path, tuple[Stamp, Checkpoint]] = {}
        self._files: dict[Path, tuple[Stamp, FileFacts]] = {}
        self._cards: dict[Place, tuple[object, KnownModel | ExoNodeError]] = {}
        self._broken: dict[ModelId, ExoNodeError] = {}
        self._closed: list[str] = []

    @property
    def offline_by(self) -> str:
        """The setting that forbids to ask the hub; "" where none does."""
        return offline_by(self._offline)

    @property
    def _packaged(self) -> Mapping[ModelId, ModelCard]:
        """What ships, as a person's cards have changed and added to it."""
        return self._user.over(self._shipping)

    @property
    def _variants(self) -> Mapping[ModelId, ModelCard]:
        return {
            ModelId(variant.repository): card.as_variant(variant)
            for card in self._packaged.values()
            for variant in card.variants
        }

    def scan(self) -> Mapping[ModelId, KnownModel]:
        """Every model on this disk, by id; one that cannot be used is named in `broken`. Blocks.

        What has not changed since the last scan is not read again.
        """
        known = {DEMO: self._shipped(self._packaged[DEMO])}
        broken: dict[ModelId, ExoNodeError] = {}
        places = [*in_folders(self._roots), *in_cache()]
        for place in places:
            if place.id in known or place.id in broken:
                continue
            match self._read(place):
                case KnownModel() as model:
                    known[place.id] = model
                case fault:
                    broken[place.id] = fault
        self._cards = {place: kept for place, kept in self._cards.items() if place in places}
        self._closed = [place.fault for place in places if place.fault]
        self._broken = broken | {
            ModelId(name): fault for name, fault in self._user.faults().items()
        }
        return known

    def catalogue(self) -> Mapping[ModelId, KnownModel]:
        """The models that there are cards of, on this disk or not. Blocks."""
        cards = {**self._packaged, **self._variants}
        return {model: self._listed(card) for model, card in cards.items()}

    def original(self, model: ModelId) -> ModelId | None:
        """Of a published quantisation, the model that its card is of."""
        cards = self._packaged.values()
        return next((c.id for c in cards if any(v.repository == model for v in c.variants)), None)

    def parts(self) -> Mapping[ModelId, Part]:
        """What is on this disk of models that only other nodes have whole. Blocks."""
        return {part.id: part for part in parts(self._roots)}

    @property
    def broken(self) -> Mapping[ModelId, ExoNodeError]:
        """What the last scan could not use, and why."""
        return self._broken

    def get(self, model: ModelId) -> KnownModel:
        """One model, its card read afresh. Blocks; never asks the hub.

        Raises ModelNotFound with the nearest ids, and what is wrong with a model's folder.
        """
        for place in in_folders(self._roots):
            if place.id == model:
                return self._opened(place)
        if (card := self._packaged.get(model)) is not None:
            return self._shipped(card)
        if (folder := from_cache(model)) is not None:
            return self._opened(Place(model, folder, "cache"))
        if (card := self._variants.get(model)) is not None:
            return self._shipped(card)
        raise self._unknown(model)

    def checkpoint(self, folder: Path) -> Checkpoint:
        """The validated headers of a folder, kept until a file of it changes. Blocks."""
        now = stamp(folder)
        known = self._headers.get(folder)
        if known is None or known[0] != now:
            known = self._headers[folder] = (now, read_checkpoint(folder))
        return known[1]

    def head(self, known: KnownModel) -> HeadState:
        """Whether the model's own draft head is in its files, by their headers. Blocks."""
        if known.folder is None:
            return HeadState(False, not_here(known.card.id))
        found = find_head(self.checkpoint(known.folder))
        if isinstance(found, HeadFound):
            return HeadState(True)
        return HeadState(False, found.reason)

    def file_facts(self, known: KnownModel) -> FileFacts:
        """What lists show of the model's files; its card adds capabilities. Blocks."""
        if known.folder is None:
            return FileFacts(known.card.capabilities)
        now = stamp(known.folder)
        kept = self._files.get(known.folder)
        if kept is None or kept[0] != now:
            kept = self._files[known.folder] = (now, read_file_facts(known.folder, now))
        both = {*kept[1].capabilities, *known.card.capabilities}
        ordered = tuple(name for name in get_args(Capability) if name in both)
        return replace(kept[1], capabilities=ordered)

    async def fetch(self, model: ModelId, on_progress: OnProgress) -> tuple[KnownModel, Path]:
        """The model with its files on this machine, downloading them where it must.

        Raises ModelNotFound and DownloadFailed.
        """
        known = await asyncio.to_thread(self.get, model)
        if known.folder is not None:
            return known, known.folder
        card = known.card
        if card.repository is None:
            raise InvalidCheckpoint(f"the card of {model} names neither files nor a repository")
        loop = asyncio.get_running_loop()

        def report(progress: Progress) -> None:
            _ = loop.call_soon_threadsafe(on_progress, progress)

        folder = await asyncio.to_thread(
            download, card.repository, card.revision, report, offline=self._offline
        )
        return known, folder

    def read(self, place: Place) -> KnownModel:
        """The model as its files are now. Blocks; raises InvalidCheckpoint and InvalidCard."""
        return self._opened(place)

    def _read(self, place: Place) -> KnownModel | ExoNodeError:
        """A place's model or what is wrong with it, read again where a file of it has changed."""
        now = (stamp(place.folder), self._user.facts_of(place.id))
        kept = self._cards.get(place)
        if kept is None or kept[0] != now:
            try:
                kept = (now, self._opened(place))
            except ExoNodeError as fault:
                kept = (now, fault)
            self._cards[place] = kept
        return kept[1]

    def _opened(self, place: Place) -> KnownModel:
        """Raises ExoNodeError."""
        if place.fault:
            raise InvalidCheckpoint(place.fault, param="model")
        if place.missing:
            raise incomplete(place)
        if place.source == "cache" and (card := self._packaged.get(place.id)) is not None:
            return KnownModel(card, place.folder, "cache")
        folder = place.folder
        config = read_config(folder)
        card_file = folder / CARD_FILE
        given = dict(read_card_file(card_file)) if card_file.exists() else {}
        given |= self._user.facts_of(place.id)
        size = sum(
            path.stat().st_size
            for path in folder.rglob("*.safetensors")
            if is_weight_file(path.relative_to(folder).as_posix())
        )
        card = derive_card(place.id, config, size, given)
        checkpoint = self.checkpoint(folder)
        if card.native_mtp is None and isinstance(find_head(checkpoint), HeadFound):
            card = derive_card(place.id, config, size, {**given, "native_mtp": FOUND_HEAD})
        return KnownModel(card, folder, place.source)

    def _listed(self, card: ModelCard) -> KnownModel:
        try:
            return self._shipped(card)
        except InvalidCheckpoint:  # `scan` names what is wrong with what is here of it
            return KnownModel(card, None)

    def _shipped(self, card: ModelCard) -> KnownModel:
        if card.id == DEMO:
            folder = Path(str(files("exo_node.shard"))) / "models" / "demo"
            return KnownModel(card, folder, "package")
        folder = None if card.repository is None else locate(card.repository, card.revision)
        return KnownModel(card, folder)

    def _unknown(self, model: ModelId) -> ModelNotFound:
        near = nearest_ids(model, {*self._packaged, *self.scan()})
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        name = str(model)[:200]
        hint += f" {self._closed[0]}." if self._closed else ""  # it may hold that model
        get = ""
        if name.count("/") == 1 and name.isprintable() and " " not in name:
            get = f", and `exo-node models pull {name}` downloads that one if the hub has it"
        return ModelNotFound(
            f"no model {name!r} is on this machine.{hint} `exo-node models` lists those that "
            f"are{get}",
            param="model",
        )


def incomplete(place: Place) -> InvalidCheckpoint:
    """A download that has not ended."""
    more = f" and {len(place.missing) - 3} more" if len(place.missing) > 3 else ""
    return InvalidCheckpoint(
        f"{place.id} is not completely downloaded (missing: {', '.join(place.missing[:3])}{more}); "
        f"`exo-node models pull {place.id}` goes on with it",
        param="model",
    )
