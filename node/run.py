"""Builds the node from its settings, serves until told to stop, and closes in reverse."""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version as installed_version
from typing import Any

import psutil

from ..dashboard import asset
from ..placement.errors import InvalidSettings, PlacementNotFound
from ..placement.ids import ModelId, NodeId, PlacementId
from ..proto import peer_pb2 as pb
from .background import background
from .chat import ChatService
from .cluster import Cluster
from .control_client import Channels, RunnerClient
from .control_links import LinkClient, LinkService
from .control_server import ControlServer
from .discovery import Announcement, Candidate, Discovery
from .events import EventLog
from .facts import NodeFactsSource
from .forward import HeadForwarder, answer_forwarded
from .hardware import Hardware, detect_hardware
from .http_server import HttpServer, build_app
from .interfaces import announced_addresses, own_interfaces
from .join_keys import KeyFolder
from .join_node import NodeJoining, Outcome
from .joining import Rekeyed
from .leaving import Leaving
from .log import configure
from .metrics import Metrics
from .models import ModelLibrary
from .operations import NodeOperations
from .placements import Endpoint, Placements
from .presence import Presence
from .profiling import Profiling, build_profiling
from .readiness import Readiness
from .setting_values import is_loopback
from .settings import (
    Settings,
    check_mlx_extras,
    environment,
    installed_distributions,
    runner_environment,
)
from .standing import Standing
from .supervisor import RunnerHost, Supervisor
from .switches import Switches
from .term_file import TermFile
from .totals import Totals
from .trust import (
    cluster_fingerprint,
    load_or_create_identity,
    node_credentials,
    runner_credentials,
)

log = logging.getLogger(__name__)

WATCH_STAGES_S = 1.0
DRAIN_S = 10
"""How long a stopping node lets answers in progress go on."""
LOOPBACK = "127.0.0.1"
PORTS_FREE_S = 10.0
"""How long a node that is built anew waits for its own ports."""
HEAD_WAIT_S = 1.0
"""How long a node that may have peers looks for their head before it leads by itself."""


def run_node(settings: Settings, warnings: Sequence[str]) -> int:
    """`exo-node start`: returns the exit status. Raises InvalidSettings before anything listens."""
    distributions = installed_distributions()
    check_mlx_extras(distributions)
    configure(settings.log_format, node=settings.name)
    for warning in warnings:
        log.warning("%s", warning)
    hardware = detect_hardware(distributions, settings.memory_limit)
    with Presence.acquire(settings.data_dir) as presence:
        return asyncio.run(_serve(settings, hardware, presence))


async def _serve(settings: Settings, hardware: Hardware, presence: Presence) -> int:
    """A node after another, in one process: each with the cluster key that the last one got."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    rekeyed = Rekeyed("given")
    again = False
    while True:
        async with AsyncExitStack() as stack:
            node = await _started(stack, settings, hardware, rekeyed.peers, again=again)
            settings = settings.model_copy(
                update={"port": node.http_port, "grpc_port": node.grpc_port}
            )
            presence.announce(settings.host, node.http_port, version=node.version)
            where = f"http://{settings.host}:{node.http_port}"
            log.info("node %s is ready: %s", settings.name, where)
            outcome = await _ended(node, stop)
            stop.clear()  # a second signal cuts short what still runs
            await _first(node.drain(), stop.wait())
        if isinstance(outcome, int):
            return outcome
        rekeyed, again = outcome, True


async def _started(
    stack: AsyncExitStack,
    settings: Settings,
    hardware: Hardware,
    peers: Sequence[str],
    *,
    again: bool,
) -> "Node":
    """A node that serves, closed with the stack; the ports of one that just ended may take a
    moment to be free `again`. Raises InvalidSettings."""
    deadline = time.monotonic() + (PORTS_FREE_S if again else 0)
    while True:
        node = Node(settings, hardware, peers)
        try:
            await node.start()
        except InvalidSettings as fault:
            await node.close()
            if time.monotonic() >= deadline:
                if not again or fault.param != "--grpc-port" or not settings.grpc_port:
                    raise
                # The others learn the new one; HTTP has to stay where its clients look for it.
                log.warning("the node-to-node port %d is taken now", settings.grpc_port)
                settings = settings.model_copy(update={"grpc_port": 0})
            await asyncio.sleep(0.1)
            continue
        _ = stack.push_async_callback(node.close)
        return node


async def _ended(node: "Node", stop: asyncio.Event) -> Outcome:
    """Waits until the node is told to stop (0) or has to end by itself."""
    stopping = asyncio.create_task(stop.wait())
    try:
        _ = await asyncio.wait(
            {stopping, node.joining.outcome}, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        _ = stopping.cancel()
    if node.joining.outcome.done():
        return node.joining.outcome.result()
    log.info("stopping")
    return 0


class Node:
    """Everything that one node is made of; also the node side of the gRPC services."""

    def __init__(self, settings: Settings, hardware: Hardware, peers: Sequence[str] = ()) -> None:
        """`peers`: nodes of the cluster to dial, besides those of the settings."""
        self.version = installed_version("exo-node")
        self._settings = settings
        self._peers = peers
        self._hardware = hardware
        secret = settings.cluster_key.get_secret_value() if settings.cluster_key else None
        self._key_folder = KeyFolder(settings.data_dir, secret, settings.cluster_key_file)
        self._key = self._key_folder.load()
        self._identity = load_or_create_identity(settings.data_dir)
        self.id: NodeId = self._identity.node
        self._credentials = node_credentials(self._identity, self._key)
        self._fingerprint = cluster_fingerprint(self._key)
        self._host = advertised_host(settings.interface)
        self._switches = Switches(
            {
                "native_mtp_enabled": settings.native_mtp_enabled,
                "native_mtp_async_draft_eval": settings.native_mtp_async_draft_eval,
                "native_mtp_adaptive": settings.native_mtp_adaptive,
            }
        )
        self._profiling = self._build_profiling()
        self._library = ModelLibrary(settings.models_dir, offline=settings.offline)
        self._models: list[str] = []
        self.grpc_port = settings.grpc_port
        self.http_port = settings.port
        self._stack = AsyncExitStack()
        self._leaving = Leaving()
        self.events = EventLog()

    async def start(self) -> int:
        """Listens and looks for peers; returns the HTTP port. Raises InvalidSettings."""
        self._supervisor = Supervisor(self._runner_host(), self._runner_ended)
        _ = self._stack.push_async_callback(self._supervisor.close)
        channels = Channels(self._credentials)
        _ = self._stack.push_async_callback(channels.close)
        standing = self._standing()
        self.joining = NodeJoining(
            self._identity,
            self._key,
            self._key_folder,
            self.events,
            self._facts,
            open_name=self._settings.open,
        )
        _ = self._stack.push_async_callback(self.joining.close)
        self._client = self.joining.client(channels, standing.life)
        self._runners = RunnerClient(channels)
        self._cluster = Cluster(
            self._facts,
            self._supervisor.states,
            self._client,
            standing,
            self._node_lost,
            self._fingerprint,
            self.events,
        )
        facts = NodeFactsSource(
            self.id,
            self._cluster.members,
            lambda: self._cluster.head or self.id,
            self._library,
            self._switches,
        )
        self._placements = Placements(self, facts, self.events)
        _ = self._stack.push_async_callback(self._placements.close)
        hosts = list(dict.fromkeys([*self._profiling.addresses, LOOPBACK]))
        join_port = self.joining.listen(hosts, self._settings.grpc_port)
        shown = node_credentials(self._identity, self._key, join_port)
        server = ControlServer(self, shown, LinkService(self._profiling.measure_links))
        self.grpc_port = await server.start(hosts, self._settings.grpc_port)
        _ = self._stack.push_async_callback(server.close)
        self.http_port = await self._start_http(facts)
        self._cluster.start()
        _ = self._stack.push_async_callback(self._cluster.close)
        self._background = [
            background(self._scan_models(), "the scan for models"),
            background(self._watch_stages(), "the watch over stages"),
        ]
        _ = self._stack.push_async_callback(self._cancel_background)
        self._profiling.start(self._cluster.members)
        _ = self._stack.push_async_callback(self._profiling.close)
        self.joining.begin(self._cluster, self._settings.peers)
        self._look_for_peers()
        return self.http_port

    async def drain(self) -> None:
        """Takes no new work, gives up the head's lease, and waits for what runs (DRAIN_S)."""
        self._leaving.begin()
        self._cluster.leave()
        if not await self._leaving.drained(self._live_requests):
            log.warning("not everything ended in time; what still runs is cut off")
        self.events.close()

    async def close(self) -> None:
        self.events.close()
        await self._stack.aclose()

    # ------------------------------------------------- stages, wherever they are (Stages)

    async def load(
        self, node: NodeId, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady:
        if node == self.id:
            return await self.load_stage(spec, progress)
        loading = self._client.load(self._cluster.address(node), node, spec, progress)
        ready = await self._profiling.heeding(spec.model, loading)
        return self._profiling.quickest(self.id, Endpoint(node, ready)).ready

    async def unload(
        self, node: NodeId, placement: PlacementId, stage: int, *, kill: bool = False
    ) -> None:
        if node == self.id:
            await self.unload_stage(placement, stage, kill=kill)
            return
        address = self._cluster.address(node)
        await self._client.unload(address, node, placement, stage, kill=kill)

    async def connect(self, stage: Endpoint, following: Endpoint, placement: PlacementId) -> None:
        near = self._profiling.quickest(stage.node, following)
        await self._runners.connect(stage, near, placement)

    async def ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        return await self._runners.ping(stage, placement, number)

    async def forget(self, stage: Endpoint) -> None:
        await self._runners.forget(stage)

    # ------------------------------------------------------- gRPC services (NodeSide)

    def heard(self, sender: NodeId, beat: pb.Heartbeat) -> pb.Heartbeat:
        self.joining.heard(beat)
        return self._cluster.heard(sender, beat)

    async def load_stage(
        self, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady:
        """Brings the model here if it must, then starts a runner for its layers."""

        def downloaded(done: int, total: int) -> None:
            progress(pb.LoadProgress(step="downloading", done=done, total=total))

        _, folder = await self._library.fetch(
            ModelId(spec.model), lambda news: downloaded(news.done_bytes, news.total_bytes)
        )
        own = pb.StageSpec()
        own.CopyFrom(spec)
        own.path = str(folder)
        own.profile_folder = str(self._settings.data_dir / "profiles")
        own.memory_limit_bytes = self._settings.memory_limit or 0
        checkpoint = await asyncio.to_thread(self._library.checkpoint, folder)
        return await self._profiling.load(
            own, checkpoint.fingerprint, lambda: self._supervisor.load(own, progress)
        )

    async def unload_stage(self, placement: PlacementId, stage: int, *, kill: bool = False) -> None:
        await self._supervisor.unload(placement, stage, kill=kill)

    def answer_http(self, request: pb.HttpRequest) -> AsyncIterator[pb.HttpChunk]:
        host = f"{self._settings.host}:{self.http_port}"
        return answer_forwarded(self._app, request, host, self._api_key)

    # --------------------------------------------------------- the head (HeadClient)

    async def head_elsewhere(self, other_than: NodeId | None = None) -> NodeId | None:
        head = await self._cluster.wait_for_head(other_than)
        return None if head == self.id else head

    async def until_gone(self, node: NodeId) -> None:
        await self._cluster.until_gone(node)

    def http(self, head: NodeId, request: pb.HttpRequest) -> AsyncGenerator[pb.HttpChunk, None]:
        return self._client.http(self._cluster.address(head), head, request)

    # ------------------------------------------------------------------------ inside

    @property
    def _api_key(self) -> str | None:
        key = self._settings.api_key
        return None if key is None else key.get_secret_value()

    async def _start_http(self, facts: NodeFactsSource) -> int:
        totals = Totals()
        metrics = Metrics(totals)
        chat = ChatService(self._placements, facts, self._runners, totals, metrics, self.events)
        operations = NodeOperations(
            self._library,
            self._placements,
            Readiness(self._placements, self._runners),
            self._cluster,
            facts,
            self._switches,
            totals,
            metrics,
            self.version,
            int(time.time()),
        )
        self._app = build_app(
            chat,
            operations,
            static=asset,
            allowed_hosts=self._host_names(),
            api_key=self._api_key,
            between=lambda app: self._leaving.around(HeadForwarder(app, self)),
            events=self.events,
            measurements=self._profiling,
            joining=self.joining.service,
        )
        server = HttpServer(self._app, grace_s=DRAIN_S)
        await server.start(self._settings.host, self._settings.port)
        _ = self._stack.push_async_callback(server.close)
        return server.port

    def _host_names(self) -> list[str]:
        """What a browser may call this node where it listens beyond loopback."""
        if is_loopback(self._settings.host):
            return []
        name = socket.gethostname().removesuffix(".local")
        return [self._settings.host, name, f"{name}.local"]

    def _facts(self) -> pb.NodeFacts:
        given = self._switches.fixed("native_mtp_enabled")
        facts = pb.NodeFacts(
            id=self.id,
            name=self._settings.name,
            version=self.version,
            host=self._host,
            port=self.grpc_port,
            chip=self._hardware.chip,
            memory_bytes=self._hardware.usable_bytes,
            memory_bandwidth=self._hardware.bandwidth,
            backend=self._hardware.backend,
            models=self._models,
            http_host=self._settings.host,
            http_port=self.http_port,
            dtype=self._settings.dtype,
            native_mtp_variable="" if given is None else str(int(given)),
            async_draft_eval=self._switches.value("native_mtp_async_draft_eval"),
            adaptive_draft=self._switches.value("native_mtp_adaptive"),
            strict_rows=self._settings.native_mtp_strict,
        )
        return self.joining.tell(self._profiling.tell(facts))

    def _build_profiling(self) -> Profiling:
        given = self._settings.interface is not None
        return build_profiling(
            self.id,
            announced_addresses(self._host, given, own_interfaces()),
            self._settings.data_dir / "profiles",
            device=f"{self._hardware.chip}, {self._hardware.backend}",
            mlx=installed_version("mlx"),
            client=LinkClient(self._credentials, time.perf_counter),
            clock=time.monotonic,
        )

    def _standing(self) -> Standing:
        """A node that cannot have peers leads at once."""
        may_have_peers = self._settings.mdns or bool(self._settings.peers)
        return Standing(
            self.id,
            life=time.time_ns() // 1000,
            store=TermFile(self._settings.data_dir),
            now=time.monotonic(),
            wait_s=HEAD_WAIT_S if may_have_peers else 0.0,
        )

    def _live_requests(self) -> int:
        return sum(state.live_requests for state in self._supervisor.states())

    def _runner_host(self) -> RunnerHost:
        return RunnerHost(
            node=self.id,
            host=self._host,
            credentials=lambda: runner_credentials(self.id, self._key),
            environment=runner_environment(environment()),
        )

    def _runner_ended(self, spec: pb.StageSpec, why: str) -> None:
        self._placements.lost_runner(self.id, spec.placement, spec.stage, why)

    def _node_lost(self, node: NodeId, why: str) -> None:
        self._placements.lost_node(node, why)

    def _look_for_peers(self) -> None:
        for peer in dict.fromkeys([*self._settings.peers, *self._peers]):
            self._cluster.dial(peer)
        if not self._settings.mdns:
            return
        announcement = Announcement(
            self.id,
            self._fingerprint,
            self.version,
            self._host,
            self.grpc_port,
            self.joining.port,
        )
        interfaces = None if self._settings.interface is None else [self._host]
        discovery = Discovery(announcement, interfaces, self._found)
        discovery.start()
        _ = self._stack.push_async_callback(discovery.close)

    def _found(self, candidate: Candidate) -> None:
        if candidate.cluster == self._fingerprint and candidate.node != self.id:
            self._cluster.dial(candidate.address, candidate.node)
        else:
            self.joining.found(candidate)

    async def _scan_models(self) -> None:
        known = await asyncio.to_thread(self._library.scan)
        self._models = [model for model, entry in known.items() if entry.folder is not None]
        for model, fault in self._library.broken.items():
            log.warning("model %s cannot be used: %s", model, fault)

    async def _watch_stages(self) -> None:
        """Stages on other nodes whose runners ended: their nodes' heartbeats stop naming them."""
        while True:
            await asyncio.sleep(WATCH_STAGES_S)
            if self._cluster.head not in (None, self.id):
                await self._hand_over()
                continue
            for node, expected in self._placements.expected().items():
                for placement, stage in self._cluster.missing_stages(expected):
                    why = "its runner ended on the other node"
                    self._placements.lost_runner(node, placement, stage, why)
            self._placements.tend()
            for node in self._cluster.draining():
                self._placements.move_off(node)
            await self._placements.sweep(
                (member.id, stage.placement, stage.stage)
                for member in self._cluster.members()
                for stage in member.stages
            )

    async def _hand_over(self) -> None:
        """Another node is the head and places models anew: what this one placed is in its way."""
        for record in self._placements.records:
            if record.status != "loading":
                log.info(
                    "unloading %s: node %s is the head now", record.card.id, self._cluster.head
                )
                # Gone already, where its answers took a while to end.
                with contextlib.suppress(PlacementNotFound):
                    await self._placements.remove(record.id)

    async def _cancel_background(self) -> None:
        for task in self._background:
            _ = task.cancel()
        _ = await asyncio.gather(*self._background, return_exceptions=True)


async def _first(*works: Coroutine[Any, Any, Any]) -> None:
    """Runs them together until one ends, raises its error, and cancels the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            _ = task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)


def advertised_host(interface: str | None) -> str:
    """The address that peers reach this node at: the given one, else a private one, else loopback.

    Wired names sort before wireless ones on both systems (en0, eth0 before wlan0).
    """
    if interface is not None:
        return interface
    found = [
        (name, address.address)
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for address in addresses
        if address.family.name == "AF_INET"
    ]
    parsed = [ipaddress.ip_address(address) for _, address in found]
    near = [address for address in parsed if address.is_private and not address.is_loopback]
    # A cable between two Macs has link-local addresses only: better than none, worse than others.
    near.sort(key=lambda address: address.is_link_local)
    return str(near[0]) if near else LOOPBACK
