"""A node fills in parts of a specification itself, and deletes no files that a load reads."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from exo_node.node.machine.settings import Settings
from exo_node.node.placements.stage_runners import LocalStages
from exo_node.node.store.fetching import StageFolder
from exo_node.placement.errors import LoadFailed, RemovalRefused
from exo_node.placement.ids import ModelId
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.checkpoint.drafters import DrafterUnusable


class Fetcher:
    """Has the model already."""

    async def fetch(self, *_: object) -> StageFolder:
        return StageFolder(Path("/here"), "f")

    def drafter_folder(self, drafter: ModelId) -> Path:
        if drafter == "a/drafter":
            return Path("/beside")
        raise DrafterUnusable("it is behind the sofa")


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


def stages_of(settings: Settings, *parts: object) -> LocalStages:
    fetcher, supervisor = cast(Any, parts)
    return LocalStages(settings, fetcher, cast(Any, Profiling()), supervisor)


def test_a_peer_does_not_say_where_a_runner_listens_or_reads(tmp_path: Path) -> None:
    supervisor = Supervisor()
    stages = stages_of(
        Settings(data_dir=tmp_path, prefix_disk_gb=0.5, name="desk"), Fetcher(), supervisor
    )
    foreign = pb.StageSpec(
        model="demo",
        listen=["0.0.0.0", "8.8.8.8"],
        path="/etc",
        drafter="a/drafter",
        drafter_path="/etc",
        profile_folder="/tmp",
        prefix_folder="/tmp",
        prefix_disk_bytes=1 << 40,
        memory_limit_bytes=1,
    )
    _ = asyncio.run(stages.load(foreign, lambda _: None))
    (spec,) = supervisor.loaded
    assert list(spec.listen) == ["127.0.0.2"]
    assert (spec.path, spec.profile_folder) == ("/here", str(tmp_path / "profiles"))
    assert (spec.prefix_folder, spec.prefix_disk_bytes) == (str(tmp_path / "prefixes"), 500_000_000)
    assert (spec.drafter_path, spec.memory_limit_bytes) == ("/beside", 0)
    for drafter, fault in (("", ""), ("lost", "it is behind the sofa")):
        foreign.drafter, foreign.drafter_fault = drafter, "forged"
        _ = asyncio.run(stages.load(foreign, lambda _: None))
        spec = supervisor.loaded[-1]
        assert (spec.drafter_path, spec.drafter_fault) == ("", fault and f"desk: {fault}")


MODEL = ModelId("owner/tiny")


class SlowFetcher:
    """Takes the model's lock, as a real one does; the load reads its files until it may end."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.begun = asyncio.Event()
        self._lock = asyncio.Lock()

    def lock(self, _: ModelId) -> asyncio.Lock:
        return self._lock

    async def fetch(self, *spec: object, **how: object) -> StageFolder:
        self.begun.set()
        async with self._lock:
            pass
        _ = await self.may_end.wait()
        raise LoadFailed("the runner ended")


async def test_a_deletion_during_a_load_is_refused_and_later_possible() -> None:
    fetcher, removals = SlowFetcher(), list[str]()
    stages = stages_of(Settings(data_dir=Path("/none")), fetcher, Supervisor())
    spec = pb.StageSpec(model=MODEL)
    load = asyncio.create_task(stages.load(spec, lambda _: None))
    _ = await fetcher.begun.wait()
    with pytest.raises(RemovalRefused, match=r"is being loaded; wait .* `exo-node models unload"):
        await stages.remove_files(MODEL, lambda: removals.append(MODEL))
    fetcher.may_end.set()
    with pytest.raises(LoadFailed):
        _ = await load
    assert removals == []
    await stages.remove_files(MODEL, lambda: removals.append(MODEL))
    assert removals == [MODEL]


async def test_a_load_waits_for_a_deletion() -> None:
    fetcher = SlowFetcher()
    stages = stages_of(Settings(data_dir=Path("/none")), fetcher, Supervisor())
    order: list[str] = []
    started, may_end = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def remove() -> None:
        _ = loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result()
        order.append("removed")

    removal = asyncio.create_task(stages.remove_files(MODEL, remove))
    _ = await started.wait()
    load = asyncio.create_task(stages.load(pb.StageSpec(model=MODEL), lambda _: None))
    fetcher.may_end.set()
    load.add_done_callback(lambda _: order.append("loaded"))
    _ = await fetcher.begun.wait()
    assert order == []
    may_end.set()
    _ = await asyncio.gather(removal, load, return_exceptions=True)
    assert order == ["removed", "loaded"]
