"""The proof that two nodes have the same --open NAME. Pure.

SPEKE: a Diffie-Hellman exchange whose generator is derived from the name. A node without the name
learns from an attempt whether one guess was right, and gets nothing to try other guesses on later,
as a hash of the name would be.
"""

import hashlib
import hmac
from typing import Final

from ...placement.errors import DigitsDiffer, Untrusted
from .handshake import Role

# The 2048-bit MODP group of RFC 3526: a safe prime.
PRIME: Final = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74"
    "020BBEA63B139B22514A08798E3404DDEF9519B3CD3A431B302B0A6DF25F1437"
    "4FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7ED"
    "EE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF05"
    "98DA48361C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB"
    "9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF695581718"
    "3995497CEA956AE515D2261898FA051015728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
SHARE_BYTES: Final = 256
SECRET_BYTES: Final = 32


class NameProof:
    """One side of one attempt."""

    def __init__(self, role: Role, transcript_hash: bytes, name: str, secret: bytes) -> None:
        """`secret`: SECRET_BYTES from a random source, never used before."""
        self._role: Role = role
        self._transcript = transcript_hash
        self._secret = int.from_bytes(secret, "big") | 1 << (8 * SECRET_BYTES - 1)
        self._share = pow(_generator(name), self._secret, PRIME).to_bytes(SHARE_BYTES, "big")
        self._key: bytes | None = None

    @property
    def share(self) -> bytes:
        """The share to send to the other side, SHARE_BYTES long."""
        return self._share

    def receive(self, share: bytes) -> None:
        """Takes the other side's share. Raises Untrusted."""
        number = int.from_bytes(share, "big")
        # Of the numbers 0, 1 and PRIME - 1 every power is known.
        if len(share) != SHARE_BYTES or not 1 < number < PRIME - 1 or share == self._share:
            raise Untrusted("the other side sent something that is no share of an exchange")
        power = pow(number, self._secret, PRIME).to_bytes(SHARE_BYTES, "big")
        shares = sorted((self._share, share))
        material = b"".join([b"exo-node open v2", self._transcript, *shares, power])
        self._key = hashlib.sha256(material).digest()

    def proof(self) -> bytes:
        """The proof that this side has the name. Raises Untrusted before `receive`."""
        return self._proof_of(self._role)

    def check(self, proof: bytes) -> None:
        """Checks the other side's proof. Raises DigitsDiffer where it has another name."""
        expected = self._proof_of("approver" if self._role == "joiner" else "joiner")
        if not hmac.compare_digest(proof, expected):
            raise DigitsDiffer("the other node was started with another --open")

    def _proof_of(self, role: Role) -> bytes:
        if self._key is None:
            raise Untrusted("the other side is out of turn: it has sent no share")
        return hmac.digest(self._key, role.encode(), "sha256")


def _generator(name: str) -> int:
    """A square, so that it generates the subgroup of prime order whatever the name is."""
    wide = hashlib.shake_256(b"exo-node open name v2" + name.encode()).digest(SHARE_BYTES + 16)
    base = int.from_bytes(wide, "big") % (PRIME - 3) + 2
    return pow(base, 2, PRIME)
