"""The cluster key, this node's identity, and the certificates that mutual TLS is made of.

The CA's private key is derived from the cluster key (160 bits) by HKDF, so every holder of the key,
and no other, can issue a certificate that the members accept. A node's id is bound to a key pair of
its own. `cluster_key.py` has the changes of the key over a join.
"""

import base64
import hashlib
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ...placement.errors import InvalidSettings
from ...placement.ids import NodeId
from ..machine.private_files import read_or_create, read_text

KEY_FILE = "cluster.key"
IDENTITY_FILE = "node.key"

_KEY = re.compile(r"[a-z2-7]{32}")
PEM = serialization.Encoding.PEM


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """The secret that all nodes of a cluster share; its text is 32 letters and digits."""

    secret: bytes = field(repr=False)

    @property
    def text(self) -> str:
        return base64.b32encode(self.secret).decode().lower()


@dataclass(frozen=True, slots=True)
class Identity:
    """This node's key pair and the id that follows from it."""

    node: NodeId
    key: ec.EllipticCurvePrivateKey = field(repr=False)


def parse_cluster_key(text: str, origin: str) -> ClusterKey:
    """Reads a key. Raises InvalidSettings naming `origin`: the text's flag, variable or file."""
    compact = text.strip().lower().replace("-", "")
    if not _KEY.fullmatch(compact):
        raise InvalidSettings(
            f"{origin} holds no cluster key: that is 32 letters a-z and digits 2-7, as in the "
            f"{KEY_FILE} of the first node's data folder (this has {len(compact)} characters)",
            param=origin,
        )
    return ClusterKey(base64.b32decode(compact.upper()))


def load_or_create_cluster_key(
    data_dir: Path, variable: str | None = None, key_file: Path | None = None
) -> ClusterKey:
    """Reads the key from the file, the value of EXO_CLUSTER_KEY, or the data folder.

    Creates it in the data folder where it is in none of them. Raises InvalidSettings.
    """
    if key_file is not None:
        return parse_cluster_key(read_text(key_file, "--cluster-key-file"), "--cluster-key-file")
    if variable is not None:
        return parse_cluster_key(variable, "EXO_CLUSTER_KEY")
    path = data_dir / KEY_FILE
    fresh = ClusterKey(secrets.token_bytes(20)).text.encode() + b"\n"
    return parse_cluster_key(read_or_create(path, fresh).decode("ascii", "replace"), str(path))


def load_or_create_identity(data_dir: Path) -> Identity:
    """Reads the key pair in the data folder, or creates it. Raises InvalidSettings."""
    path = data_dir / IDENTITY_FILE
    fresh = private_pem(ec.generate_private_key(ec.SECP256R1()))
    refusal = InvalidSettings(
        f"{path} is not a P-256 private key (PEM, without a passphrase); remove it and the node "
        "gets a new id",
        param=str(path),
    )
    try:
        key = serialization.load_pem_private_key(read_or_create(path, fresh), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as fault:
        raise refusal from fault
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp256r1":
        raise refusal
    return Identity(node_id(key.public_key()), key)


def node_id(key: ec.EllipticCurvePublicKey) -> NodeId:
    """The first 100 bits of SHA-256 over the DER of the public key, in base32."""
    digest = hashlib.sha256(public_der(key)).digest()
    return NodeId(base64.b32encode(digest).decode().lower()[:20])


def public_der(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
