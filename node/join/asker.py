"""The joining node's side: calls other clusters, shows digits, and takes the key of one.

`calls.py` decides which addresses are called, when, and which cluster is asked.
"""

import asyncio
import logging
import secrets
import ssl
import time
from functools import partial
from typing import Final

from ...placement.errors import (
    DuplicateIdentity,
    ExoNodeError,
    InvalidSettings,
    PeerLost,
    Untrusted,
)
from ...proto import peer_pb2 as pb
from ..cluster.node_exit import RestartWithKey
from ..machine.log import terminal
from ..machine.tasks import Loops, cancel
from .calls import CallState, JoinApplication
from .handshake import PeerIdentity, new_code, spaced, transcript
from .requests import GuessLimit
from .state import JoinState, prove_digits, refusals_sent
from .wire import JoinConnection, Refusal, connect, hello, key_of, party_of

log = logging.getLogger(__name__)

_MAX_PEERS: Final = 32


class Asker:
    """Asks every cluster that it sees, while this node is fresh; the digits decide on one."""

    def __init__(self, state: JoinState, tls: ssl.SSLContext, loops: Loops) -> None:
        self._state = state
        self._tls = tls
        self._loops = loops
        self._timing = state.timing
        self._code = new_code(secrets.randbelow)
        self.failure = ""
        """Why the previous digits did not let this node in."""
        self._guess_limit = GuessLimit()
        self.calls = CallState(state.timing, closed=state.keys.folder.left_clusters())
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def discover(self, address: str) -> None:
        """Calls a join port (host:port) that may be of another cluster, unless it is called."""
        self.calls.discover(address, time.monotonic())
        self._update_tasks()

    def settle(self) -> None:
        """Withdraws from all clusters: this node does not leave its own any more."""
        self.calls.settle()
        self._update_tasks()

    async def close(self) -> None:
        await cancel(self._tasks.values())

    @property
    def code(self) -> str | None:
        """The digits that this node shows; None while it asks no cluster."""
        return self._code if self.calls.applications() else None

    def _update_tasks(self) -> None:
        """Starts and cancels tasks, so that each called address has one."""
        for address in self._tasks.keys() - self.calls.calls.keys():
            _ = self._tasks.pop(address).cancel()
        for address in self.calls.calls.keys() - self._tasks.keys():
            work = partial(self._call_repeatedly, address)
            self._tasks[address] = self._loops.keep(work, f"asking {address}")

    async def _call_repeatedly(self, address: str) -> None:
        while (call := self.calls.calls.get(address)) is not None:
            await asyncio.sleep(call.delay_s)
            try:
                refusal = await self._call(address)
            except Exception:  # a defect: `Loops` reports it and calls again
                self._end(address, None)
                raise
            self._end(address, refusal)

    def _end(self, address: str, refusal: str | None) -> None:
        self.calls.end(address, refusal, time.monotonic())
        self._update_tasks()

    async def _call(self, address: str) -> str | None:
        """Makes one connection; returns the `refusal` of `CallState.end`."""
        try:
            async with connect(address, self._tls, self._timing) as line, refusals_sent(line):
                await self._converse(line, address)
        except Refusal as refusal:
            self._state.report_refusal(address, refusal)
            if refusal.reason == "duplicate":
                self._state.ending.give_up(DuplicateIdentity(refusal.message))
            return refusal.reason
        except Untrusted as fault:
            self._state.report_refusal(address, Refusal("malformed", fault.message))
            return None
        except PeerLost:
            return None
        return ""

    async def _converse(self, line: JoinConnection, address: str) -> None:
        own = self._state.describe_self()
        await line.send(hello(own, self._state.keys.cluster))
        other = party_of((await line.receive("hello")).hello, line.peer)
        if (refusal := self._state.refusal_of(other)) is not None:
            raise refusal
        match self.calls.greet(address, own, other, time.time()):
            case "dial":
                self._state.members.dial(other.address)
            case "report":
                self._state.report_cluster(other, address)
            case JoinApplication() as application:
                await self._ask_by_digits(line, own, application)
            case None:
                pass

    async def _ask_by_digits(
        self, line: JoinConnection, own: PeerIdentity, application: JoinApplication
    ) -> None:
        other = application.approver
        await line.send(pb.JoinFrame(ask=pb.JoinAsk()))
        if (await line.next(self._timing.reply_s)).WhichOneof("frame") != "waiting":
            raise Untrusted(f"{line.address} does not say that this node may ask")
        self._show_digits(application)
        async with line.keep_alive():
            _ = await line.receive("begin", person=True)
        if wait := self._guess_limit.wait_s(line.address, time.monotonic()):
            text = f"{own.name} was tried with digits too often; try again in {wait:.0f} s"
            raise Refusal("too_many", text)
        with self._state.exclusive("is being let in elsewhere"):
            code, self._code = self._code, new_code(secrets.randbelow)
            try:
                await prove_digits(line, "joiner", transcript(own, other), code)
            except (ExoNodeError, asyncio.CancelledError):
                self._report_mismatch(application)
                raise
            await self._take_key(line, own, other)

    async def _take_key(self, line: JoinConnection, own: PeerIdentity, other: PeerIdentity) -> None:
        """Stores the cluster key that `other` sends after it has proven itself, and restarts."""
        if not self._state.fresh:
            raise Refusal("busy", f"{own.name} has company in its cluster now")
        approved = (await line.receive("approved")).approved
        key = key_of(other, approved.key)
        try:
            _ = await asyncio.to_thread(self._state.keys.folder.take, key)
        except InvalidSettings as fault:
            raise Refusal("malformed", f"the node cannot store the key: {fault.message}") from fault
        try:
            await line.send(pb.JoinFrame(stored=pb.JoinStored()))
        finally:  # the key is on the disk, whether or not the other side learns it
            text = f"this node joins the cluster of {other.name} ({other.cluster})"
            _ = self._state.events.add("join_approved", text, node=other.node)
            peers = (other.address, *approved.peers[:_MAX_PEERS])
            self._state.ending.decide(RestartWithKey(tuple(dict.fromkeys(peers))))

    def _show_digits(self, application: JoinApplication) -> None:
        """Logs the digits on this terminal; never in the events, which other nodes receive."""
        other, code = application.approver, spaced(self._code)
        where = f"{other.name} at {application.address} (cluster {other.cluster})"
        if self._state.is_new(where, ""):
            _ = self._state.events.add(
                "join_requested",
                f"this node asks to join the cluster of {where}; its terminal, `exo-node nodes` on "
                "it and its dashboard show the digits that let it in",
                node=other.node,
            )
        if self._state.is_new(where, self._code) and terminal() is None:
            log.warning(
                "this node, %s, shows %s: to let it into the cluster of %s, run there, or on "
                "another node of that cluster, `exo-node approve %s`. Where several ask, compare "
                "the id",
                self._state.node,
                code,
                where,
                code,
            )

    def _report_mismatch(self, application: JoinApplication) -> None:
        other = application.approver
        self.failure = (
            f"the digits that were given at {other.name} ({application.address}, cluster "
            f"{other.cluster}) did not match those of this node, so it did not join; it shows new "
            "ones. If they were typed as shown, somebody is between the two nodes"
        )
        _ = self._state.events.add(
            "join_refused", self.failure, node=other.node, reason="wrong_code"
        )
        for each in self.calls.applications():
            self._show_digits(each)
