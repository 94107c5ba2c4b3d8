"""One model's files on their way from one peer: resumed, hashed, refused where they are wrong."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...placement.errors import DownloadFailed, PeerLost
from ...placement.ids import ModelId
from ...proto import peer_pb2 as pb
from ...shard.checkpoint.checkpoint import is_weight_file
from ..rpc.model_files import ModelFilesClient
from .copy_folder import HERE, CopyFolder, checked_offer
from .identifiers import Sha256
from .places import copy_folder
from .sources import ModelSource
from .transfers import FileProgress, Meter, PartialFile, Progress, RemoteFile, require_room

_HEADROOM: Final = 64 << 20
_REPORT_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class PeerCopy:
    """A copy in `root`, exo-node's own folder of models, of the files that a peer offers."""

    client: ModelFilesClient
    source: ModelSource
    model: ModelId
    root: Path
    folder: CopyFolder
    offer: pb.ModelOffer
    files: Mapping[str, RemoteFile]

    @classmethod
    async def begin(
        cls, client: ModelFilesClient, source: ModelSource, root: Path, spec: pb.StageSpec
    ) -> "PeerCopy":
        """Asks for the peer's offer and creates the folder; an unfinished copy there resumes.

        Raises DownloadFailed for another revision than the stage's, and for what cannot be copied.
        """
        model = ModelId(spec.model)
        path = copy_folder(root, model)
        if path is None:
            raise DownloadFailed(
                f"{model!r} cannot be a folder's name here; `exo-node models pull` may get it",
                param=HERE,
            )
        offer = await client.offer(source.address, source.node, model)
        files = checked_offer(offer, source.name)
        if spec.checkpoint_sha256 and spec.checkpoint_sha256 != offer.fingerprint:
            raise DownloadFailed(f"{source.name} has another revision of {model}", param="model")
        folder = CopyFolder(path)
        await asyncio.to_thread(folder.begin, model, offer)
        return cls(client, source, model, root, folder, offer, files)

    async def fetch(self, report: Callable[[Progress], None]) -> int:
        """Fetches what is not here; returns the bytes of all files, here before or not."""
        files = sorted(self.files.values(), key=lambda file: is_weight_file(file.path))
        missing = await asyncio.to_thread(self.folder.missing, files)
        partials = [self.folder.partial(file) for file in missing]
        arrived = [await asyncio.to_thread(partial.arrived_bytes) for partial in partials]
        if needed := sum(file.size for file in missing) - sum(arrived):
            remedy = "set --data-dir to another disk"
            await asyncio.to_thread(
                require_room, self.root, needed + _HEADROOM, self.model, remedy, HERE
            )
        here: dict[str, FileProgress] = {
            file.path: FileProgress(file.size, file.size) for file in files
        }
        for file, done_bytes in zip(missing, arrived, strict=True):
            here[file.path] = FileProgress(done_bytes, file.size)
        meter = Meter(here, report, every_bytes=_REPORT_BYTES)
        for file, partial, resumed in zip(missing, partials, arrived, strict=True):
            await self._fetch_file(file, partial, meter, resumed=resumed > 0)
        meter.finish()
        return sum(file.size for file in files)

    async def _fetch_file(
        self, file: RemoteFile, partial: PartialFile, meter: Meter, *, resumed: bool
    ) -> None:
        """Copies a file. Raises DownloadFailed, naming the peer, if its bytes have another hash."""
        digest, expected = await self._receive(file, partial, meter)
        if digest != expected and resumed:  # the partial file may have been of another version
            meter.add(-file.size, file.path)
            digest, expected = await self._receive(file, partial, meter)
        if digest != expected:
            raise DownloadFailed(
                f"{self.source.name} sent wrong bytes of {file.path} (SHA-256 {digest}, not "
                f"{expected}): check its disk",
                param="model",
            )

    async def _receive(
        self, file: RemoteFile, partial: PartialFile, meter: Meter
    ) -> tuple[str, Sha256]:
        """Fetches the rest of a file; returns its SHA-256, and the one that it should have.

        The peer computes a hash that its offer lacks while it sends.
        """
        hashing = asyncio.create_task(self._digest(file))
        try:
            position = await asyncio.to_thread(partial.arrived_bytes)
            if position < file.size:
                async with aclosing(self._read(file, position)) as chunks:
                    async for chunk in chunks:
                        await asyncio.to_thread(partial.append, chunk)
                        position += len(chunk)
                        meter.add(len(chunk), file.path)
                        if position >= file.size:
                            break
            if position < file.size:
                raise PeerLost(
                    f"{self.source.name} ended {file.path} at {position} of {file.size} bytes"
                )
            expected = await hashing
            return await asyncio.to_thread(partial.finish, expected), expected
        finally:
            _ = hashing.cancel()
            _ = await asyncio.gather(hashing, return_exceptions=True)

    async def _digest(self, file: RemoteFile) -> Sha256:
        source = self.source
        digest = file.hash or await self.client.digest(
            source.address, source.node, self.model, file.path
        )
        if (checked := Sha256.read(digest)) is None:
            raise DownloadFailed(
                f"{source.name} gives {file.path} the hash {digest[:80]!r}", param="model"
            )
        return checked

    def _read(self, file: RemoteFile, start: int) -> AsyncGenerator[bytes]:
        """Chunks from `start` to the file's end."""
        request = pb.FileRequest(model=self.model, path=file.path, start=start)
        return self.client.read(self.source.address, self.source.node, request)
