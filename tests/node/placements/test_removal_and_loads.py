"""A model's files are deleted only while no load of this node reads them."""

import asyncio
from typing import Any, cast

import pytest

from exo_node.node.placements.stage_runners import LocalStages
from exo_node.node.store.fetching import StageFolder
from exo_node.placement.errors import LoadFailed, RemovalRefused
from exo_node.placement.ids import ModelId
from exo_node.proto import peer_pb2 as pb

MODEL = ModelId("owner/tiny")


class Fetcher:
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
    fetcher, removals = Fetcher(), list[str]()
    nothing: Any = None
    stages = LocalStages(nothing, cast(Any, fetcher), nothing, nothing)
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
    fetcher = Fetcher()
    nothing: Any = None
    stages = LocalStages(nothing, cast(Any, fetcher), nothing, nothing)
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
