"""The certificates of mutual TLS: a node's, a runner's, and the join port's."""

import datetime
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ...placement.errors import Untrusted
from ...placement.ids import NodeId, runner_name
from .keys import IDENTITY_FILE, PEM, ClusterKey, Identity, node_id, private_pem, public_der

_HINT = re.compile(r"join-([0-9]{1,5})\.([0-9a-f]{16})\.exo\.internal")
_NODE = re.compile(r"[a-z2-7]{20}")
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# Wide and fixed: a clock that is off must not break a cluster at home.
_VALID_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_VALID_TO = datetime.datetime(2049, 12, 31, tzinfo=datetime.UTC)
_VOUCHER = b"exo-node v1: a node of this cluster has the key "


@dataclass(frozen=True, slots=True)
class ProvenIdentity:
    """A node's id and public key, as its certificate proves them."""

    node: NodeId
    public_key: bytes
    """DER, SubjectPublicKeyInfo."""


@dataclass(frozen=True, slots=True)
class JoinHint:
    """The join port that a control server's certificate names to any caller, without a proof."""

    cluster: str
    join_port: int


@dataclass(frozen=True, slots=True)
class Credentials:
    """One end of mutual TLS, PEM."""

    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    authority_pem: bytes


JOIN_AUTHORITY = ClusterKey(
    hashlib.sha256(b"exo-node v1: of the join port, no secret").digest()[:20]
)
"""An authority whose key is public, so its certificates prove nothing by it. It exists because TLS
libraries show a program the other side's certificate only if some authority has signed it."""


def clock_trouble(now: datetime.datetime) -> str:
    """The reason why this machine's clock makes every certificate invalid; "" where it does not.

    `now` is the clock's time, in UTC.
    """
    if _VALID_FROM <= now <= _VALID_TO:
        return ""
    return (
        f"this machine's clock says {now:%Y-%m-%d}, and the certificates of nodes are valid from "
        f"{_VALID_FROM:%Y} to {_VALID_TO:%Y}: set the clock"
    )


def node_name(node: NodeId | None) -> str:
    """The TLS name of a node's control server, or without `node` of any in the cluster."""
    return "node.exo.internal" if node is None else f"{node}.node.exo.internal"


def node_credentials(
    identity: Identity, cluster: ClusterKey, join_port: int | None = None
) -> Credentials:
    """Issues the node process's certificate, for its own key; any caller reads its JoinHint."""
    names = [node_name(identity.node), node_name(None)]
    if join_port is not None:
        names.append(f"join-{join_port}.{cluster_fingerprint(cluster)}.exo.internal")
    return _leaf(identity.node, identity.key, names, cluster)


def join_credentials(identity: Identity) -> Credentials:
    """Issues the join port's certificate, which proves the node's key pair and no cluster."""
    return _leaf(identity.node, identity.key, [node_name(identity.node)], JOIN_AUTHORITY)


def runner_credentials(node: NodeId, cluster: ClusterKey) -> Credentials:
    """Issues one runner's certificate, for a new key: runners get no key of node or cluster."""
    key = ec.generate_private_key(ec.SECP256R1())
    return _leaf(node, key, [runner_name(node)], cluster)


def cluster_fingerprint(cluster: ClusterKey) -> str:
    """The public name of the cluster: 16 hex digits of the hash of the CA's public key."""
    return hashlib.sha256(public_der(_authority_key(cluster).public_key())).hexdigest()[:16]


def server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """Refuses clients that show no certificate of the cluster."""
    pair = (credentials.key_pem, credentials.certificate_pem)
    return grpc.ssl_server_credentials(
        [pair], root_certificates=credentials.authority_pem, require_client_auth=True
    )


def channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    """Shows this side's certificate and trusts the cluster's only."""
    return grpc.ssl_channel_credentials(
        credentials.authority_pem, credentials.key_pem, credentials.certificate_pem
    )


def authenticated_node(auth_context: Mapping[str, Iterable[bytes]]) -> NodeId:
    """The node id of a caller whose certificate has the name of its own key.

    Raises Untrusted, also for a runner's certificate.
    """
    pem = next(iter(auth_context.get("x509_pem_cert", ())), None)
    if pem is None:
        raise Untrusted("the caller showed no certificate; give both nodes the same cluster key")
    return _proven(x509.load_pem_x509_certificate, pem).node


def proven_by(certificate: bytes) -> ProvenIdentity:
    """The node that a certificate (DER) proves its sender to be. Raises Untrusted."""
    return _proven(x509.load_der_x509_certificate, certificate)


def join_hint(certificate: bytes) -> JoinHint | None:
    """The join port that a control server's certificate (DER) names; None where it names none."""
    try:
        names = (
            x509.load_der_x509_certificate(certificate)
            .extensions.get_extension_for_class(x509.SubjectAlternativeName)
            .value.get_values_for_type(x509.DNSName)
        )
    except (ValueError, UnsupportedAlgorithm, x509.ExtensionNotFound):
        return None
    for match in filter(None, map(_HINT.fullmatch, names)):
        if 0 < int(match[1]) <= 65535:
            return JoinHint(match[2], int(match[1]))
    return None


def proven_public_key(identity: Identity) -> bytes:
    """The public key (DER) of this node's own certificates."""
    return public_der(identity.key.public_key())


def vouch(cluster: ClusterKey, public_key: bytes) -> tuple[bytes, bytes]:
    """Signs a node's public key with the cluster's; returns (the CA's public key, signature)."""
    authority = _authority_key(cluster)
    signature = authority.sign(_VOUCHER + public_key, ec.ECDSA(hashes.SHA256()))
    return public_der(authority.public_key()), signature


def vouched_cluster(authority: bytes, voucher: bytes, public_key: bytes) -> str:
    """Checks a signature of `vouch`; returns the cluster's fingerprint. Raises Untrusted."""
    try:
        key = serialization.load_der_public_key(authority)
        if not isinstance(key, ec.EllipticCurvePublicKey) or public_der(key) != authority:
            raise ValueError
        key.verify(voucher, _VOUCHER + public_key, ec.ECDSA(hashes.SHA256()))
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as fault:
        raise Untrusted("the other node does not prove which cluster it is of") from fault
    return hashlib.sha256(authority).hexdigest()[:16]


def _proven(load: Callable[[bytes], x509.Certificate], encoded: bytes) -> ProvenIdentity:
    """Checks that the certificate's name is the id of its own key. Raises Untrusted."""
    malformed = Untrusted("the caller's certificate is not one that exo-node issues")
    try:
        certificate = load(encoded)
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as fault:
        raise malformed from fault
    name = str(names[0].value) if len(names) == 1 else ""
    # The name goes into messages: only what can be an id may.
    if not isinstance(key, ec.EllipticCurvePublicKey) or not _NODE.fullmatch(name):
        raise malformed
    if name != node_id(key):
        raise Untrusted(
            f"the caller's certificate says {name}, which is not its key's id: it is a runner's, "
            f"or it borrows that id; start each node with a {IDENTITY_FILE} of its own"
        )
    return ProvenIdentity(node_id(key), public_der(key))


def _authority_key(cluster: ClusterKey) -> ec.EllipticCurvePrivateKey:
    # 128 bits more than the order has, so that the remainder is uniform for all practical purposes.
    derived = HKDF(hashes.SHA256(), 48, b"exo-node/v1", b"cluster-ca-p256").derive(cluster.secret)
    number = int.from_bytes(derived, "big") % (_P256_ORDER - 1) + 1
    return ec.derive_private_key(number, ec.SECP256R1())


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = _name("exo-cluster")
    return (
        _builder(name, name, key.public_key(), serial=1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _leaf(
    node: NodeId, key: ec.EllipticCurvePrivateKey, names: list[str], cluster: ClusterKey
) -> Credentials:
    authority_key = _authority_key(cluster)
    authority = _authority(authority_key)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    serial = x509.random_serial_number()
    certificate = (
        _builder(_name(node), authority.subject, key.public_key(), serial)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(issuer, critical=False)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return Credentials(certificate.public_bytes(PEM), private_pem(key), authority.public_bytes(PEM))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, serial: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_TO)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
