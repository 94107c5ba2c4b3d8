"""One node: its parts put together, started in order and closed in reverse."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from .api.http.drain import Drain
from .cluster.desired import DesiredPlacements
from .cluster.node_exit import Outcome
from .head_client import ClusterHead
from .join.operations import JoinOperations
from .local_node import LocalNode
from .machine.awake import Awake, WakeWatch
from .machine.data_dir_lock import reachable
from .machine.hardware import Hardware
from .machine.interfaces import LOOPBACK
from .machine.settings import Settings, environment, runner_environment
from .machine.tasks import cancel
from .node_api import NodeApi
from .peering import PeerWiring
from .placements.claims import Claims
from .placements.head_watch import HeadWatch
from .placements.placements import Placements
from .placements.planner_view import NodeFactsSource
from .placements.stage_runners import ClusterStages, LocalStages
from .rpc.control_server import ControlServer, NodeCalls
from .rpc.link_rpc import LinkService
from .rpc.model_files import ModelFilesClient, ModelFilesService
from .runners.runner_process import RunnerHost
from .runners.supervisor import Supervisor
from .store.fetching import ModelFetcher
from .store.sharing import SharedModels
from .store.sources import sources_of

log = logging.getLogger(__name__)


class Node:
    """A node of a cluster: made, started, drained and closed on one event loop."""

    def __init__(self, settings: Settings, hardware: Hardware, peers: Sequence[str] = ()) -> None:
        """`peers`: nodes of the cluster to dial, besides those of the settings.

        Raises InvalidSettings.
        """
        self._settings = settings
        self.local = local = LocalNode(settings, hardware)
        self._peers = list(dict.fromkeys([*settings.peers, *peers]))
        self._stack = AsyncExitStack()
        self._background: list[asyncio.Task[None]] = []
        self._leaving = Drain(local.timing)
        self._supervisor = Supervisor(
            _runner_host(local),
            lambda spec, why: self._placements.actions.note_ended(
                local.id, spec.placement, spec.stage, why
            ),
            local.profiling.correct,
            local.note_gpu_fault,
        )
        desired = DesiredPlacements(keep_alive_s=settings.keep_alive)
        self._peering = peering = PeerWiring(
            local,
            self._supervisor.states,
            lambda node, why: self._placements.actions.note_node_lost(node, why),
            desired,
        )
        cluster, timing, events = peering.cluster, local.timing, local.events
        fetcher = _fetcher(local, peering)
        facts = NodeFactsSource(
            cluster, local.library, local.switches, fetcher, auto_download=settings.auto_download
        )
        self._awake = Awake(
            lambda: local.switches.keep_awake,
            self._supervisor.is_working,
            local.switches.note_awake_refusal,
        )
        self._stages = LocalStages(settings, fetcher, local.profiling, self._supervisor)
        stages = ClusterStages(
            self._stages, cluster, peering.client, peering.channels, local.profiling, timing
        )
        self._placements = placements = Placements(stages, facts, timing, events, desired)
        self._claims = Claims(placements, facts, events, timing)
        self._watch = HeadWatch(cluster, placements, desired, events, timing)
        head = ClusterHead(cluster, peering.client, self._claims)
        self._api = NodeApi(local, peering, placements, stages, facts, head, self._leaving)

    async def _woke(self, slept_s: float) -> None:
        """Finds the others again at once: connections that a sleep cut would fail by timeouts.

        Those to this machine's own runners hold, with the answers that they carry.
        """
        text = f"this node slept, or was stopped, for {slept_s:.0f} s"
        _ = self.local.events.add("woke", text, seconds=slept_s)
        self.local.renew_addresses()
        self._peering.search.announce_again()
        await self._peering.channels.close(keep=(LOOPBACK, *self.local.profiling.addresses))
        self.local.profiling.expect_other_links()

    def login_link(self) -> str:
        """A link to the dashboard with the rights of the node's own user, valid once."""
        return self._api.login_link(reachable(self._settings.host, self.local.http_port))

    @property
    def outcome(self) -> asyncio.Future[Outcome]:
        """Done when the node has to end by itself."""
        return self._peering.ending.outcome

    async def start(self) -> None:
        """Listens and looks for peers. Raises InvalidSettings; it has to be closed then too."""
        peering, at_the_end = self._peering, self._stack.push_async_callback
        _ = at_the_end(self._supervisor.close)
        _ = at_the_end(peering.close)
        _ = at_the_end(self._placements.close)
        await self._listen()
        peering.cluster.start()
        _ = at_the_end(peering.cluster.close)
        self._background = [
            self.local.loops.keep(
                partial(self.local.scan_models, self.local.timing.scan_s), "the scan for models"
            ),
            self.local.loops.keep(self._watch.run, "the watch over placements"),
            self.local.loops.keep(self._awake.run, "the power assertion"),
            self.local.loops.keep(self.local.network.run, "the look at the local network"),
            self.local.loops.keep(WakeWatch(self._woke).run, "the watch for sleep"),
        ]
        _ = at_the_end(cancel, self._background)
        self.local.profiling.start(peering.cluster.members, self.local.loops)
        _ = at_the_end(self.local.profiling.close)
        peering.joining.begin(self._settings.peers)
        peering.search.start(self._peers)
        _ = at_the_end(peering.search.close)

    async def drain(self) -> None:
        """Takes no new work, gives up the head's lease, waits while what runs makes progress."""
        self._leaving.begin()
        self._peering.cluster.leave()
        await self._api.pause_downloads()
        if not await self._leaving.drained(self._live_requests, self._steps):
            log.warning("not everything ended in time; what still runs is cut off")
        self.local.events.close()

    async def close(self) -> None:
        self.local.events.close()
        self._leaving.cut_off()
        await self._stack.aclose()

    async def _listen(self) -> None:
        """To peers first, then to clients."""
        local, joining = self.local, self._peering.joining
        hosts = list(dict.fromkeys([*local.profiling.addresses, LOOPBACK]))
        join_port = joining.listen(hosts, self._settings.grpc_port)
        calls = NodeCalls(
            answer_heartbeat=self._peering.answer_heartbeat,
            load_stage=self._stages.load,
            unload_stage=self._stages.unload,
            decide_join=JoinOperations(joining).decide,
            answer_http=self._api.answer,
            acquire=self._claims.acquire,
            report=self._claims.report,
        )
        files = ModelFilesService(SharedModels(local.library), lambda: self._live_requests() > 0)
        server = ControlServer(calls, local.keyring.for_server(join_port), LinkService(), files)
        local.grpc_port = await server.start(hosts, self._settings.grpc_port)
        _ = self._stack.push_async_callback(server.close)
        local.http_port = await self._api.start()
        _ = self._stack.push_async_callback(self._api.close)

    def _live_requests(self) -> int:
        return sum(state.live_requests for state in self._supervisor.states())

    def _steps(self) -> int:
        """Number of steps of this node's stages and of its clients' answers."""
        stages = sum(state.progress for state in self._supervisor.states())
        return stages + self._api.answer_events


def _runner_host(local: LocalNode) -> RunnerHost:
    return RunnerHost(
        node=local.id,
        host=local.host,
        credentials=local.keyring.for_runner,
        environment=runner_environment(environment()),
        timing=local.timing,
        load_timeout_s=local.settings.load_timeout,
        memory_bytes=local.usable_bytes,
    )


def _fetcher(local: LocalNode, peering: PeerWiring) -> ModelFetcher:
    cluster = peering.cluster
    return ModelFetcher(
        local.library,
        ModelFilesClient(peering.channels, local.timing),
        lambda model: sources_of(model, local.id, cluster.members(), cluster.address),
        local.events,
        local.settings.data_dir / "models",
        may_download=local.settings.auto_download,
    )
