"""Announces this node by mDNS and finds others: candidates for dialling, never more than that."""

import asyncio
import ipaddress
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf import Error as ZeroconfError
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from ..placement.ids import NodeId

log = logging.getLogger(__name__)

SERVICE = "_exo-node._tcp.local."
MAX_CANDIDATES = 64
RESOLVE_TIMEOUT_MS = 3000
_NODE = re.compile(r"[a-z2-7]{20}")
_CLUSTER = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Announcement:
    """What this node tells everybody on the network; nothing of it is secret."""

    node: NodeId
    cluster: str
    version: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """An address that may be a node of that cluster; only TLS says whether it is."""

    node: NodeId
    cluster: str
    address: str


class Discovery:
    """Runs until closed. `found` is called on the event loop, once for each address."""

    def __init__(
        self,
        announcement: Announcement,
        interfaces: list[str] | None,
        found: Callable[[Candidate], None],
    ) -> None:
        """`interfaces`: addresses to speak on; None: all."""
        self._own = announcement
        self._interfaces = interfaces
        self._found = found
        self._seen: set[Candidate] = set()
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Returns at once: registering takes over a second, and the node is ready before."""
        self._keep(asyncio.create_task(self._run()))

    async def close(self) -> None:
        """Says goodbye, so that others need not wait for a timeout."""
        for task in self._tasks:
            task.cancel()
        _ = await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._browser is not None:
            await self._browser.async_cancel()
        if self._zeroconf is not None:
            await self._zeroconf.async_unregister_all_services()
            await self._zeroconf.async_close()

    async def _run(self) -> None:
        try:
            self._zeroconf = self._open()
            self._browser = AsyncServiceBrowser(
                self._zeroconf.zeroconf, SERVICE, handlers=[self._changed]
            )
            await self._zeroconf.async_register_service(_service(self._own))
        except (OSError, ZeroconfError) as fault:
            log.warning(
                "mDNS is not possible here (%s): other nodes are found through --peer only", fault
            )

    def _open(self) -> AsyncZeroconf:
        if self._interfaces is None:
            return AsyncZeroconf(ip_version=IPVersion.V4Only)
        return AsyncZeroconf(interfaces=self._interfaces, ip_version=IPVersion.V4Only)

    def _changed(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        if state_change is ServiceStateChange.Removed:
            return  # a goodbye may be forged, and a crash sends none: heartbeats say who is gone
        self._keep(asyncio.ensure_future(self._resolve(zeroconf, name)))

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        if not await info.async_request(zeroconf, RESOLVE_TIMEOUT_MS):
            return
        for candidate in candidates(info, self._own.node):
            if candidate in self._seen or len(self._seen) >= MAX_CANDIDATES:
                continue
            self._seen.add(candidate)
            self._found(candidate)

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def candidates(info: AsyncServiceInfo, own: NodeId) -> list[Candidate]:
    """What a resolved service offers; nothing where its text is not that of another node."""
    properties = info.decoded_properties
    node, cluster = properties.get("id") or "", properties.get("cluster") or ""
    if not _NODE.fullmatch(node) or not _CLUSTER.fullmatch(cluster) or node == own:
        return []
    addresses = info.parsed_addresses(IPVersion.V4Only)
    return [
        Candidate(NodeId(node), cluster, f"{address}:{info.port}")
        for address in addresses
        if info.port and _is_near(address)
    ]


def _is_near(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return parsed.is_private or parsed.is_loopback or parsed.is_link_local


def _service(own: Announcement) -> AsyncServiceInfo:
    text = {"id": own.node, "cluster": own.cluster, "version": own.version, "protocol": "1"}
    return AsyncServiceInfo(
        SERVICE,
        f"{own.node}.{SERVICE}",
        port=own.port,
        parsed_addresses=[own.host],
        properties=text,
        server=f"{own.node}.local.",
    )
