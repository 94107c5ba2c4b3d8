"""Gets a model: from this disk, else from peers that have it, else from the hub."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from ...placement.card import ModelCard
from ...placement.errors import (
    DownloadFailed,
    ExoNodeError,
    InvalidCheckpoint,
    ModelNotFound,
    PeerLost,
)
from ...placement.ids import ModelId
from ...proto import peer_pb2 as pb
from ..machine.events import EventLog
from ..rpc.model_files import ModelFilesClient
from .copy_folder import HERE, offered_card
from .library import ModelLibrary
from .peer_copy import PeerCopy
from .sources import ModelSource
from .stop_signal import StopSignal, stoppable
from .transfers import Progress

OnProgress = Callable[[str, Progress], None]
"""Called with a step, in words for a person, and how far it is."""

Sources = Callable[[ModelId], Sequence[ModelSource]]
"""The nodes that have a model, the one with the quickest link first."""


@dataclass(frozen=True, slots=True)
class StageFolder:
    """A model on this disk."""

    folder: Path
    fingerprint: str


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

    async def fetch(self, spec: pb.StageSpec, report: OnProgress) -> StageFolder:
        """The folder of a stage's model, copied or downloaded if need be.

        Copies are whole, so that any node may take a lost one's layers. Raises ModelNotFound,
        DownloadFailed and InvalidCheckpoint.
        """
        model = ModelId(spec.model)
        async with self.lock(model):
            if (local := await asyncio.to_thread(self._local, model)) is not None:
                return local
            refusals: list[str] = []
            for source in self._sources(model):
                try:
                    return await self._copy(source, spec, report)
                except (ExoNodeError, OSError) as fault:
                    refusals.append(self._refusal(model, source, fault))
            return await self._download(model, report, refusals)

    def drafter_folder(self, drafter: ModelId) -> Path:
        """The folder of a block drafter on this disk; none is fetched. Blocks, and raises
        DrafterUnusable."""
        return self._library.drafters.folder(drafter)

    def lock(self, model: ModelId) -> asyncio.Lock:
        """Held while the model's files are brought here or deleted."""
        return self._locks.setdefault(model, asyncio.Lock())

    async def describe(self, model: ModelId) -> tuple[ModelCard, str]:
        """The card and the fingerprint of a model that only other nodes have.

        Raises PeerLost where none of them gives them.
        """
        refusals: list[str] = []
        for source in self._sources(model):
            try:
                offer = await self._client.offer(source.address, source.node, model)
                return offered_card(offer, model, source.name), offer.fingerprint
            except ExoNodeError as fault:
                refusals.append(self._refusal(model, source, fault))
        raise PeerLost(f"no node describes {model}: {'; '.join(refusals)}")

    def _local(self, model: ModelId) -> StageFolder | None:
        try:
            local = self._library.get(model)
        except ModelNotFound:
            return None
        if local.folder is None:
            return None
        return StageFolder(local.folder, self._library.checkpoint(local.folder).fingerprint)

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
        self, source: ModelSource, spec: pb.StageSpec, report: OnProgress
    ) -> StageFolder:
        copy = await PeerCopy.begin(self._client, source, self._root, spec)
        copied_bytes = await copy.fetch(
            lambda progress: report(f"copying from {source.name}", progress)
        )
        await asyncio.to_thread(self._complete, copy)
        text = f"{copy.model} was copied from {source.name}"
        facts: dict[str, str | int] = {"node": source.node, "bytes": copied_bytes}
        _ = self._events.add("copied", text, model=copy.model, **facts)
        return StageFolder(copy.folder.path, copy.offer.fingerprint)

    def _complete(self, copy: PeerCopy) -> None:
        """Marks a copy whole, in one step that no cancellation divides."""
        if self._library.checkpoint(copy.folder.path).fingerprint != copy.offer.fingerprint:
            raise InvalidCheckpoint(f"{copy.source.name} gave other files than it offered")
        copy.folder.complete()

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
