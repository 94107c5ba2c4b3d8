"""The rules of joining: who asks whom, what both commit to, and the digits that both show. Pure.

    joiner                                     approver
      hello with a commitment     ------>
                                  <------      hello with a commitment; that it may ask
      its nonce                   ------>      holds it against the commitment
      holds it against the other  <------      its nonce
      shows the digits, confirms  ------>      shows the digits
                                  <------      the cluster key, once a person approved

Both have fixed their key and nonce before they see the other's nonce. So whoever sits between two
nodes with keys of its own cannot search for values that make the two screens agree. It can only
make many codes with each and hope for two that are the same, one chance in a million a pair, and
`node/join_requests.py` bounds how many. The scheme is that of numeric comparison in Bluetooth, with
a commitment from both sides.
"""

import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Literal

from ..placement.errors import InvalidRequest, Untrusted
from ..placement.ids import NodeId

NONCE_BYTES = 32
CODE_DIGITS = 6

Role = Literal["joiner", "approver"]
Relation = Literal["same", "ask", "asked", "apart"]
Reason = Literal[
    "denied",
    "expired",
    "wrong_code",
    "too_many",
    "not_yet",
    "elsewhere",
    "not_asked",
    "protocol",
    "duplicate",
    "malformed",
]
"""Why a request ends without a key; `not_yet`, `elsewhere` and `too_many` are worth another try."""


@dataclass(frozen=True, slots=True)
class Party:
    """A node as it describes itself; only the node id and its public key are proven, by TLS."""

    node: NodeId
    public_key: bytes
    """DER, of the certificate that this connection showed."""
    cluster: str
    name: str
    chip: str
    version: str
    protocol: int
    address: str
    """host:port of its control server."""
    fresh: bool
    """Alone in a cluster that it founded itself, and never approved."""
    open: bool
    join_port: int = 0
    """0: unknown. An address to try like mDNS's, so no part of what the digits vouch for."""


def relation(own: Party, other: Party) -> Relation:
    """What the two are to each other: both sides come to the opposite result.

    A fresh node asks an established cluster; of two fresh ones the larger id asks the smaller. Two
    established clusters stay apart, unless both are open: then the larger fingerprint dissolves.
    """
    if own.cluster == other.cluster:
        return "same"
    if own.fresh != other.fresh:
        return "ask" if own.fresh else "asked"
    if own.fresh:
        return "ask" if other.node < own.node else "asked"
    if own.open and other.open:
        return "ask" if other.cluster < own.cluster else "asked"
    return "apart"


def commitment(role: Role, public_key: bytes, nonce: bytes) -> bytes:
    """Role and key are part of it, so that nobody can pass another's off as their own."""
    return _digest(b"exo-node join commitment v1", role.encode(), public_key, nonce)


def transcript(joiner: Party, approver: Party, joiner_nonce: bytes, approver_nonce: bytes) -> bytes:
    """SHA-256 over all that both sides said of themselves, and both nonces."""
    return _digest(
        b"exo-node join transcript v1",
        *_fields(joiner),
        *_fields(approver),
        joiner_nonce,
        approver_nonce,
    )


def code_of(transcript_hash: bytes) -> str:
    """The digits that a person compares: `042137`."""
    return str(int.from_bytes(transcript_hash, "big") % 10**CODE_DIGITS).zfill(CODE_DIGITS)


def spaced(code: str) -> str:
    """As it is shown: `042 137`."""
    return f"{code[:3]} {code[3:]}"


def parse_code(text: str) -> str | None:
    """Six digits, with spaces or dashes between them; None where it is something else."""
    compact = re.sub(r"[\s-]", "", text)
    return compact if re.fullmatch(rf"[0-9]{{{CODE_DIGITS}}}", compact) else None


def open_proof(name: str, transcript_hash: bytes) -> bytes:
    """That its sender knows the name of --open, without telling it; good for one connection."""
    return hmac.digest(name.encode(), b"exo-node open v1" + transcript_hash, "sha256")


def is_open_proof(proof: bytes, name: str, transcript_hash: bytes) -> bool:
    return hmac.compare_digest(proof, open_proof(name, transcript_hash))


class Handshake:
    """One side of one attempt. The nonce serves once and leaves only after the other's commitment.

    Raises Untrusted where the other side breaks the order or its commitment.
    """

    def __init__(self, role: Role, own: Party, nonce: bytes) -> None:
        """`nonce`: NONCE_BYTES from a random source, never used before."""
        self.role: Role = role
        self.own = own
        self._nonce = nonce
        self._other: tuple[Party, bytes] | None = None
        self._other_nonce: bytes | None = None

    @property
    def commitment(self) -> bytes:
        return commitment(self.role, self.own.public_key, self._nonce)

    def meet(self, other: Party, committed: bytes) -> None:
        """The other's hello; there is no second one."""
        if self._other is not None:
            raise Untrusted("the other side said hello twice in one attempt to join")
        if len(committed) != hashlib.sha256().digest_size:
            raise Untrusted("the other side's hello carries no commitment")
        self._other = (other, committed)

    @property
    def other(self) -> Party:
        if self._other is None:
            raise Untrusted("the other side has not said hello")
        return self._other[0]

    def reveal(self) -> bytes:
        """This side's nonce; the approver's only once it has checked the joiner's."""
        if self._other is None or (self.role == "approver" and self._other_nonce is None):
            raise Untrusted("the other side asks for the nonce before it has fixed its own")
        return self._nonce

    def check(self, nonce: bytes) -> None:
        """The other's nonce, which must be what it committed to."""
        if self._other is None or self._other_nonce is not None:
            raise Untrusted("the other side sent its nonce out of turn")
        other, committed = self._other
        theirs: Role = "approver" if self.role == "joiner" else "joiner"
        expected = commitment(theirs, other.public_key, nonce)
        if len(nonce) != NONCE_BYTES or not hmac.compare_digest(expected, committed):
            raise Untrusted(
                f"{other.name} revealed another nonce than it had committed to: somebody may be "
                "between the two nodes"
            )
        self._other_nonce = nonce

    @property
    def transcript(self) -> bytes:
        """The same on both sides, if nobody is between them."""
        if self._other is None or self._other_nonce is None:
            raise Untrusted("the other side has not revealed its nonce")
        other = self._other[0]
        if self.role == "joiner":
            return transcript(self.own, other, self._nonce, self._other_nonce)
        return transcript(other, self.own, self._other_nonce, self._nonce)

    @property
    def code(self) -> str:
        return code_of(self.transcript)


def refuse_malformed_code(text: str) -> InvalidRequest:
    return InvalidRequest(f"'{text[:32]}' is no code: that is six digits", param="code")


def _fields(party: Party) -> tuple[bytes, ...]:
    said = (party.cluster, party.name, party.chip, party.version, party.address)
    flags = bytes([party.fresh, party.open])
    number = party.protocol.to_bytes(4, "big")
    return (party.node.encode(), party.public_key, number, flags, *(s.encode() for s in said))


def _digest(*parts: bytes) -> bytes:
    """Each part with its length before it: no two lists of parts have the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()
