"""What both sides of joining share: who this node is, what it is doing, the digits' rounds."""

import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from ...placement.errors import DigitsDiffer, ExoNodeError, PeerLost, Untrusted
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..cluster.change_log import LogOnce
from ..cluster.cluster import Cluster
from ..cluster.node_exit import NodeExit
from ..machine.events import EventLog
from ..machine.timing import JoinTiming
from ..rpc.control_server import PROTOCOL
from ..trust.certificates import cluster_fingerprint, proven_public_key
from ..trust.cluster_key import KeyFolder
from ..trust.keys import ClusterKey, Identity
from .duplicates import duplicate
from .handshake import NONCE_BYTES, Passkey, PeerIdentity, Role
from .open_proof import SECRET_BYTES, SameName
from .wire import JoinConnection, Refusal, Refused

log = logging.getLogger(__name__)

_QUIET: Final = ("not_yet", "busy")


@dataclass(frozen=True, slots=True)
class About:
    """This node as it describes itself to others."""

    name: str
    chip: str
    version: str
    address: str


class JoinState:
    """Mutable; used on the node's event loop only.

    A node does one thing at a time: while it lets somebody in, its cluster is not left for another,
    and while it is being let in, nobody is let into the cluster that it is about to leave.
    """

    def __init__(
        self,
        identity: Identity,
        key: ClusterKey,
        folder: KeyFolder,
        about: Callable[[], About],
        members: Cluster,
        ending: NodeExit,
        events: EventLog,
        timing: JoinTiming,
        *,
        open_name: str | None,
    ) -> None:
        self.identity = identity
        self.key = key
        self.fingerprint = cluster_fingerprint(key)
        self.folder = folder
        self.members = members
        self.ending = ending
        self.events = events
        self.timing = timing
        self.open_name = open_name
        self.founded = folder.is_fresh(self.fingerprint)
        """Whether this node founded its cluster, and nobody was ever let in or met there."""
        self.left = folder.left()
        self.told = LogOnce()
        self.join_port = 0
        self._public_key = proven_public_key(identity)
        self._about = about
        self._deed = ""

    @property
    def node(self) -> NodeId:
        return self.identity.node

    @property
    def fresh(self) -> bool:
        """Whether this node may leave its cluster for another: it founded it and is alone there."""
        return self.founded and not self.members.others()

    @contextmanager
    def doing(self, deed: str) -> Generator[None]:
        """Raises Refusal (`busy`) while another thing is done."""
        if self._deed or self.ending.decided:
            raise Refusal("busy", f"{self._about().name} {self._deed or 'restarts'}; try again")
        self._deed = deed
        try:
            yield
        finally:
            self._deed = ""

    def own(self) -> PeerIdentity:
        """As this node describes itself on one connection."""
        about = self._about()
        return PeerIdentity(
            node=self.node,
            public_key=self._public_key,
            cluster=self.fingerprint,
            name=about.name,
            chip=about.chip,
            version=about.version,
            protocol=PROTOCOL,
            address=about.address,
            fresh=self.fresh,
            open=self.open_name is not None,
            nonce=secrets.token_bytes(NONCE_BYTES),
            join_port=self.join_port,
        )

    def same_name(self, role: Role, said: bytes) -> SameName:
        """This side of one exchange about --open's name."""
        assert self.open_name is not None, "an open node has a name"
        return SameName(role, said, self.open_name, secrets.token_bytes(SECRET_BYTES))

    def unfit(self, other: PeerIdentity) -> Refusal | None:
        if other.protocol != PROTOCOL:
            about = self._about()
            return Refusal(
                "protocol",
                f"{about.name} speaks protocol {PROTOCOL} (exo-node {about.version}) and "
                f"{other.name} {other.protocol} (exo-node {other.version}); install the same "
                "version on both",
            )
        return Refusal("duplicate", duplicate(other.node)) if other.node == self.node else None

    def met(self, other: PeerIdentity, address: str) -> None:
        if other.fresh or not self.told.is_new(other.cluster, other.node):
            return
        log.info(
            "%s (%s) at %s is of another cluster (%s); to have both in one, run `exo-node leave` "
            "on one of them, or give it the other's key (`exo-node join`)",
            other.name,
            other.node,
            address,
            other.cluster,
        )

    def refused(self, who: str, refusal: Refusal) -> None:
        known = f"{refusal.reason} {refusal.message}"
        always = refusal.reason == "wrong_code"
        if refusal.reason not in _QUIET and (self.told.is_new(who, known) or always):
            text = f"{who}: {refusal.message}"
            _ = self.events.add("join_refused", text, reason=refusal.reason)


@asynccontextmanager
async def refusals_told(line: JoinConnection) -> AsyncGenerator[None]:
    """What this side refuses is the last thing that the other one hears."""
    try:
        yield
    except Refused:
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
    used: Callable[[], None] = lambda: None,
) -> None:
    """Returns once both sides have proven every bit of the digits.

    `used` is called before the first bit may be told.

    Raises DigitsDiffer, whichever side noticed, Untrusted, PeerLost and Refused.
    """
    passkey = Passkey(role, transcript, code, secrets.token_bytes)
    try:
        while (step := passkey.next) is not None:
            match step:
                case "commit":
                    await line.send(pb.JoinFrame(commitment=passkey.commit()))
                case "meet":
                    passkey.meet((await line.receive("commitment")).commitment)
                case "reveal":
                    await line.send(pb.JoinFrame(opened=passkey.reveal()))
                case "check":
                    used()
                    passkey.check((await line.receive("opened")).opened)
    except Refused as refused:
        if refused.reason == "wrong_code":
            raise DigitsDiffer("the digits did not match") from refused
        raise
    if not passkey.proven:
        raise Untrusted("the digits are not proven")
