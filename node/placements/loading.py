"""The first load of a placement: all its stages at once, each on the node that was planned."""

import asyncio
import time
from collections.abc import Awaitable

from ...placement.errors import ExoNodeError, LoadFailed, PeerLost
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..runners.runner_client import Endpoint
from .loaded_placement import LoadedPlacement
from .stages import Facts, Stages, specs_of


async def load(
    record: LoadedPlacement,
    stages: Stages,
    facts: Facts,
    fingerprint: str,
    lease_s: int,
    dead: set[NodeId],
) -> None:
    """Raises the first stage's error; nodes that were lost meanwhile join `dead`."""
    record.specs = specs_of(record, facts, fingerprint, lease_s)
    record.head_asked_for = record.specs[0].native_mtp
    nodes = [stage.node for stage in record.stages]

    def progress(news: pb.LoadProgress) -> None:
        share = f" {100 * news.done // news.total} %" if news.total else ""
        record.load.advance(news.step + share)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_flat(stages.load(node, spec, progress)))
            for node, spec in zip(nodes, record.specs, strict=True)
        ]
    outcomes = [task.result() for task in tasks]
    record.endpoints = [
        Endpoint(node, ready)
        for node, ready in zip(nodes, outcomes, strict=True)
        if isinstance(ready, pb.LoadReady)
    ]
    dead.update(n for n, o in zip(nodes, outcomes, strict=True) if isinstance(o, PeerLost))
    for outcome in outcomes:
        if isinstance(outcome, ExoNodeError):
            raise outcome


def finish(record: LoadedPlacement, started: float) -> float:
    """Its stages are loaded and connected; the seconds that it took.

    Raises LoadFailed where a stage was lost while others were still loading.
    """
    if record.status == "failed":
        raise LoadFailed(record.load.error)
    record.take_over()
    record.load.ready()
    record.proven = True
    return time.monotonic() - started


async def _flat(loading: Awaitable[pb.LoadReady]) -> pb.LoadReady | ExoNodeError:
    """An outcome instead of an exception: one stage's failure must not hide where others are."""
    try:
        return await loading
    except ExoNodeError as fault:
        return fault
