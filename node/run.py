"""Builds the node from its settings, serves until told to stop, and closes in reverse."""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version as installed_version

import psutil

from ..dashboard import asset
from ..placement.errors import PlacementNotFound
from ..placement.ids import ModelId, NodeId, PlacementId
from ..proto import peer_pb2 as pb
from .background import background
from .chat import ChatService
from .cluster import Cluster
from .control_client import Channels, ControlClient, RunnerClient
from .control_server import ControlServer
from .discovery import Announcement, Candidate, Discovery
from .election import LowestIdElection
from .facts import NodeFactsSource
from .forward import HeadForwarder, answer_forwarded
from .hardware import Hardware, detect_hardware
from .http_errors import error_response, fault_of
from .http_server import HttpServer, build_app
from .log import configure
from .membership import Membership
from .metrics import Metrics
from .models import ModelLibrary
from .operations import NodeOperations
from .placements import Endpoint, Placements
from .presence import Presence
from .setting_values import is_loopback
from .settings import (
    Settings,
    check_mlx_extras,
    environment,
    installed_distributions,
    runner_environment,
)
from .supervisor import RunnerHost, Supervisor
from .switches import Switches
from .totals import Totals
from .trust import (
    cluster_fingerprint,
    load_or_create_cluster_key,
    load_or_create_identity,
    node_credentials,
    runner_credentials,
)

log = logging.getLogger(__name__)

WATCH_STAGES_S = 1.0
DRAIN_S = 10
"""How long a stopping node lets answers in progress go on."""
LOOPBACK = "127.0.0.1"


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
    node = Node(settings, hardware)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        _ = stack.push_async_callback(node.close)
        port = await node.start()
        presence.announce(settings.host, port, version=node.version)
        log.info("node %s is ready: http://%s:%d", settings.name, settings.host, port)
        _ = await stop.wait()
        log.info("stopping")
    return 0


class Node:
    """Everything that one node is made of; also the node side of the gRPC services."""

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        self.version = installed_version("exo-node")
        self._settings = settings
        self._hardware = hardware
        secret = settings.cluster_key.get_secret_value() if settings.cluster_key else None
        self._key = load_or_create_cluster_key(settings.data_dir, secret, settings.cluster_key_file)
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
        self._library = ModelLibrary(settings.models_dir, offline=settings.offline)
        self._models: list[str] = []
        self._grpc_port = settings.grpc_port
        self._http_port = settings.port
        self._stack = AsyncExitStack()

    async def start(self) -> int:
        """Listens and looks for peers; returns the HTTP port. Raises InvalidSettings."""
        self._supervisor = Supervisor(self._runner_host(), self._runner_ended)
        _ = self._stack.push_async_callback(self._supervisor.close)
        channels = Channels(self._credentials)
        _ = self._stack.push_async_callback(channels.close)
        self._client = ControlClient(channels)
        self._runners = RunnerClient(channels)
        self._cluster = Cluster(
            self._facts,
            self._supervisor.states,
            self._client,
            Membership(self.id, incarnation=time.time_ns() // 1000),
            LowestIdElection(),
            self._node_lost,
            self._fingerprint,
        )
        facts = NodeFactsSource(
            self.id,
            self._cluster.members,
            lambda: self._cluster.head,
            self._library,
            self._switches,
        )
        self._placements = Placements(self, facts)
        _ = self._stack.push_async_callback(self._placements.close)
        server = ControlServer(self, self._credentials)
        hosts = list(dict.fromkeys([self._host, LOOPBACK]))
        self._grpc_port = await server.start(hosts, self._settings.grpc_port)
        _ = self._stack.push_async_callback(server.close)
        self._http_port = await self._start_http(facts)
        self._cluster.start()
        _ = self._stack.push_async_callback(self._cluster.close)
        self._background = [
            background(self._scan_models(), "the scan for models"),
            background(self._watch_stages(), "the watch over stages"),
        ]
        _ = self._stack.push_async_callback(self._cancel_background)
        self._look_for_peers()
        return self._http_port

    async def close(self) -> None:
        await self._stack.aclose()

    # ------------------------------------------------- stages, wherever they are (Stages)

    async def load(
        self, node: NodeId, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady:
        if node == self.id:
            return await self.load_stage(spec, progress)
        return await self._client.load(self._cluster.address(node), node, spec, progress)

    async def unload(self, node: NodeId, placement: PlacementId, stage: int) -> None:
        if node == self.id:
            await self.unload_stage(placement, stage)
            return
        await self._client.unload(self._cluster.address(node), node, placement, stage)

    async def connect(self, stage: Endpoint, following: Endpoint, placement: PlacementId) -> None:
        await self._runners.connect(stage, following, placement)

    async def forget(self, stage: Endpoint) -> None:
        await self._runners.forget(stage)

    # ------------------------------------------------------- gRPC services (NodeSide)

    def heard(self, sender: NodeId, beat: pb.Heartbeat) -> pb.Heartbeat:
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
        return await self._supervisor.load(own, progress)

    async def unload_stage(self, placement: PlacementId, stage: int) -> None:
        await self._supervisor.unload(placement, stage)

    def answer_http(self, request: pb.HttpRequest) -> AsyncIterator[pb.HttpChunk]:
        host = f"{self._settings.host}:{self._http_port}"
        return answer_forwarded(self._app, request, host, self._api_key)

    # --------------------------------------------------------- the head (HeadClient)

    def head_elsewhere(self) -> NodeId | None:
        head = self._cluster.head
        return None if head == self.id else head

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
        chat = ChatService(self._placements, facts, self._runners, totals, metrics)
        operations = NodeOperations(
            self._library,
            self._placements,
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
            between=lambda app: HeadForwarder(app, self, lambda e: error_response(fault_of(e))),
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
        return pb.NodeFacts(
            id=self.id,
            name=self._settings.name,
            version=self.version,
            host=self._host,
            port=self._grpc_port,
            chip=self._hardware.chip,
            memory_bytes=self._hardware.usable_bytes,
            memory_bandwidth=self._hardware.bandwidth,
            backend=self._hardware.backend,
            models=self._models,
            http_host=self._settings.host,
            http_port=self._http_port,
            dtype=self._settings.dtype,
            native_mtp_variable="" if given is None else str(int(given)),
            async_draft_eval=self._switches.value("native_mtp_async_draft_eval"),
            adaptive_draft=self._switches.value("native_mtp_adaptive"),
            strict_rows=self._settings.native_mtp_strict,
        )

    def _runner_host(self) -> RunnerHost:
        return RunnerHost(
            node=self.id,
            host=self._host,
            credentials=lambda: runner_credentials(self.id, self._key),
            environment=runner_environment(environment()),
        )

    def _runner_ended(self, spec: pb.StageSpec, why: str) -> None:
        self._placements.lost(spec.placement, spec.stage, why)

    def _node_lost(self, node: NodeId, why: str) -> None:
        self._placements.lost_node(node, why)

    def _look_for_peers(self) -> None:
        for peer in self._settings.peers:
            self._cluster.dial(peer)
        if not self._settings.mdns:
            return
        announcement = Announcement(
            self.id, self._fingerprint, self.version, self._host, self._grpc_port
        )
        interfaces = None if self._settings.interface is None else [self._host]
        discovery = Discovery(announcement, interfaces, self._found)
        discovery.start()
        _ = self._stack.push_async_callback(discovery.close)

    def _found(self, candidate: Candidate) -> None:
        if candidate.cluster == self._fingerprint:
            self._cluster.dial(candidate.address, candidate.node)
        else:
            log.info(
                "node %s at %s is of another cluster (%s); to join it, start this node with that "
                "cluster's key (--cluster-key-file)",
                candidate.node,
                candidate.address,
                candidate.cluster,
            )

    async def _scan_models(self) -> None:
        known = await asyncio.to_thread(self._library.scan)
        self._models = [model for model, entry in known.items() if entry.folder is not None]
        for model, fault in self._library.broken.items():
            log.warning("model %s cannot be used: %s", model, fault)

    async def _watch_stages(self) -> None:
        """Stages on other nodes whose runners ended: their nodes' heartbeats stop naming them."""
        while True:
            await asyncio.sleep(WATCH_STAGES_S)
            if not self._cluster.is_head:
                await self._hand_over()
            expected = [
                (endpoint.node, str(record.id), stage)
                for record in self._placements.records
                if record.status == "ready"
                for stage, endpoint in enumerate(record.endpoints)
            ]
            for placement, stage in self._cluster.missing_stages(expected):
                self._placements.lost(placement, stage, "its runner ended on the other node")

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
