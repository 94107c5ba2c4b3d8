"""What a node takes of a stage's specification from a peer, and what it fills in itself."""

import asyncio
from pathlib import Path
from typing import Any

from exo_node.node.machine.settings import Settings
from exo_node.node.placements.stage_runners import LocalStages
from exo_node.proto import peer_pb2 as pb


class Library:
    """Has the model already."""

    async def fetch(self, *_: Any) -> tuple[None, Path]:
        return None, Path("/here")

    def checkpoint(self, _: Path) -> Any:
        return type("Checkpoint", (), {"fingerprint": "f"})


class Profiling:
    """Adds this node's own addresses, as the real one does."""

    async def load(self, spec: pb.StageSpec, _: str, load: Any) -> pb.LoadReady:
        spec.listen.append("127.0.0.2")
        return await load()


class Supervisor:
    def __init__(self) -> None:
        self.loaded: list[pb.StageSpec] = []

    async def load(self, spec: pb.StageSpec, _: Any) -> pb.LoadReady:
        self.loaded.append(spec)
        return pb.LoadReady()


def test_a_peer_does_not_say_where_a_runner_listens_or_reads(tmp_path: Path) -> None:
    supervisor = Supervisor()
    made: dict[str, Any] = {
        "library": Library(),
        "profiling": Profiling(),
        "supervisor": supervisor,
    }
    stages = LocalStages(Settings(data_dir=tmp_path), **made)
    foreign = pb.StageSpec(
        model="demo",
        listen=["0.0.0.0", "8.8.8.8"],
        path="/etc",
        profile_folder="/tmp",
        prefix_folder="/tmp",
        prefix_disk_bytes=1 << 40,
        memory_limit_bytes=1,
    )
    _ = asyncio.run(stages.load(foreign, lambda _: None))
    (spec,) = supervisor.loaded
    assert list(spec.listen) == ["127.0.0.2"]
    assert (spec.path, spec.profile_folder) == ("/here", str(tmp_path / "profiles"))
    assert (spec.prefix_folder, spec.prefix_disk_bytes) == (str(tmp_path / "prefixes"), 0)
    assert spec.memory_limit_bytes == 0
