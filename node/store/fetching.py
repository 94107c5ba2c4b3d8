"""Gets a stage's model: from this disk, else from peers that have it, else from the hub."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from ...placement.card import ModelCard
from ...placement.cluster import layer_range
from ...placement.errors import (
    DownloadFailed,
    ExoNodeError,
    InvalidCheckpoint,
    ModelNotFound,
    PeerLost,
)
from ...placement.ids import ModelId
from ...proto import peer_pb2 as pb
from ...shard.checkpoint.checkpoint import read_checkpoint
from ...shard.checkpoint.headers import Tensor
from ...shard.checkpoint.stage_files import stand_ins
from ..machine.events import EventLog
from ..rpc.model_files import ModelFilesClient
from .copy_folder import HERE, CopyFolder
from .library import ModelLibrary
from .model_folder import Place, read_origin
from .peer_copy import PeerCopy
from .places import copy_folder
from .sources import ModelSource
from .stop_signal import StopSignal, stoppable
from .transfers import Progress

OnProgress = Callable[[str, Progress], None]
"""Called with a step, in words for a person, and how far it is."""

Sources = Callable[[ModelId], Sequence[ModelSource]]
"""The nodes that have a model, the one with the quickest link first."""


@dataclass(frozen=True, slots=True)
class StageFolder:
    """A model on this disk; `partial`: only the files that one stage reads."""

    folder: Path
    fingerprint: str
    partial: bool = False


@dataclass(eq=False, repr=False)
class ModelFetcher:
    """One for a node; loads of one model wait for each other."""

    _library: ModelLibrary
    _client: ModelFilesClient
    _sources: Sources
    _events: EventLog
    _root: Path
    """exo-node's own folder of models."""
    _: KW_ONLY
    may_download: bool

    def __post_init__(self) -> None:
        self._locks: dict[ModelId, asyncio.Lock] = {}

    async def fetch(
        self, spec: pb.StageSpec, report: OnProgress, *, whole: bool = False
    ) -> StageFolder:
        """The folder with the files that the stage reads, copied or downloaded if need be. `whole`:
        with all files of the model. Raises ModelNotFound, DownloadFailed and InvalidCheckpoint."""
        model = ModelId(spec.model)
        async with self.lock(model):
            if (local := await asyncio.to_thread(self._whole_model, model)) is not None:
                return local
            if not whole:
                local = await asyncio.to_thread(self._partial_copy, spec)
                if local is not None:
                    if not local.partial:
                        await self._complete(local.folder, f"the copy of {model} is whole", model)
                    return local
            refusals: list[str] = []
            for source in self._sources(model):
                try:
                    return await self._copy(source, spec, report, whole=whole)
                except (ExoNodeError, OSError) as fault:
                    refusals.append(self._refusal(model, source, fault))
            return await self._download(model, report, refusals)

    def lock(self, model: ModelId) -> asyncio.Lock:
        """Held while the model's files are brought here or deleted."""
        return self._locks.setdefault(model, asyncio.Lock())

    async def describe(self, model: ModelId) -> tuple[ModelCard, str]:
        """The card and the fingerprint of a model that only other nodes have, by its headers.

        Raises PeerLost where none of them gives them.
        """
        refusals: list[str] = []
        async with self.lock(model):
            for source in self._sources(model):
                try:
                    spec = pb.StageSpec(model=model)
                    copy = await PeerCopy.begin(self._client, source, self._root, spec)
                    await copy.fetch_small_files()
                    await copy.fetch_headers()
                    return await asyncio.to_thread(self._card, copy), copy.offer.fingerprint
                except (ExoNodeError, OSError) as fault:
                    refusals.append(self._refusal(model, source, fault))
        raise PeerLost(f"no node describes {model}: {'; '.join(refusals)}")

    def layout(self, model: ModelId) -> Sequence[Tensor] | None:
        """A model's tensors, by its files or headers on this disk, or None if none are. Blocks."""
        try:
            local = self._library.get(model)
            if local.folder is not None:
                return [*self._library.checkpoint(local.folder).tensors.values()]
        except ModelNotFound:
            pass  # it may be here in part
        path = copy_folder(self._root, model)
        if path is None or read_origin(path) is None:
            return None
        folder = CopyFolder(path)
        return folder.tensors(folder.weights())

    def _card(self, copy: PeerCopy) -> ModelCard:
        with stand_ins(copy.folder.path) as (view, _):
            return self._library.open(Place(copy.model, view, hub=copy.offer.from_hub)).card

    def _whole_model(self, model: ModelId) -> StageFolder | None:
        try:
            local = self._library.get(model)
        except ModelNotFound:
            return None
        if local.folder is None:
            return None
        return StageFolder(local.folder, self._library.checkpoint(local.folder).fingerprint)

    def _partial_copy(self, spec: pb.StageSpec) -> StageFolder | None:
        """An earlier copy, where it has all that the stage reads.

        One whose load was cancelled after its last file has all files.
        """
        path = copy_folder(self._root, spec.model)
        origin = None if path is None else read_origin(path)
        if path is None or origin is None or origin.fingerprint != spec.checkpoint_sha256:
            return None
        folder = CopyFolder(path)
        try:
            weights = folder.weights()
            needed = folder.files_of_stage(spec, weights)
            with stand_ins(path) as (view, _):
                fingerprint = read_checkpoint(view).fingerprint
        except (OSError, InvalidCheckpoint):  # a copy that ended before it had all headers
            return None
        present = {file.path for file in weights if folder.has(file)}
        if fingerprint != origin.fingerprint or not needed <= present:
            return None
        return StageFolder(path, fingerprint, partial=len(present) < len(weights))

    async def _complete(self, folder: Path, text: str, model: str, **facts: str | int) -> None:
        """Marks a copy whole. The event comes first: a cancelled load then leaves no mark alone."""
        _ = self._events.add("copied", text, model=model, **facts)
        await asyncio.to_thread(CopyFolder(folder).complete)

    def _refusal(self, model: ModelId, source: ModelSource, fault: ExoNodeError | OSError) -> str:
        """Records that a peer could not be copied from. Raises DownloadFailed for this disk."""
        if isinstance(fault, OSError):
            raise DownloadFailed(
                f"{model} could not be written to {self._root} ({fault.strerror}). Free some space "
                "or mend the permissions there, and load it again: the copy goes on where it was.",
                param="model",
            ) from fault
        if isinstance(fault, DownloadFailed) and fault.param == HERE:
            raise fault
        text = f"{model} could not be copied from {source.name}: {fault.message}"
        _ = self._events.add("peer_left", text, model=model, node=source.node)
        return f"{source.name}: {fault.message}"

    async def _copy(
        self, source: ModelSource, spec: pb.StageSpec, report: OnProgress, *, whole: bool
    ) -> StageFolder:
        copy = await PeerCopy.begin(self._client, source, self._root, spec)
        await copy.fetch_small_files()
        folder, weights = copy.folder, copy.weights
        needed = frozenset(file.path for file in weights)
        if not whole and spec.num_stages > 1:
            await copy.fetch_headers()
            needed = await asyncio.to_thread(folder.files_of_stage, spec, weights)
        copied_bytes = await copy.fetch_weights(
            needed, lambda progress: report(f"copying from {source.name}", progress)
        )
        partial = bool(await asyncio.to_thread(folder.missing, weights))
        layers = f"{layer_range(spec.first_layer, spec.end_layer)} of " if partial else ""
        text = f"{layers}{copy.model} was copied from {source.name}"
        facts: dict[str, str | int] = {"node": source.node, "bytes": copied_bytes}
        if partial:
            _ = self._events.add("copied", text, model=copy.model, **facts)
        else:
            checkpoint = await asyncio.to_thread(self._library.checkpoint, folder.path)
            if checkpoint.fingerprint != copy.offer.fingerprint:
                raise InvalidCheckpoint(f"{source.name} gave other files than it offered")
            await self._complete(folder.path, text, copy.model, **facts)
        return StageFolder(folder.path, copy.offer.fingerprint, partial)

    async def _download(
        self, model: ModelId, report: OnProgress, refusals: Sequence[str]
    ) -> StageFolder:
        tried = f" It could not be copied from the nodes that have it: {'; '.join(refusals)}."
        if not self.may_download:
            absence = await asyncio.to_thread(self._library.absence, model)
            raise ModelNotFound(f"{absence.message}.{tried if refusals else ''}", param="model")
        loop = asyncio.get_running_loop()

        def on_progress(progress: Progress) -> None:
            _ = loop.call_soon_threadsafe(report, "downloading", progress)

        try:
            folder = await stoppable(
                lambda stop: self._download_blocking(model, on_progress, stop), "download"
            )
        except DownloadFailed as fault:
            if not refusals:
                raise
            raise DownloadFailed(f"{fault.message}{tried}", param=fault.param) from fault
        checkpoint = await asyncio.to_thread(self._library.checkpoint, folder)
        return StageFolder(folder, checkpoint.fingerprint)

    def _download_blocking(
        self, model: ModelId, on_progress: Callable[[Progress], None], stop: StopSignal
    ) -> Path:
        card = self._library.get(model).card
        if card.repository is None:
            raise InvalidCheckpoint(f"the card of {model} names neither files nor a repository")
        from .hub_download import download

        offline = self._library.offline
        return download(card.repository, card.revision, on_progress, offline=offline, stop=stop)
