"""Stages on this node: the files that they load, and their runners."""

import asyncio

from ..placement.ids import ModelId, PlacementId
from ..proto import peer_pb2 as pb
from .models import ModelLibrary
from .profiling import Profiling
from .settings import Settings
from .stages import Progress
from .supervisor import Supervisor


class LocalStages:
    """Brings a stage's model here if it must, then starts a runner for its layers."""

    def __init__(
        self,
        settings: Settings,
        library: ModelLibrary,
        profiling: Profiling,
        supervisor: Supervisor,
    ) -> None:
        self._library = library
        self._profiling = profiling
        self._supervisor = supervisor
        self._profile_folder = settings.data_dir / "profiles"
        self._memory_limit = settings.memory_limit or 0
        self._kernels = settings.kernels

    async def load(self, spec: pb.StageSpec, progress: Progress) -> pb.LoadReady:
        """Raises what fetching the model and starting its runner raise."""

        def downloaded(done: int, total: int) -> None:
            progress(pb.LoadProgress(step="downloading", done=done, total=total))

        _, folder = await self._library.fetch(
            ModelId(spec.model), lambda news: downloaded(news.done_bytes, news.total_bytes)
        )
        own = pb.StageSpec()
        own.CopyFrom(spec)
        own.path = str(folder)
        own.ClearField("listen")  # this node's own addresses follow; never a peer's choice
        own.profile_folder = str(self._profile_folder)
        own.memory_limit_bytes = self._memory_limit
        own.kernels = self._kernels
        checkpoint = await asyncio.to_thread(self._library.checkpoint, folder)
        return await self._profiling.load(
            own, checkpoint.fingerprint, lambda: self._supervisor.load(own, progress)
        )

    async def unload(self, placement: PlacementId, stage: int, *, kill: bool = False) -> None:
        """Does nothing where there is no such runner."""
        await self._supervisor.unload(placement, stage, kill=kill)
