"""The protocol of joining: which side asks, and how both prove that they have the digits. Pure.

    joiner                                      approver
      hello                        ------>
                                   <------      hello
      asks, and shows six digits   ------>
                                   <------      a person typed digits: begin
      20 times, one bit of the digits each:
        a commitment to the bit    ------>
                                   <------      a commitment to the bit
        opens it                   ------>      checks it
        checks it                  <------      opens it
                                   <------      the cluster key
      stores it                    ------>

This is Bluetooth's passkey entry. A commitment is a hash of the sender's role, the transcript (both
public keys and both hellos), the round, a nonce and the bit. Either side has committed to its bit
before it learns the other's, so a side without the digits has to guess each of the 20 bits, and one
wrong guess ends the attempt. A failed attempt reveals the bits of its rounds, so digits serve for
one attempt only.
"""

import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from ...placement.errors import DigitsDiffer, ExoNodeError, InvalidRequest, Untrusted
from ...placement.ids import NodeId

NONCE_BYTES: Final = 32
CODE_DIGITS: Final = 6
ROUNDS: Final = 20
"""Bits in the largest code."""

Role = Literal["joiner", "approver"]
Relation = Literal["same", "ask", "asked", "both", "apart"]
Reason = Literal["denied", "wrong_code", "too_many", "busy", "protocol", "duplicate", "malformed"]
"""The reason why a connection ends without a key."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """A node's description of itself: TLS proves id and public key, a signature its cluster."""

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
    nonce: bytes = b""
    """A random number of this connection, so that no two have the same transcript."""
    join_port: int = 0
    """Or 0 if unknown. It is a hint, as mDNS gives, so it is no part of the transcript."""


def relation(own: PeerIdentity, other: PeerIdentity) -> Relation:
    """The relation of two nodes, by which one asks the other; each side gets the opposite result.

    A fresh node asks every cluster, and of two fresh ones each asks the other (`both`): a person
    decides by where the digits are typed.
    """
    if own.cluster == other.cluster:
        return "same"
    if own.fresh != other.fresh:
        return "ask" if own.fresh else "asked"
    return "both" if own.fresh else "apart"


def transcript(joiner: PeerIdentity, approver: PeerIdentity) -> bytes:
    """SHA-256 over both public keys and both descriptions."""
    return _digest(b"exo-node join transcript v3", *_fields(joiner), *_fields(approver))


def new_code(below: Callable[[int], int]) -> str:
    """Six digits; `below(n)` is a random number under n."""
    return str(below(10**CODE_DIGITS)).zfill(CODE_DIGITS)


def spaced(code: str) -> str:
    """The digits in two groups, as screens show them: `042 137`."""
    return f"{code[:3]} {code[3:]}"


def parse_code(text: str) -> str | None:
    """Six digits, with spaces or dashes between them; None where it is something else."""
    compact = re.sub(r"[\s-]", "", text)
    return compact if re.fullmatch(rf"[0-9]{{{CODE_DIGITS}}}", compact) else None


def refuse_malformed_code(text: str) -> InvalidRequest:
    return InvalidRequest(f"'{text[:32]}' is no code: that is six digits", param="code")


Step = Literal["commit", "receive", "reveal", "check"]
_ORDER: Final[dict[Role, tuple[Step, ...]]] = {
    "joiner": ("commit", "receive", "reveal", "check"),
    "approver": ("receive", "commit", "check", "reveal"),
}


class Passkey:
    """One side of one attempt: 20 rounds of four steps, whose order the role decides.

    `next` names the step that is due. Raises Untrusted for a step out of turn, DigitsDiffer where
    the other side's bit is not this side's; after either every step raises Untrusted.
    """

    def __init__(
        self, role: Role, transcript_hash: bytes, code: str, random: Callable[[int], bytes]
    ) -> None:
        """`random(n)` gives n random bytes."""
        self._role: Role = role
        self._other_role: Role = "approver" if role == "joiner" else "joiner"
        self._transcript = transcript_hash
        self._number = int(code)
        self._random = random
        self._steps = 0
        self._failed = False
        self._nonce = b""
        self._other_commitment = b""

    @property
    def round(self) -> int:
        """The number of completed rounds."""
        return self._steps // len(_ORDER[self._role])

    @property
    def next(self) -> Step | None:
        """The step that is due; None after the last one or a failed one."""
        if self._failed or self.round >= ROUNDS:
            return None
        order = _ORDER[self._role]
        return order[self._steps % len(order)]

    @property
    def proven(self) -> bool:
        """Whether both sides went through every round: only then may the key travel."""
        return not self._failed and self.round >= ROUNDS

    def commit(self) -> bytes:
        """Returns this side's commitment to its bit of the round."""
        self._take("commit")
        self._nonce = self._random(NONCE_BYTES)
        return self._commitment(self._role, self._nonce)

    def receive(self, other_commitment: bytes) -> None:
        """Takes the other side's commitment."""
        self._take("receive")
        if len(other_commitment) != hashlib.sha256().digest_size:
            raise self._fail(Untrusted("the other side sent something that is no commitment"))
        self._other_commitment = other_commitment

    def reveal(self) -> bytes:
        """Returns the nonce that opens this side's commitment."""
        self._take("reveal")
        return self._nonce

    def check(self, nonce: bytes) -> None:
        """Checks that the other side's nonce opens its commitment to the bit of this side."""
        self._take("check")
        expected = self._commitment(self._other_role, nonce)
        if len(nonce) != NONCE_BYTES or not hmac.compare_digest(expected, self._other_commitment):
            raise self._fail(DigitsDiffer("the digits did not match"))

    def _take(self, step: Step) -> None:
        if self.next != step:
            raise self._fail(Untrusted(f"the other side is out of turn: '{step}' is not due"))
        self._steps += 1

    def _fail(self, fault: ExoNodeError) -> ExoNodeError:
        self._failed = True
        return fault

    def _commitment(self, role: Role, nonce: bytes) -> bytes:
        # A step is counted when it is taken, so the last one of a round belongs to that round.
        number = (self._steps - 1) // len(_ORDER[self._role])
        bit = self._number >> number & 1
        return commitment(role, self._transcript, number, nonce, bit)


def commitment(role: Role, transcript_hash: bytes, number: int, nonce: bytes, bit: int) -> bytes:
    """SHA-256 of a bit with role and transcript, so that no other node can send it as its own."""
    place = bytes([number, bit])
    return _digest(b"exo-node join passkey v2", role.encode(), transcript_hash, place, nonce)


def _fields(party: PeerIdentity) -> tuple[bytes, ...]:
    texts = (party.cluster, party.name, party.chip, party.version, party.address)
    flags = bytes([party.fresh])
    number = party.protocol.to_bytes(4, "big")
    proven = (party.node.encode(), party.public_key, party.nonce)
    return (*proven, number, flags, *(text.encode() for text in texts))


def _digest(*parts: bytes) -> bytes:
    """SHA-256 of length-prefixed parts, so that no two lists of parts have the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()
