"""The join port's connections: TLS 1.3 in which both sides show a certificate, and frames on it.

No node is trusted here. TLS proves that the other side holds the key of its certificate, and that
only that side reads the frames.
"""

import asyncio
import hmac
import re
import ssl
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from ...placement.errors import ExoNodeError, InvalidSettings, JoinRefused, PeerLost, Untrusted
from ...proto import peer_pb2 as pb
from ...proto.framing import HEAD_BYTES, body_bytes, framed
from ..machine.tasks import cancel
from ..machine.timing import Timing
from ..trust.certificates import (
    Credentials,
    JoinHint,
    ProvenIdentity,
    clock_trouble,
    cluster_fingerprint,
    join_hint,
    proven_by,
    vouch,
    vouched_cluster,
)
from ..trust.keys import ClusterKey, parse_cluster_key
from .handshake import NONCE_BYTES, PeerIdentity, Reason

FRAME_BYTES: Final = 16 * 1024
_HELLO_FIELDS: Final = (
    *("cluster", "name", "chip", "version", "protocol", "address"),
    *("fresh", "nonce", "join_port"),
)
"""The fields of PeerIdentity that a hello carries under the same names."""
_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.]{2,64}\]|[A-Za-z0-9_.-]{1,253}):([0-9]{1,5})")
_OFF_TODAY: Final = "its certificate is not valid today: compare the clocks of both machines"
_REFUSED_TODAY: Final = (
    "it refused this node's certificate, as it does where its clock is wrong: compare the clocks "
    "of both machines"
)
# A part of OpenSSL's error, and its meaning for a person.
_HANDSHAKE_FAULTS: Final = (
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "it showed no certificate"),
    ("CERTIFICATE_HAS_EXPIRED", _OFF_TODAY),
    ("CERTIFICATE_IS_NOT_YET_VALID", _OFF_TODAY),
    ("ALERT_CERTIFICATE_EXPIRED", _REFUSED_TODAY),
    ("ALERT_BAD_CERTIFICATE", _REFUSED_TODAY),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not one that exo-node issues"),
    ("HTTP_REQUEST", "it does not speak TLS"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS"),
    ("UNSUPPORTED_PROTOCOL", "it does not speak TLS 1.3"),
)


class Refusal(JoinRefused):
    """The reason why one side ends a join; the last frame of a connection."""

    def __init__(self, reason: Reason | str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RemoteRefusal(Refusal):
    """A refusal that the other side sent."""


def tls_contexts(credentials: Credentials, folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Returns the contexts of the server and the client side; both demand a certificate.

    `folder` holds the private key for a moment, because ssl reads files only.
    """
    contexts = (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    with tempfile.TemporaryDirectory(dir=folder) as private:
        pair = Path(private, "pair.pem")
        _ = pair.write_bytes(credentials.key_pem + credentials.certificate_pem)
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=credentials.authority_pem.decode())
            context.load_cert_chain(pair)
    contexts[0].num_tickets = 0  # no resumption: each connection proves its key
    return contexts


class JoinConnection:
    """A connection after its handshake."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timing: Timing
    ) -> None:
        """Raises Untrusted for a certificate of another key."""
        self._reader = reader
        self._writer = writer
        self.timing = timing
        tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
        self.peer: ProvenIdentity = proven_by(tls.getpeercert(binary_form=True) or b"")
        self.address: str = writer.get_extra_info("peername")[0]
        self._body_size: int | None = None
        """The size of the frame whose head was read; None between two frames."""
        self.waits = False
        """Whether a person is, or was, waited for: PendingRequests counts it, not the port."""

    async def send(self, frame: pb.JoinFrame) -> None:
        """Sends a frame. Raises PeerLost."""
        body = frame.SerializeToString()
        try:
            async with asyncio.timeout(self.timing.reply_s):
                self._writer.write(framed(body))
                await self._writer.drain()
        except (OSError, TimeoutError) as fault:
            raise _no_answer(self.address) from fault

    async def receive(
        self, kind: str, within_s: float | None = None, *, person: bool = False
    ) -> pb.JoinFrame:
        """Returns the next frame that is no sign of life, which must be of that kind.

        It must come within `within_s`, by default `reply_s`; for a `person`, as long as signs of
        life come. Raises RemoteRefusal, PeerLost where none comes, Untrusted for another kind.
        """
        try:
            async with asyncio.timeout(None if person else within_s or self.timing.reply_s):
                while (frame := await self.next(self.timing.silence_s)).WhichOneof(
                    "frame"
                ) == "waiting":
                    pass
        except TimeoutError as fault:
            raise _no_answer(self.address) from fault
        if (actual := frame.WhichOneof("frame")) != kind:
            raise Untrusted(f"{self.address} sent {actual or 'nothing'} instead of {kind}")
        return frame

    async def next(self, within_s: float) -> pb.JoinFrame:
        """Returns the next frame of any kind but a refusal. Raises as `receive`."""
        try:
            async with asyncio.timeout(within_s):
                # A cancel may come between the two reads, and another call continues.
                if self._body_size is None:
                    self._body_size = body_bytes(await self._reader.readexactly(HEAD_BYTES))
                if (size := self._body_size) > FRAME_BYTES:
                    raise Untrusted(f"{self.address} sent a frame of {size} bytes to the join port")
                body = await self._reader.readexactly(size)
                self._body_size = None
        except ssl.SSLError as fault:
            raise Untrusted(f"{self.address}: {_explain(fault)}") from fault
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as fault:
            raise _no_answer(self.address) from fault
        try:
            frame = pb.JoinFrame.FromString(body)
        except DecodeError as fault:
            raise Untrusted(f"{self.address} sent bytes that are no frame") from fault
        if frame.WhichOneof("frame") == "refused":
            refusal = frame.refused
            raise RemoteRefusal(refusal.reason[:32], refusal.message[:500])
        return frame

    async def refuse(self, refusal: Refusal) -> None:
        """Sends a refusal as the last frame, if the other side is still connected."""
        frame = pb.JoinRefused(reason=refusal.reason, message=refusal.message)
        try:
            await self.send(pb.JoinFrame(refused=frame))
        except PeerLost:
            return  # it is refused either way

    @asynccontextmanager
    async def keep_alive(self) -> AsyncGenerator[None]:
        """Sends signs of life, every two seconds, while this side waits for a person."""
        self.waits = True
        sending = asyncio.create_task(self._send_signs_of_life())
        try:
            yield
        finally:
            await cancel([sending])

    async def _send_signs_of_life(self) -> None:
        """Ends by an error with the connection; the task that reads notices the loss."""
        while True:
            await asyncio.sleep(self.timing.keep_alive_s)
            await self.send(pb.JoinFrame(waiting=pb.JoinWaiting()))

    async def close(self) -> None:
        """Closes the connection; a caller that is cancelled meanwhile leaves no socket open."""
        self._writer.close()
        try:
            async with asyncio.timeout(self.timing.reply_s):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            return  # the other side does not end it
        finally:
            self._writer.transport.abort()


@asynccontextmanager
async def connect(
    address: str, context: ssl.SSLContext, timing: Timing
) -> AsyncGenerator[JoinConnection]:
    """Connects to a join port. Raises PeerLost and Untrusted."""
    host, port = split(address)
    try:
        async with asyncio.timeout(timing.reply_s):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=context, limit=FRAME_BYTES
            )
    except ssl.SSLError as fault:
        raise Untrusted(f"{address}: {_explain(fault)}") from fault
    except (OSError, TimeoutError) as fault:
        raise _no_answer(address) from fault
    try:
        line = JoinConnection(reader, writer, timing)
    except Untrusted:
        writer.transport.abort()
        raise
    try:
        yield line
    finally:
        await line.close()


async def ask_for_hint(address: str, timing: Timing) -> JoinHint | None:
    """Reads the certificate of the control server at `address`; see JoinHint. Raises PeerLost.

    The server sends it before it refuses a caller without one.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, port = split(address)
    try:
        async with asyncio.timeout(timing.reply_s):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except (OSError, TimeoutError) as fault:
        raise _no_answer(address) from fault
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    certificate = tls.getpeercert(binary_form=True)
    writer.transport.abort()
    return None if certificate is None else join_hint(certificate)


def hello(own: PeerIdentity, cluster: ClusterKey) -> pb.JoinFrame:
    """This side's first frame, with a signature by the cluster's key."""
    authority, voucher = vouch(cluster, own.public_key)
    fields = {name: getattr(own, name) for name in _HELLO_FIELDS}
    return pb.JoinFrame(hello=pb.JoinHello(**fields, authority=authority, voucher=voucher))


def party_of(message: pb.JoinHello, proven: ProvenIdentity) -> PeerIdentity:
    """The other side by its hello, whose texts must be bounded and printable. Raises Untrusted."""
    texts = (message.name, message.chip, message.version)
    plain = all(text.isprintable() and len(text.encode()) <= 128 for text in texts)
    if not plain or not _ADDRESS.fullmatch(message.address) or len(message.nonce) != NONCE_BYTES:
        raise Untrusted(f"node {proven.node} describes itself in a way that exo-node does not")
    if vouched_cluster(message.authority, message.voucher, proven.public_key) != message.cluster:
        raise Untrusted(
            f"node {proven.node} does not prove that it is of cluster {message.cluster!r}"
        )
    fields: dict[str, Any] = {name: getattr(message, name) for name in _HELLO_FIELDS}
    fields["name"] = message.name or proven.node
    fields["join_port"] = message.join_port if message.join_port <= 65535 else 0
    return PeerIdentity(proven.node, proven.public_key, **fields)


def key_of(approver: PeerIdentity, text: str) -> ClusterKey:
    """Parses the key, which must be the one of the approver's cluster. Raises Untrusted."""
    wrong = Untrusted(f"{approver.name} sent a key that is not its cluster's")
    try:
        key = parse_cluster_key(text, "the approval")
    except InvalidSettings:
        raise wrong from None
    if not hmac.compare_digest(cluster_fingerprint(key), approver.cluster):
        raise wrong
    return key


def why_no_handshake(fault: Exception) -> str:
    """The cause of a caller's failed handshake, for a person."""
    if isinstance(fault, ssl.SSLError):
        return _explain(fault)
    return clock_trouble(datetime.now(UTC)) or (
        "it ended the connection before it had said who it is; if it does so again, compare the "
        "clocks of both machines"
    )


def join_address(host: str, port: int) -> str:
    """Joins host and port, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Splits HOST:PORT, and drops the brackets of IPv6. Raises PeerLost for any other text."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise PeerLost(f"{address[:80]} is no address; give HOST:PORT")
    return match[1].strip("[]"), int(match[2])


def _explain(fault: ssl.SSLError) -> str:
    text = f"{fault.reason or ''} {fault}".upper().replace(" ", "_")
    if "CERTIFICATE" in text and (clock := clock_trouble(datetime.now(UTC))):
        return clock
    default = f"TLS failed ({fault.reason})"
    return next((meaning for sign, meaning in _HANDSHAKE_FAULTS if sign in text), default)


def _no_answer(address: str) -> ExoNodeError:
    return PeerLost(f"{address} does not answer on its join port")
