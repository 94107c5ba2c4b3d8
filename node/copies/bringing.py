"""Brings a stage's model to this disk: from the nodes that have it, before the hub is asked."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
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
from ...placement.library import not_here
from ...proto import peer_pb2 as pb
from ...shard.checkpoint.checkpoint import is_weight_file, read_checkpoint
from ...shard.checkpoint.headers import Tensor
from ...shard.checkpoint.progress import Progress
from ...shard.checkpoint.stage_files import files_of_stage, stand_ins
from ..machine.events import EventLog
from ..models.library import ModelLibrary
from ..models.places import Place, copied
from ..rpc.model_files import ModelFilesClient
from .folder import HERE, CopyFolder, Wanted, checked_offer, folder_of, header_length
from .sources import Source

log = logging.getLogger(__name__)

OnProgress = Callable[[str, Progress], None]
"""What is done, for a person, and how far it is."""

_HEADROOM = 64 << 20
_REPORT_BYTES = 8 << 20


Sources = Callable[[ModelId], Sequence[Source]]
"""Which nodes have a model, the one with the quickest link first."""


@dataclass(frozen=True, slots=True)
class Brought:
    """A model on this disk; `partial`: no more of it than one stage reads."""

    folder: Path
    fingerprint: str
    partial: bool = False


@dataclass(slots=True)
class _Copy:
    """One model on its way from one peer."""

    model: ModelId
    source: Source
    folder: CopyFolder
    offer: pb.ModelOffer
    files: Mapping[str, Wanted]
    report: OnProgress
    total: int = 0
    done: int = 0
    shown: int = field(default=0)

    def advance(self, count: int) -> None:
        self.done += count
        if self.done - self.shown >= _REPORT_BYTES or self.done >= self.total:
            self.shown = self.done
            step = f"copying from {self.source.name}"
            self.report(step, Progress(min(self.done, self.total), self.total, ""))


class Bringing:
    """One for a node; loads of one model wait for each other."""

    def __init__(
        self,
        library: ModelLibrary,
        client: ModelFilesClient,
        sources: Sources,
        events: EventLog,
        root: Path,
        *,
        may_download: bool,
    ) -> None:
        """`root`: exo-node's own folder of models."""
        self._library = library
        self._client = client
        self._sources = sources
        self._events = events
        self._root = root
        self._may_download = may_download
        self._locks: dict[ModelId, asyncio.Lock] = {}

    async def bring(
        self, spec: pb.StageSpec, report: OnProgress, *, whole: bool = False
    ) -> Brought:
        """What the stage reads, copied or downloaded where it is not here.

        `whole`: more than that. Raises ModelNotFound, DownloadFailed and InvalidCheckpoint.
        """
        model = ModelId(spec.model)
        async with self._locks.setdefault(model, asyncio.Lock()):
            if (here := await self._here(model)) is not None:
                return here
            if not whole and (kept := await asyncio.to_thread(self._kept, spec)) is not None:
                return kept
            left: list[str] = []
            for source in self._sources(model):
                try:
                    return await self._copied(source, spec, report, whole=whole)
                except (ExoNodeError, OSError) as fault:
                    left.append(self._leave(model, source, fault))
            return await self._download(model, report, left)

    async def describe(self, model: ModelId) -> tuple[ModelCard, str]:
        """The card and the fingerprint of a model that only other nodes have, by its headers.

        Raises PeerLost where none of them gives them.
        """
        left: list[str] = []
        async with self._locks.setdefault(model, asyncio.Lock()):
            for source in self._sources(model):
                try:
                    copy = await self._begun(source, pb.StageSpec(model=model), _silent)
                    await self._small_files(copy)
                    await self._headers(copy)
                    card = await asyncio.to_thread(self._card, copy)
                except (ExoNodeError, OSError) as fault:
                    left.append(self._leave(model, source, fault))
                    continue
                return card, copy.offer.fingerprint
        raise PeerLost(f"no node describes {model}: {'; '.join(left)}")

    def layout(self, model: ModelId) -> Sequence[Tensor] | None:
        """A model's tensors, by what of it is on this disk; None: nothing is. Blocks."""
        try:
            known = self._library.get(model)
            if known.folder is not None:
                return [*self._library.checkpoint(known.folder).tensors.values()]
        except ModelNotFound:
            pass  # only another node has it, or nobody
        path = folder_of(self._root, model)
        if path is None or copied(path) is None:
            return None
        folder = CopyFolder(path)
        return folder.tensors(folder.weights())

    def _card(self, copy: _Copy) -> ModelCard:
        source = "cache" if copy.offer.from_hub else "folder"
        with stand_ins(copy.folder.folder) as (view, _):
            return self._library.read(Place(copy.model, view, source)).card

    async def _here(self, model: ModelId) -> Brought | None:
        try:
            known = await asyncio.to_thread(self._library.get, model)
        except ModelNotFound:
            return None
        if known.folder is None:
            return None
        checkpoint = await asyncio.to_thread(self._library.checkpoint, known.folder)
        return Brought(known.folder, checkpoint.fingerprint)

    def _kept(self, spec: pb.StageSpec) -> Brought | None:
        """What an earlier copy left, where it is all that the stage reads."""
        path = folder_of(self._root, spec.model)
        origin = None if path is None else copied(path)
        if path is None or origin is None or origin.fingerprint != spec.checkpoint_sha256:
            return None
        folder = CopyFolder(path)
        try:
            weights = folder.weights()
            needed = _files_read(spec, folder, weights)
            with stand_ins(path) as (view, _):
                there = read_checkpoint(view).fingerprint
        except (OSError, InvalidCheckpoint):  # a copy that had hardly begun
            return None
        if there == origin.fingerprint and needed <= {
            file.path for file in weights if folder.has(file)
        }:
            return Brought(path, origin.fingerprint, partial=True)
        return None

    def _leave(self, model: ModelId, source: Source, fault: ExoNodeError | OSError) -> str:
        """Names the peer that could not be copied from. Raises DownloadFailed for this disk."""
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

    async def _download(self, model: ModelId, report: OnProgress, left: Sequence[str]) -> Brought:
        tried = f" It could not be copied from the nodes that have it: {'; '.join(left)}."
        if not self._may_download:
            why = await asyncio.to_thread(self._why_not_here, model)
            raise ModelNotFound(f"{why}.{tried if left else ''}", param="model")
        try:
            _, folder = await self._library.fetch(model, lambda news: report("downloading", news))
        except DownloadFailed as fault:
            if not left:
                raise
            raise DownloadFailed(f"{fault.message}{tried}", param=fault.param) from fault
        checkpoint = await asyncio.to_thread(self._library.checkpoint, folder)
        return Brought(folder, checkpoint.fingerprint)

    def _why_not_here(self, model: ModelId) -> str:
        try:
            return not_here(self._library.get(model).card.id)
        except ModelNotFound as fault:
            return fault.message

    async def _copied(
        self, source: Source, spec: pb.StageSpec, report: OnProgress, *, whole: bool
    ) -> Brought:
        copy = await self._begun(source, spec, report)
        await self._small_files(copy)
        weights = [file for file in copy.files.values() if is_weight_file(file.path)]
        needed = {file.path for file in weights}
        if not whole and spec.num_stages > 1:
            needed = await self._read_by(copy, spec, weights)
        await self._fetch(copy, [file for file in weights if file.path in needed])
        folder = copy.folder.folder
        partial = not all([await asyncio.to_thread(copy.folder.has, file) for file in weights])
        if not partial:
            await asyncio.to_thread(copy.folder.complete)
            checkpoint = await asyncio.to_thread(self._library.checkpoint, folder)
            if checkpoint.fingerprint != copy.offer.fingerprint:
                raise InvalidCheckpoint(f"{source.name} gave other files than it offered")
        what = f"{layer_range(spec.first_layer, spec.end_layer)} of {copy.model}"
        text = f"{what if partial else copy.model} was copied from {source.name}"
        _ = self._events.add("copied", text, model=copy.model, node=source.node, bytes=copy.total)
        return Brought(folder, copy.offer.fingerprint, partial)

    async def _begun(self, source: Source, spec: pb.StageSpec, report: OnProgress) -> _Copy:
        model = ModelId(spec.model)
        path = folder_of(self._root, model)
        if path is None:
            raise DownloadFailed(
                f"{model!r} cannot be a folder's name here; `exo-node models pull` may get it",
                param=HERE,
            )
        offer = await self._client.offer(source.address, source.node, model)
        files = checked_offer(offer, source.name)
        if spec.checkpoint_sha256 and spec.checkpoint_sha256 != offer.fingerprint:
            raise DownloadFailed(f"{source.name} has another revision of {model}", param="model")
        folder = CopyFolder(path)
        await asyncio.to_thread(folder.begin, model, offer)
        return _Copy(model, source, folder, offer, files, report)

    async def _small_files(self, copy: _Copy) -> None:
        small = [file for file in copy.files.values() if not is_weight_file(file.path)]
        missing = [file for file in small if not await asyncio.to_thread(copy.folder.has, file)]
        await self._require_room(copy, sum(file.size for file in missing))
        for file in missing:
            await self._file(copy, file)

    async def _read_by(
        self, copy: _Copy, spec: pb.StageSpec, weights: Sequence[Wanted]
    ) -> set[str]:
        """The weight files that the stage reads, by the headers of all."""
        await self._headers(copy)
        return {*await asyncio.to_thread(_files_read, spec, copy.folder, weights)}

    async def _headers(self, copy: _Copy) -> None:
        for file in filter(lambda each: is_weight_file(each.path), copy.files.values()):
            if await asyncio.to_thread(copy.folder.lacks_header, file):
                start = await self._range(copy, file, 0, 8)
                length = header_length(start, file)
                header = start + await self._range(copy, file, 8, length)
                await asyncio.to_thread(copy.folder.put_header, file, header)

    async def _range(self, copy: _Copy, file: Wanted, start: int, length: int) -> bytes:
        asked = pb.FileRequest(model=copy.model, path=file.path, start=start, length=length)
        data = b""
        source = copy.source
        async with aclosing(self._client.read(source.address, source.node, asked)) as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) >= length:
                    break
        if len(data) != length:
            raise InvalidCheckpoint(f"{source.name} gave {len(data)} bytes for {length}")
        return data

    async def _fetch(self, copy: _Copy, files: Sequence[Wanted]) -> None:
        here = [await asyncio.to_thread(copy.folder.here, file) for file in files]
        copy.total, copy.done = sum(file.size for file in files), sum(here)
        await self._require_room(copy, copy.total - copy.done)
        copy.advance(0)
        for file, size in zip(files, here, strict=True):
            if size < file.size or not await asyncio.to_thread(copy.folder.has, file):
                await self._file(copy, file)

    async def _require_room(self, copy: _Copy, missing: int) -> None:
        """Raises DownloadFailed where so many bytes have no room."""
        free = await asyncio.to_thread(copy.folder.free_bytes)
        if missing and missing + _HEADROOM > free:
            raise DownloadFailed(
                f"{copy.model} needs {missing / 1e9:,.2f} GB more in {self._root}, where "
                f"{free / 1e9:,.2f} GB are free. Free some space, or set --data-dir to another "
                "disk.",
                param=HERE,
            )

    async def _file(self, copy: _Copy, file: Wanted) -> None:
        """Raises DownloadFailed, naming the peer, where what it sends is not what it offers."""
        resumed = await asyncio.to_thread(copy.folder.begun, file) > 0
        got, wanted = await self._received(copy, file)
        if got != wanted and resumed:  # what lay here may be of another version
            copy.done -= file.size
            got, wanted = await self._received(copy, file)
        if got != wanted:
            copy.done -= file.size
            raise DownloadFailed(
                f"{copy.source.name} sent wrong bytes of {file.path} (SHA-256 {got}, not "
                f"{wanted}): check its disk",
                param="model",
            )

    async def _received(self, copy: _Copy, file: Wanted) -> tuple[str, str]:
        """The rest of a file: the hash of what is here then, and the one that it should have.

        The peer computes what its offer left out while it sends.
        """
        source = copy.source
        hashing = asyncio.create_task(self._digest(copy, file))
        try:
            start = await asyncio.to_thread(copy.folder.begun, file)
            asked = pb.FileRequest(model=copy.model, path=file.path, start=start)
            if start < file.size:
                async with aclosing(
                    self._client.read(source.address, source.node, asked)
                ) as chunks:
                    async for chunk in chunks:
                        await asyncio.to_thread(copy.folder.append, file, chunk)
                        start += len(chunk)
                        copy.advance(len(chunk))
                        if start >= file.size:
                            break
            if start < file.size:
                raise PeerLost(f"{source.name} ended {file.path} at {start} of {file.size} bytes")
            wanted = await hashing
            return await asyncio.to_thread(copy.folder.finish, file, wanted), wanted
        finally:
            _ = hashing.cancel()
            _ = await asyncio.gather(hashing, return_exceptions=True)

    async def _digest(self, copy: _Copy, file: Wanted) -> str:
        if file.sha256:
            return file.sha256
        source = copy.source
        return await self._client.digest(source.address, source.node, copy.model, file.path)


def _silent(_step: str, _news: Progress) -> None:
    """For what takes no time to speak of."""


def _files_read(
    spec: pb.StageSpec, folder: CopyFolder, weights: Sequence[Wanted]
) -> frozenset[str]:
    tensors = folder.tensors(weights)
    first, end, layers = spec.first_layer, spec.end_layer, spec.num_layers
    return files_of_stage(tensors, first, end, layers, generator=spec.stage == 0)
