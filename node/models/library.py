"""The models this node knows: shipped, in `--models-dir`, or in the Hugging Face cache."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ...placement.card import ModelCard, derive_card
from ...placement.drafting import HeadState
from ...placement.errors import ExoNodeError, InvalidCheckpoint, ModelNotFound
from ...placement.ids import ModelId
from ...placement.library import CARD_FILE, nearest_ids, packaged_cards, read_card_file
from ...shard.checkpoint.checkpoint import Checkpoint, is_weight_file, read_checkpoint, read_config
from ...shard.checkpoint.download import Progress, download, locate
from ...shard.checkpoint.head_tensors import HeadFound, find_head

log = logging.getLogger(__name__)

DEMO = ModelId("demo")
OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a request may name. `folder` None: not on this machine yet."""

    card: ModelCard
    folder: Path | None


class ModelLibrary:
    """Reads cards and headers; blocking methods are called through `asyncio.to_thread`."""

    def __init__(self, models_dir: Path | None, *, offline: bool) -> None:
        self._models_dir = models_dir
        self._offline = offline
        self._packaged = packaged_cards()
        self._headers: dict[Path, tuple[int, Checkpoint]] = {}
        self._broken: dict[ModelId, ExoNodeError] = {}

    def scan(self) -> Mapping[ModelId, KnownModel]:
        """Every known model; a folder that cannot be used is named in `broken`. Blocks."""
        known = {model: self._shipped(card) for model, card in self._packaged.items()}
        self._broken = {}
        for folder in self._folders():
            model = ModelId(folder.name)
            try:
                known[model] = _from_folder(folder)
            except ExoNodeError as fault:
                _ = known.pop(model, None)
                self._broken[model] = fault
        return known

    @property
    def broken(self) -> Mapping[ModelId, ExoNodeError]:
        """What the last scan could not use, and why."""
        return self._broken

    def get(self, model: ModelId) -> KnownModel:
        """One model, its card read afresh. Blocks; never asks the hub.

        Raises ModelNotFound with the nearest ids, and what is wrong with a model's folder.
        """
        for folder in self._folders():
            if folder.name == model:
                return _from_folder(folder)
        if (card := self._packaged.get(model)) is not None:
            return self._shipped(card)
        if model.count("/") == 1 and (folder := _cached(model)) is not None:
            return _from_folder(folder, model)
        known = [*self._packaged, *(ModelId(folder.name) for folder in self._folders())]
        near = nearest_ids(model, known)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ModelNotFound(
            f"no model {str(model)[:200]!r} is known here.{hint} `exo-node models` lists those "
            "that ship with exo-node or are in --models-dir",
            param="model",
        )

    def checkpoint(self, folder: Path) -> Checkpoint:
        """The validated headers of a folder, kept until a file of it changes. Blocks."""
        stamp = max((file.stat().st_mtime_ns for file in folder.iterdir()), default=0)
        known = self._headers.get(folder)
        if known is None or known[0] != stamp:
            known = self._headers[folder] = (stamp, read_checkpoint(folder))
        return known[1]

    def head(self, known: KnownModel) -> HeadState:
        """Whether the model's own draft head is in its files, by their headers. Blocks."""
        if known.folder is None:
            return HeadState(False, "the model is not downloaded yet; loading it downloads it")
        found = find_head(self.checkpoint(known.folder))
        if isinstance(found, HeadFound):
            return HeadState(True)
        return HeadState(False, found.reason)

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

    def _folders(self) -> list[Path]:
        if self._models_dir is None:
            return []
        return sorted(p for p in self._models_dir.iterdir() if (p / "config.json").is_file())

    def _shipped(self, card: ModelCard) -> KnownModel:
        if card.id == DEMO:
            return KnownModel(card, Path(str(files("exo_node.shard"))) / "models" / "demo")
        folder = None if card.repository is None else locate(card.repository, card.revision)
        return KnownModel(card, folder)


def _from_folder(folder: Path, model: ModelId | None = None) -> KnownModel:
    card_file = folder / CARD_FILE
    overrides = read_card_file(card_file) if card_file.exists() else None
    size = sum(
        path.stat().st_size
        for path in folder.rglob("*.safetensors")
        if is_weight_file(path.relative_to(folder).as_posix())
    )
    name = ModelId(folder.name) if model is None else model
    return KnownModel(derive_card(name, read_config(folder), size, overrides), folder)


def _cached(model: ModelId) -> Path | None:
    try:
        return locate(model)
    except ExoNodeError:  # a name that no repository can have
        return None
