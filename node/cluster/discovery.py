"""Announces this node by mDNS and finds others: candidates for dialling, never more than that.

Any machine on the network can announce anything, so announcements are bounded, checked and used
only as addresses to try. IPv4 only, like the addresses that nodes announce.
"""

import asyncio
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Final, cast

from zeroconf import (
    DNSOutgoing,  # pyright: ignore[reportPrivateImportUsage]
    DNSQuestion,  # pyright: ignore[reportPrivateImportUsage]
    IPVersion,
    ServiceStateChange,
    Zeroconf,
)
from zeroconf import Error as ZeroconfError
from zeroconf import current_time_millis as zeroconf_now
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from ...placement.ids import NodeId
from ..machine.tasks import Loops, background, cancel
from ..machine.timing import Timing

log = logging.getLogger(__name__)

SERVICE = "_exo-node._tcp.local."
MAX_CANDIDATES = 64
"""Candidates of this cluster, and as many of other clusters; more are ignored."""

_MAX_RESOLVING = 64
_ASK_AGAIN_S: Final = 1.2
"""RFC 6762: a responder does not repeat an answer within a second."""
_QUERY, _SRV, _IN = 0, 33, 1
"""RFC 1035 and 2782: flags of a question, the type that every service has, and the class."""
_NODE = re.compile(r"[a-z2-7]{20}")
_CLUSTER = re.compile(r"[0-9a-f]{16}")
_PORT = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Announcement:
    """The facts that this node announces on the network; none of them is secret."""

    node: NodeId
    cluster: str
    version: str
    host: str
    port: int
    join_port: int | None = None


@dataclass(frozen=True, slots=True)
class DiscoveredPeer:
    """An address that may be a node of that cluster; only TLS shows whether it is.

    One with this node's own id is a second process with its data folder, or pretends to be.
    """

    node: NodeId
    cluster: str
    address: str
    join_address: str | None = None


@dataclass(eq=False, repr=False)
class Discovery:
    """Runs until closed. `report` is called on the event loop, once for each address.

    An address is not reported again when its node comes back: the dialler keeps trying it.
    """

    _own: Announcement
    _interfaces: list[str] | None
    """IPv4 addresses to use, or None for all, also those that appear later."""
    _report: Callable[[DiscoveredPeer], None]
    _timing: Timing

    def __post_init__(self) -> None:
        self.failure: str | None = None
        """Why mDNS does not work now; also logged. The node still dials each `--peer`."""
        self.ignored = 0
        """Announcements that were malformed or over a limit."""
        self._service = _service(self._own)
        self._seen: set[DiscoveredPeer] = set()
        self._zeroconf: Zeroconf | None = None
        """While it listens."""
        self._echo = asyncio.Event()
        self._settled = asyncio.Event()
        self._again = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, loops: Loops) -> None:
        """Returns at once: registering takes over a second, and the node is ready before."""
        self._keep(loops.keep(self._run, "the search by mDNS"))

    def announce_again(self, announcement: Announcement) -> None:
        """Opens new sockets and announces this node by them, as at its start."""
        self._own = announcement
        self._again.set()

    async def settled(self) -> str | None:
        """Waits until the first announcement was received or failed; returns `failure`."""
        _ = await self._settled.wait()
        return self.failure

    async def answering(self, nodes: Collection[NodeId]) -> frozenset[NodeId]:
        """The nodes of `nodes` that answer a question by multicast within `patience_s`.

        What they announced before does not count: that is remembered for over an hour.
        """
        if (zeroconf := self._zeroconf) is None:
            return frozenset()
        names = {node: f"{node}.{SERVICE}" for node in nodes}
        started_ms, missing = zeroconf_now(), set(names)
        for patience_s in (_ASK_AGAIN_S, self._timing.patience_s):
            _ask(zeroconf, [names[node] for node in missing])
            with suppress(TimeoutError):  # the nodes that did not answer stay in `missing`
                async with asyncio.timeout(patience_s):
                    while missing := {
                        n for n in missing if not _is_newer(zeroconf, names[n], started_ms)
                    }:
                        await zeroconf.async_wait(1000 * patience_s)
            if not missing:
                break
        return frozenset(names) - missing

    async def close(self) -> None:
        """Withdraws the announcement, so that others need not wait for a timeout."""
        await cancel(self._tasks)

    async def _run(self) -> None:
        """Tries again where mDNS is impossible: a cable may be plugged in later."""
        while True:
            try:
                async with AsyncExitStack() as stack:
                    zeroconf = await self._announce(stack)
                    self.failure, self._zeroconf = None, zeroconf.zeroconf
                    self._settled.set()
                    await self._follow_interfaces(zeroconf)
                continue
            except (OSError, ZeroconfError) as fault:
                self._fail(str(fault) or type(fault).__name__)
            finally:
                self._zeroconf = None
            await asyncio.sleep(self._timing.rescan_s)

    async def _announce(self, stack: AsyncExitStack) -> AsyncZeroconf:
        """Browses and registers; what it opened closes with the stack. Raises OSError."""
        zeroconf = self._open()
        _ = stack.push_async_callback(zeroconf.async_close)
        # zeroconf cannot close any more once a wait for its start was cancelled: its sockets leak.
        await asyncio.shield(zeroconf.zeroconf.async_wait_for_start())
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[self._changed])
        _ = stack.push_async_callback(browser.async_cancel)
        self._echo.clear()
        self._again.clear()
        self._service = _service(self._own)
        own_name = self._service.name
        # This node announces itself even where the name is taken: TXT and TLS identify it.
        register = zeroconf.async_register_service  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        registered = cast(Awaitable[object], await register(self._service, allow_name_change=True))
        _ = await registered
        if self._service.name != own_name:
            log.warning(
                "another node announces the id %s: if this data folder is a copy, remove node.key "
                "from it and start again",
                self._own.node,
            )
        try:
            async with asyncio.timeout(self._timing.reply_s):
                _ = await self._echo.wait()
        except TimeoutError as fault:
            raise OSError("this node does not hear its own multicast packets") from fault
        return zeroconf

    def _open(self) -> AsyncZeroconf:
        try:
            if self._interfaces is None:
                return AsyncZeroconf(ip_version=IPVersion.V4Only)
            return AsyncZeroconf(interfaces=self._interfaces, ip_version=IPVersion.V4Only)
        except RuntimeError as fault:  # what zeroconf raises where no interface is up
            raise OSError(str(fault)) from fault

    async def _follow_interfaces(self, zeroconf: AsyncZeroconf) -> None:
        """Returns when this node has to be announced again."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timing.rescan_s):
                    _ = await self._again.wait()
                    return
            if self._interfaces is None:
                await zeroconf.async_update_interfaces()

    def _fail(self, reason: str) -> None:
        if self.failure != reason:
            log.warning(
                "mDNS does not work here (%s): other nodes are found through --peer only", reason
            )
        self.failure = reason
        self._settled.set()

    def _changed(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        if state_change is ServiceStateChange.Removed:
            return  # a goodbye may be forged, and a crash sends none: heartbeats decide
        if name == self._service.name:
            return self._echo.set()
        info = AsyncServiceInfo(SERVICE, name)
        if info.load_from_cache(zeroconf):  # an announcement carries all records in one packet
            self._judge(info)
        elif len(self._tasks) > _MAX_RESOLVING:
            self._ignore()
        else:
            self._keep(background(self._resolve(zeroconf, info), "a lookup by mDNS"))

    async def _resolve(self, zeroconf: Zeroconf, info: AsyncServiceInfo) -> None:
        if await info.async_request(zeroconf, 1000 * self._timing.patience_s):
            self._judge(info)
        else:
            self._ignore()

    def _judge(self, info: AsyncServiceInfo) -> None:
        offered = candidates(info, self._own)
        if offered is None:
            return self._ignore()
        for candidate in offered:
            self._offer(candidate)

    def _offer(self, candidate: DiscoveredPeer) -> None:
        if candidate in self._seen:
            return
        # Counted apart, so that a large network of other clusters cannot hide this one.
        ours = candidate.cluster == self._own.cluster
        alike = sum((other.cluster == self._own.cluster) == ours for other in self._seen)
        if alike >= MAX_CANDIDATES:
            return self._ignore()
        self._seen.add(candidate)
        self._report(candidate)

    def _ignore(self) -> None:
        self.ignored += 1
        log.debug("%d announcements were malformed or too many", self.ignored)

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _ask(zeroconf: Zeroconf, names: Collection[str]) -> None:
    question = DNSOutgoing(_QUERY)
    for name in names:
        question.add_question(DNSQuestion(name, _SRV, _IN))
    zeroconf.async_send(question)


def _is_newer(zeroconf: Zeroconf, name: str, since_ms: float) -> bool:
    """Whether the name's record was received at that time or later."""
    record = zeroconf.cache.get_by_details(name, _SRV, _IN)
    return record is not None and record.created >= since_ms


def candidates(info: AsyncServiceInfo, own: Announcement) -> list[DiscoveredPeer] | None:
    """The candidates in a resolved service; None for one that exo-node does not announce."""
    node, cluster = _text(info, b"id"), _text(info, b"cluster")
    if not _NODE.fullmatch(node) or not _CLUSTER.fullmatch(cluster) or not info.port:
        return None
    addresses = [a for a in info.parsed_addresses(IPVersion.V4Only) if _is_near(a, own.host)]
    if node == own.node:
        addresses = [a for a in addresses if (a, info.port) != (own.host, own.port)]
        if not addresses:
            return []
    join_port = _join_port(info)
    # A node announces one address: a few allow for its old one, many would be a scan.
    return [
        DiscoveredPeer(
            NodeId(node),
            cluster,
            f"{address}:{info.port}",
            None if join_port is None else f"{address}:{join_port}",
        )
        for address in addresses[:4]
    ] or None


def _join_port(info: AsyncServiceInfo) -> int | None:
    text = _text(info, b"join")
    return int(text) if _PORT.fullmatch(text) and 0 < int(text) <= 65535 else None


def _text(info: AsyncServiceInfo, key: bytes) -> str:
    return (info.properties.get(key) or b"").decode("ascii", "replace")


def _is_near(address: str, own_host: str) -> bool:
    """Whether a node may listen there: not on the Internet; on loopback if this one does."""
    parsed = ipaddress.ip_address(address)
    if parsed.is_loopback:
        return ipaddress.ip_address(own_host).is_loopback
    return parsed.is_private and not (parsed.is_unspecified or parsed.is_reserved)


def _service(own: Announcement) -> AsyncServiceInfo:
    text = {"id": own.node, "cluster": own.cluster, "version": own.version, "protocol": "1"}
    if own.join_port is not None:
        text["join"] = str(own.join_port)
    return AsyncServiceInfo(
        SERVICE,
        f"{own.node}.{SERVICE}",
        port=own.port,
        parsed_addresses=[own.host],
        properties=text,
        server=f"{own.node}.local.",
    )
