"""State that both sides of joining share: this node's keys and task, and the digits' rounds."""

import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from ...placement.errors import DigitsDiffer, ExoNodeError, PeerLost, Untrusted
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..cluster.cluster import Cluster
from ..cluster.node_exit import NodeExit
from ..machine.events import EventLog
from ..machine.timing import Timing
from ..rpc.control_server import PROTOCOL
from ..trust.certificates import proven_public_key
from ..trust.cluster_key import Keyring
from .duplicates import duplicate_message
from .handshake import NONCE_BYTES, Passkey, PeerIdentity, Role
from .wire import JoinConnection, Refusal, RemoteRefusal

log = logging.getLogger(__name__)

_MAX_REPORTS: Final = 256
_MAX_CHIP: Final = 100
"""Characters of the name of a chip, which a hello bounds."""


@dataclass(eq=False, repr=False)
class JoinState:
    """Mutable; used on the node's event loop only.

    A node does one task at a time: while it lets another one in, it leaves its cluster for none,
    and while it is being let in, it lets no node into the cluster that it is about to leave.
    """

    keys: Keyring
    _facts: Callable[[], pb.NodeFacts]
    members: Cluster
    ending: NodeExit
    events: EventLog
    timing: Timing

    def __post_init__(self) -> None:
        self.is_settled = not self.keys.folder.is_fresh(self.keys.fingerprint)
        """Whether this node did not found its cluster, or another one was ever let in there."""
        self.join_port = 0
        self._public_key = proven_public_key(self.keys.identity)
        self._task = ""
        self._reports: dict[tuple[str, str], None] = {}

    @property
    def node(self) -> NodeId:
        return self.keys.identity.node

    @property
    def fresh(self) -> bool:
        """Whether this node may leave its cluster for another: it founded it and is alone there."""
        return not self.is_settled and not self.members.others()

    def settle(self) -> None:
        """Keeps this node in its cluster for good, as another one is in it."""
        self.keys.folder.establish()
        self.is_settled = True

    @contextmanager
    def exclusive(self, task: str) -> Generator[None]:
        """Holds the node for one task. Raises Refusal (`busy`) while it has another."""
        if self._task or self.ending.decided:
            raise Refusal("busy", f"{self._facts().name} {self._task or 'restarts'}; try again")
        self._task = task
        try:
            yield
        finally:
            self._task = ""

    def describe_self(self) -> PeerIdentity:
        """This node's identity for one connection, with a nonce of its own."""
        facts = self._facts()
        return PeerIdentity(
            node=self.node,
            public_key=self._public_key,
            cluster=self.keys.fingerprint,
            name=facts.name,
            chip=facts.chip[:_MAX_CHIP],
            version=facts.version,
            protocol=PROTOCOL,
            address=f"{facts.host}:{facts.port}",
            fresh=self.fresh,
            nonce=secrets.token_bytes(NONCE_BYTES),
            join_port=self.join_port,
        )

    def refusal_of(self, other: PeerIdentity) -> Refusal | None:
        """The refusal of a node of another version, or with this node's id; None for others."""
        if other.protocol != PROTOCOL:
            own = self._facts()
            return Refusal(
                "protocol",
                f"{own.name} speaks protocol {PROTOCOL} (exo-node {own.version}) and "
                f"{other.name} {other.protocol} (exo-node {other.version}); install the same "
                "version on both",
            )
        if other.node == self.node:
            return Refusal("duplicate", duplicate_message(other.node))
        return None

    def is_new(self, subject: str, detail: str) -> bool:
        """Whether this is not one of the last 256 pairs, so that each is reported once."""
        is_new = (subject, detail) not in self._reports
        _ = self._reports.pop((subject, detail), None)
        self._reports[subject, detail] = None
        if len(self._reports) > _MAX_REPORTS:
            del self._reports[next(iter(self._reports))]
        return is_new

    def report_cluster(self, other: PeerIdentity, address: str) -> None:
        """Logs once for each node how a person unites its established cluster with this one."""
        if other.fresh or not self.is_new(other.cluster, other.node):
            return
        log.info(
            "%s (%s) at %s is of another cluster (%s); to have both in one, run `exo-node leave` "
            "on one of them, or give it the other's key (`exo-node join`)",
            other.name,
            other.node,
            address,
            other.cluster,
        )

    def report_refusal(self, who: str, refusal: Refusal) -> None:
        """Adds an event for each new refusal, and for every one of digits."""
        if refusal.reason == "busy":  # that passes by itself
            return
        is_new = self.is_new(who, f"{refusal.reason} {refusal.message}")
        if is_new or refusal.reason == "wrong_code":
            text = f"{who}: {refusal.message}"
            _ = self.events.add("join_refused", text, reason=refusal.reason)


@asynccontextmanager
async def refusals_sent(line: JoinConnection) -> AsyncGenerator[None]:
    """Sends a refusal or error of this side to the other one, as the last frame."""
    try:
        yield
    except RemoteRefusal:
        raise
    except Refusal as refusal:
        await line.refuse(refusal)
        raise
    except DigitsDiffer as fault:
        refusal = Refusal("wrong_code", fault.message)
        await line.refuse(refusal)
        raise refusal from fault
    except PeerLost:
        raise
    except ExoNodeError as fault:
        await line.refuse(Refusal("malformed", fault.message))
        raise


async def prove_digits(
    line: JoinConnection,
    role: Role,
    transcript: bytes,
    code: str,
    *,
    before_reveal: Callable[[], None] = lambda: None,
) -> None:
    """Returns once both sides have proven every bit of the digits.

    `before_reveal` is called before a bit may be revealed. Raises DigitsDiffer (whichever side
    noticed), Untrusted, PeerLost and RemoteRefusal.
    """
    passkey = Passkey(role, transcript, code, secrets.token_bytes)
    try:
        while (step := passkey.next) is not None:
            match step:
                case "commit":
                    await line.send(pb.JoinFrame(commitment=passkey.commit()))
                case "receive":
                    passkey.receive((await line.receive("commitment")).commitment)
                case "reveal":
                    await line.send(pb.JoinFrame(opened=passkey.reveal()))
                case "check":
                    before_reveal()
                    passkey.check((await line.receive("opened")).opened)
    except RemoteRefusal as refusal:
        if refusal.reason == "wrong_code":
            raise DigitsDiffer("the digits did not match") from refusal
        raise
    if not passkey.proven:
        raise Untrusted("the digits are not proven")
