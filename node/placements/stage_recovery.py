"""What a placement does when it lost stages: finds which, puts others in their place, goes on."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from typing import ParamSpec

from ...placement.cluster import ClusterView
from ...placement.errors import ExoNodeError, InsufficientMemory, PeerLost
from ...placement.ids import NodeId
from ...placement.spares import spare_node
from ...proto import peer_pb2 as pb
from ..runners.runner_client import Endpoint
from .loaded_placement import LoadedPlacement, Spare
from .stages import Facts, Stages

log = logging.getLogger(__name__)
_Arguments = ParamSpec("_Arguments")

ROUNDS = 3
"""How often another stage may be lost while one is replaced."""


class StageRecovery:
    """Works on one record at a time for each placement; the caller sees to that."""

    def __init__(self, stages: Stages, facts: Facts) -> None:
        self._stages = stages
        self._facts = facts

    async def restore(self, record: LoadedPlacement, *, planned: bool = False) -> list[int]:
        """Every stage answers and is connected afterwards; which ones were replaced.

        `planned`: the runners that are replaced work still. One that is a whole placement brings
        its answers to their end. A stage of several is told to end, since its frames lead nowhere
        now and its answers are to go on at once.

        Raises InsufficientMemory where no live node has room for a lost stage, and what loading
        raises.
        """
        replaced: set[int] = set()
        dead: set[NodeId] = set()
        record.see(self._facts.view(record.card.id))
        for _ in range(ROUNDS):
            lost = await self.lost_stages(record)
            for stage in lost:
                await self._replace(record, stage, dead)
                replaced.add(stage)
            try:
                await self.connect(record)
            except PeerLost as fault:
                log.warning("%s: %s while it was connected anew", record.id, fault.message)
                continue
            if planned and len(record.endpoints) == 1:
                record.retired.clear()
            return sorted(replaced)
        raise PeerLost(f"placement {record.id} lost stages faster than they could be replaced")

    async def connect(self, record: LoadedPlacement) -> None:
        """Each stage to the next, the last one to the generator. Raises PeerLost."""
        if len(record.endpoints) == 1:
            record.connections += 1
            return
        following = [*record.endpoints[1:], record.endpoints[0]]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_outcome(self._stages.connect, stage, after, record.id))
                for stage, after in zip(record.endpoints, following, strict=True)
            ]
        for fault in (task.result() for task in tasks):
            if fault is not None:
                raise fault
        record.connections += 1

    async def lost_stages(self, record: LoadedPlacement) -> list[int]:
        """Those that are known to be gone or do not answer within a second."""
        asked = [i for i in range(len(record.endpoints)) if i not in record.gone]
        answers = await asyncio.gather(
            *(_outcome(self._stages.ping, record.endpoints[i], record.id, i) for i in asked)
        )
        silent = [i for i, fault in zip(asked, answers, strict=True) if fault is not None]
        return sorted({*record.gone, *silent})

    async def refill(self, record: LoadedPlacement) -> None:
        """Loads the spares that are missing; what cannot be had is noted, and no error."""
        record.spares = [spare for spare in record.spares if spare.status != "failed"]
        record.spares_missing = ""
        for stage in range(len(record.stages)):
            have = sum(spare.stage == stage for spare in record.spares)
            for _ in range(record.spares_wanted - have):
                if not await self._add_spare(record, stage):
                    return

    async def ensure_spare(self, record: LoadedPlacement, stage: int) -> bool:
        """Whether the stage has a warm spare now; one is loaded where it had none."""
        return self._ready_spare(record, stage) is not None or await self._add_spare(record, stage)

    def has_spares(self, record: LoadedPlacement, stages: Iterable[int]) -> bool:
        """Whether each of the stages has a warm spare, so that nothing has to be loaded."""
        return all(self._ready_spare(record, stage) is not None for stage in stages)

    async def drop_spares(self, record: LoadedPlacement) -> None:
        spares, record.spares = record.spares, []
        for spare in spares:
            await self._end(record, spare.stage, spare.node, spare.endpoint)

    async def _replace(self, record: LoadedPlacement, stage: int, dead: set[NodeId]) -> None:
        lost = record.endpoints[stage]
        while (spare := self._ready_spare(record, stage)) is not None:
            record.spares.remove(spare)
            assert spare.endpoint is not None
            try:
                _ = await self._stages.ping(spare.endpoint, record.id, stage)
            except PeerLost as fault:
                log.warning("a spare of stage %d of %s: %s", stage, record.id, fault.message)
                continue
            record.retired.append((stage, lost))
            record.move(stage, spare.endpoint)
            return
        # Its runner may hang: it would hold the memory that the next one needs.
        await self._end(record, stage, lost.node, lost, kill=True)
        await self._load_anew(record, stage, dead)

    async def retire(self, record: LoadedPlacement) -> None:
        """Ends the runners whose place a spare took: they may be stopped and not gone."""
        while record.retired:
            stage, endpoint = record.retired.pop()
            await self._end(record, stage, endpoint.node, endpoint, kill=True)

    def _ready_spare(self, record: LoadedPlacement, stage: int) -> Spare | None:
        ready = [s for s in record.spares if s.stage == stage and s.status == "ready"]
        return ready[0] if ready else None

    async def _load_anew(self, record: LoadedPlacement, stage: int, dead: set[NodeId]) -> None:
        """On one node after another: one that is lost may still count as alive for a while.

        Those join `dead`, the nodes that this restoring has found to be so.
        """
        while True:
            node = self._node_for(record, stage, dead)
            try:
                await self._load_on(node, record, stage)
                return
            except PeerLost as fault:
                log.warning("stage %d of %s: %s", stage, record.id, fault.message)
                dead.add(node)

    def _node_for(self, record: LoadedPlacement, stage: int, dead: set[NodeId]) -> NodeId:
        held = record.holders() - {(record.stages[stage].node, stage)}
        view = without(self._facts.view(record.card.id), dead)
        mtp = record.specs[0].native_mtp
        stages, context = record.stages, record.plan.context_length
        node = spare_node(record.in_memory, view, stages, stage, held, context, mtp=mtp)
        if node is None:
            raise InsufficientMemory(
                f"stage {stage} of {record.card.id} is lost and no live node has room for its "
                "layers; start a node, or free memory on one"
            )
        return node

    async def _load_on(self, node: NodeId, record: LoadedPlacement, stage: int) -> None:
        record.assign(stage, node)

        def progress(news: pb.LoadProgress) -> None:
            record.load.advance(news.step)

        ready = await self._stages.load(node, record.specs[stage], progress)
        record.move(stage, Endpoint(node, ready))

    async def _add_spare(self, record: LoadedPlacement, stage: int) -> bool:
        view = self._facts.view(record.card.id)
        mtp = record.specs[0].native_mtp
        stages, context = record.stages, record.plan.context_length
        node = spare_node(record.in_memory, view, stages, stage, record.holders(), context, mtp=mtp)
        if node is None:
            record.spares_missing = (
                f"no live node has room for a spare of stage {stage} beside what it holds; start "
                "a node, or free memory on one"
            )
            return False
        spare = Spare(stage, node)
        record.spares.append(spare)
        try:
            ready = await self._stages.load(node, record.specs[stage], lambda _: None)
        except ExoNodeError as fault:
            spare.error = record.spares_missing = fault.message
            log.warning("a spare of stage %d of %s: %s", stage, record.id, fault.message)
            return False
        except asyncio.CancelledError:
            spare.error = "its load was cancelled"
            raise
        spare.endpoint = Endpoint(node, ready)
        return True

    async def unload(self, record: LoadedPlacement) -> None:
        """Ends every runner of the placement, as far as its nodes are live."""
        try:
            await self.drop_spares(record)
            await self.retire(record)
            endpoints = dict(enumerate(record.endpoints))
            await asyncio.gather(
                *(
                    self._end(record, number, stage.node, endpoints.get(number))
                    for number, stage in enumerate(record.stages)
                )
            )
        finally:
            record.unloaded = True

    async def _end(
        self,
        record: LoadedPlacement,
        stage: int,
        node: NodeId,
        endpoint: Endpoint | None,
        *,
        kill: bool = False,
    ) -> None:
        """A node that does not answer now unloads what it still holds when it is back."""
        try:
            await self._stages.unload(node, record.id, stage, kill=kill)
        except PeerLost as fault:
            log.info("stage %d of %s went with its node: %s", stage, record.id, fault.message)
        if endpoint is not None:
            await self._stages.forget(endpoint)


def without(view: ClusterView, dead: Collection[NodeId]) -> ClusterView:
    """The view less nodes that it shows although they are lost."""
    return replace(view, nodes=tuple(node for node in view.nodes if node.id not in dead))


async def _outcome(
    call: Callable[_Arguments, Awaitable[object]],
    *arguments: _Arguments.args,
    **named: _Arguments.kwargs,
) -> ExoNodeError | None:
    """The error instead of an exception, so that one stage's does not hide the others'."""
    try:
        _ = await call(*arguments, **named)
    except ExoNodeError as fault:
        return fault
    return None
