"""The cluster's trust: key files, identities, and real mutual-TLS handshakes."""

import asyncio
import base64
import hashlib
import os
import re
import stat
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from threading import Barrier

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from exo_node.node.rpc import channels
from exo_node.node.rpc.channels import from_status
from exo_node.node.trust.certificates import (
    Credentials,
    authenticated_node,
    channel_credentials,
    clock_trouble,
    cluster_fingerprint,
    node_credentials,
    node_name,
    runner_credentials,
    server_credentials,
)
from exo_node.node.trust.keys import (
    ClusterKey,
    Identity,
    load_or_create_cluster_key,
    load_or_create_identity,
    node_id,
    parse_cluster_key,
)
from exo_node.placement.errors import ExoNodeError, InvalidSettings, Untrusted
from exo_node.placement.ids import NodeId, runner_name
from exo_node.proto import peer_pb2 as pb
from exo_node.proto import peer_pb2_grpc

KEY = "abcdefghijklmnopqrstuvwxyz234567"
CLUSTER = parse_cluster_key(KEY, "test")
OTHER_CLUSTER = ClusterKey(b"\x07" * 20)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def new_identity() -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    return Identity(node_id(key.public_key()), key)


def pem(
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, passphrase: bytes | None = None
) -> bytes:
    lock = (
        serialization.BestAvailableEncryption(passphrase)
        if passphrase
        else serialization.NoEncryption()
    )
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


# ---------------------------------------------------------------- cluster key


def test_the_first_start_makes_a_key_that_only_its_owner_can_read(tmp_path: Path) -> None:
    data_dir = tmp_path / "made" / "here"
    key = load_or_create_cluster_key(data_dir)
    assert len(key.secret) == 20
    assert mode(data_dir / "cluster.key") == 0o600
    assert mode(data_dir) == 0o700
    assert [path.name for path in data_dir.iterdir()] == ["cluster.key"]


def test_later_starts_read_the_same_key_and_two_nodes_have_two(tmp_path: Path) -> None:
    first = load_or_create_cluster_key(tmp_path / "a")
    assert load_or_create_cluster_key(tmp_path / "a") == first
    assert load_or_create_cluster_key(tmp_path / "b") != first


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o644])
def test_a_key_file_that_others_could_read_is_closed_to_them(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "cluster.key"
    path.write_text(KEY)
    path.chmod(bits)
    assert load_or_create_cluster_key(tmp_path) == CLUSTER
    assert mode(path) == 0o600


def test_a_key_from_outside_is_used_and_not_stored(tmp_path: Path) -> None:
    file = tmp_path / "given"
    file.write_text(f"{KEY}\n")
    data_dir = tmp_path / "data"
    assert load_or_create_cluster_key(data_dir, variable=KEY) == CLUSTER
    assert load_or_create_cluster_key(data_dir, key_file=file) == CLUSTER
    assert not data_dir.exists()


def test_starts_at_once_agree_on_one_key(tmp_path: Path) -> None:
    starts = 8
    together = Barrier(starts)

    def start(_: int) -> ClusterKey:
        _ = together.wait()
        return load_or_create_cluster_key(tmp_path)

    with ThreadPoolExecutor(starts) as pool:
        keys = set(pool.map(start, range(starts)))
    assert len(keys) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.key"]


def test_a_full_disk_leaves_no_half_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InvalidSettings, match="No space left"):
        _ = load_or_create_cluster_key(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_private_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []

    def note(descriptor: int) -> None:
        modes.append(os.fstat(descriptor).st_mode)

    monkeypatch.setattr("os.fsync", note)
    _ = load_or_create_cluster_key(tmp_path)
    _ = load_or_create_identity(tmp_path)
    files = [mode & 0o777 for mode in modes if stat.S_ISREG(mode)]
    assert files == [0o600, 0o600]


@pytest.mark.parametrize("text", [KEY, KEY.upper(), f" {KEY}\n", f"{KEY[:16]}-{KEY[16:]}"])
def test_a_key_is_read_as_people_copy_it(text: str) -> None:
    assert parse_cluster_key(text, "EXO_CLUSTER_KEY").text == KEY


MALFORMED_KEYS = {
    "empty": "",
    "one character short": KEY[:-1],
    "one character long": f"{KEY}a",
    "a digit that base32 lacks": f"{KEY[:-1]}1",
    "padding": f"{KEY[:-1]}=",
    "two keys": f"{KEY}\n{KEY}",
    "not ASCII": f"{KEY[:-1]}é",
    "a letter that lower() lengthens": f"{KEY[:-1]}İ",
    "hexadecimal": "00112233445566778899aabbccddeeff00112233",
}


@pytest.mark.parametrize("text", MALFORMED_KEYS.values(), ids=MALFORMED_KEYS.keys())
@pytest.mark.parametrize("origin", ["EXO_CLUSTER_KEY", "--cluster-key-file", "cluster.key"])
def test_a_malformed_key_is_refused_by_its_origin_without_showing_it(
    tmp_path: Path, origin: str, text: str
) -> None:
    file = tmp_path / "cluster.key"
    file.write_text(text)
    with pytest.raises(InvalidSettings) as refusal:
        match origin:
            case "EXO_CLUSTER_KEY":
                _ = load_or_create_cluster_key(tmp_path, variable=text)
            case "--cluster-key-file":
                _ = load_or_create_cluster_key(tmp_path / "x", key_file=file)
            case _:
                _ = load_or_create_cluster_key(tmp_path)
    assert origin in refusal.value.message
    assert origin in str(refusal.value.param)
    assert "32 letters" in refusal.value.message
    assert KEY[:16] not in refusal.value.message


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(InvalidSettings, match=r"file/cluster\.key cannot be used"):
        _ = load_or_create_cluster_key(blocker)
    with pytest.raises(InvalidSettings, match=r"file/node\.key cannot be used"):
        _ = load_or_create_identity(blocker)
    with pytest.raises(InvalidSettings, match=r"--cluster-key-file: .*absent cannot be read"):
        _ = load_or_create_cluster_key(tmp_path, key_file=tmp_path / "absent")


def test_an_endless_key_file_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="--cluster-key-file"):
        _ = load_or_create_cluster_key(Path("unused"), key_file=Path("/dev/zero"))


# ----------------------------------------------------------------- identities


def test_a_node_keeps_its_id_and_its_key_file_is_private(tmp_path: Path) -> None:
    first = load_or_create_identity(tmp_path)
    again = load_or_create_identity(tmp_path)
    assert first.node == again.node
    assert mode(tmp_path / "node.key") == 0o600
    assert load_or_create_identity(tmp_path / "other").node != first.node


def test_an_id_is_the_head_of_the_hash_of_the_public_key(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path)
    der = identity.key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    whole = base64.b32encode(hashlib.sha256(der).digest()).decode().lower()
    assert identity.node == whole[:20]


BROKEN_IDENTITIES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "no key": lambda: b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    "another curve": lambda: pem(ec.generate_private_key(ec.SECP384R1())),
    "RSA": lambda: pem(rsa.generate_private_key(65537, 2048)),
    "a passphrase": lambda: pem(ec.generate_private_key(ec.SECP256R1()), b"secret"),
}


@pytest.mark.parametrize("content", BROKEN_IDENTITIES.values(), ids=BROKEN_IDENTITIES.keys())
def test_a_broken_node_key_is_refused_with_its_remedy(
    tmp_path: Path, content: Callable[[], bytes]
) -> None:
    _ = (tmp_path / "node.key").write_bytes(content())
    with pytest.raises(InvalidSettings, match=r"node\.key .* remove it") as refusal:
        _ = load_or_create_identity(tmp_path)
    assert refusal.value.param == str(tmp_path / "node.key")


def test_no_repr_shows_a_secret() -> None:
    identity = new_identity()
    credentials = node_credentials(identity, CLUSTER)
    text = repr([CLUSTER, identity, credentials])
    assert KEY not in text
    assert repr(CLUSTER.secret) not in text
    assert "PRIVATE KEY" not in text


# --------------------------------------------------------------- certificates


def test_the_fingerprint_of_a_key_never_changes() -> None:
    # A changed derivation would lock nodes of different versions out of one another's clusters.
    assert cluster_fingerprint(CLUSTER) == "801b1920c57800c4"
    assert re.fullmatch("[0-9a-f]{16}", cluster_fingerprint(OTHER_CLUSTER))


def test_a_node_certificate_carries_its_two_names_and_a_runner_one_only_its_own() -> None:
    identity = new_identity()
    certificate = x509.load_pem_x509_certificate(
        node_credentials(identity, CLUSTER).certificate_pem
    )
    assert names(certificate) == [f"{identity.node}.node.exo.internal", "node.exo.internal"]
    assert node_id_of(certificate) == identity.node
    runner = x509.load_pem_x509_certificate(
        runner_credentials(identity.node, CLUSTER).certificate_pem
    )
    assert names(runner) == [f"{identity.node}.runner.exo.internal"]
    assert node_id_of(runner) != identity.node


def names(certificate: x509.Certificate) -> list[str]:
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return extension.value.get_values_for_type(x509.DNSName)


def node_id_of(certificate: x509.Certificate) -> NodeId:
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return node_id(key)


# ------------------------------------------------------------------ handshakes


@dataclass
class Door(peer_pb2_grpc.MembershipServicer):
    """Answers with the caller's id, and records the verdicts."""

    verdicts: list[str] = field(default_factory=list[str])

    async def Exchange(
        self,
        request: pb.Heartbeat,
        context: "grpc.aio.ServicerContext[pb.Heartbeat, Awaitable[pb.Heartbeat]]",
    ) -> pb.Heartbeat:
        try:
            self.verdicts.append(authenticated_node(context.auth_context()))
        except Untrusted as fault:
            self.verdicts.append("untrusted")
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, fault.message)
        return pb.Heartbeat(head=self.verdicts[-1])


SERVER = new_identity()
CLIENT = new_identity()
THIEF = new_identity()


def knock(
    client: grpc.ChannelCredentials | None, name: str, server: Credentials | None = None
) -> tuple[str, list[str]]:
    """The caller's outcome (an id, or a gRPC status) and the ids that the server admitted."""

    async def call() -> tuple[str, list[str]]:
        door, running = Door(), grpc.aio.server()
        peer_pb2_grpc.add_MembershipServicer_to_server(door, running)
        own = server or node_credentials(SERVER, CLUSTER)
        port = running.add_secure_port("127.0.0.1:0", server_credentials(own))
        await running.start()
        address, options = f"127.0.0.1:{port}", [("grpc.ssl_target_name_override", name)]
        channel = (
            grpc.aio.insecure_channel(address)
            if client is None
            else grpc.aio.secure_channel(address, client, options)
        )
        async with channel:
            try:
                stub = peer_pb2_grpc.MembershipStub(channel)
                outcome = (await stub.Exchange(pb.Heartbeat(), timeout=60)).head
            except grpc.aio.AioRpcError as fault:
                outcome = fault.code().name
        await running.stop(None)
        return outcome, door.verdicts

    return asyncio.run(call())


@pytest.mark.parametrize(
    "name", [node_name(SERVER.node), node_name(None)], ids=["its own", "any node's"]
)
def test_nodes_with_the_same_key_reach_each_other_and_know_who_calls(name: str) -> None:
    client = channel_credentials(node_credentials(CLIENT, CLUSTER))
    assert knock(client, name) == (CLIENT.node, [CLIENT.node])


def test_a_node_reaches_runners_by_their_name_only() -> None:
    client = channel_credentials(node_credentials(CLIENT, CLUSTER))
    runner = runner_credentials(SERVER.node, CLUSTER)
    assert knock(client, runner_name(SERVER.node), runner) == (CLIENT.node, [CLIENT.node])
    for name in (node_name(SERVER.node), node_name(None), runner_name(CLIENT.node)):
        assert knock(client, name, runner) == ("UNAVAILABLE", [])


def stranger() -> grpc.ChannelCredentials:
    return channel_credentials(node_credentials(CLIENT, OTHER_CLUSTER))


def stranger_who_knows_our_authority() -> grpc.ChannelCredentials:
    ours = node_credentials(CLIENT, CLUSTER)
    theirs = node_credentials(CLIENT, OTHER_CLUSTER)
    return channel_credentials(
        Credentials(theirs.certificate_pem, theirs.key_pem, ours.authority_pem)
    )


def nobody() -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(node_credentials(CLIENT, CLUSTER).authority_pem)


def plaintext() -> None:
    return None


def signed_by_a_runner() -> grpc.ChannelCredentials:
    """A runner holds a leaf and its key: it must not be able to make certificates with them."""
    runner = runner_credentials(SERVER.node, CLUSTER)
    signer = serialization.load_pem_private_key(runner.key_pem, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    template = x509.load_pem_x509_certificate(node_credentials(THIEF, CLUSTER).certificate_pem)
    forged = (
        x509.CertificateBuilder()
        .subject_name(template.subject)
        .issuer_name(x509.load_pem_x509_certificate(runner.certificate_pem).subject)
        .public_key(THIEF.key.public_key())
        .serial_number(7)
        .not_valid_before(template.not_valid_before_utc)
        .not_valid_after(template.not_valid_after_utc)
        .sign(signer, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    chain = forged + runner.certificate_pem
    return channel_credentials(Credentials(chain, pem(THIEF.key), runner.authority_pem))


@pytest.mark.parametrize(
    "client", [stranger, stranger_who_knows_our_authority, nobody, plaintext, signed_by_a_runner]
)
def test_who_is_not_of_the_cluster_does_not_get_through_the_handshake(
    client: Callable[[], grpc.ChannelCredentials | None],
) -> None:
    assert knock(client(), node_name(SERVER.node)) == ("UNAVAILABLE", [])


def test_another_node_at_the_expected_address_is_refused() -> None:
    client = channel_credentials(node_credentials(CLIENT, CLUSTER))
    assert knock(client, node_name(THIEF.node)) == ("UNAVAILABLE", [])


def test_a_borrowed_id_is_untrusted() -> None:
    borrowed = node_credentials(Identity(CLIENT.node, THIEF.key), CLUSTER)
    outcome = knock(channel_credentials(borrowed), node_name(SERVER.node))
    assert outcome == ("UNAUTHENTICATED", ["untrusted"])


def test_a_runner_cannot_speak_for_its_node() -> None:
    runner = runner_credentials(CLIENT.node, CLUSTER)
    outcome = knock(channel_credentials(runner), node_name(SERVER.node))
    assert outcome == ("UNAUTHENTICATED", ["untrusted"])


def self_signed(*common_names: str) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in common_names])
    template = x509.load_pem_x509_certificate(node_credentials(THIEF, CLUSTER).certificate_pem)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(THIEF.key.public_key())
        .serial_number(7)
        .not_valid_before(template.not_valid_before_utc)
        .not_valid_after(template.not_valid_after_utc)
        .sign(THIEF.key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )


@pytest.mark.parametrize(
    "certificate",
    [b"", b"junk", self_signed(), self_signed("line\nbreak"), self_signed(THIEF.node, CLIENT.node)],
    ids=["empty", "junk", "no name", "a name that is no id", "two names"],
)
def test_a_certificate_of_another_make_is_untrusted(certificate: bytes) -> None:
    with pytest.raises(Untrusted, match="not one that exo-node issues"):
        _ = authenticated_node({"x509_pem_cert": [certificate]})


def test_a_call_without_a_certificate_is_untrusted() -> None:
    with pytest.raises(Untrusted, match="no certificate"):
        _ = authenticated_node({"transport_security_type": [b"ssl"]})


# ------------------------------------------------------------------------------- clocks


@pytest.mark.parametrize(
    ("year", "wrong"), [(1970, True), (2026, False), (2049, False), (2055, True)]
)
def test_a_clock_outside_the_certificates_time_is_named(year: int, wrong: bool) -> None:
    trouble = clock_trouble(datetime(year, 6, 1, tzinfo=UTC))
    assert bool(trouble) == wrong
    assert not wrong or (str(year) in trouble and "set the clock" in trouble)


class _At(datetime):
    year_now = 2055

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "_At":
        return cls(cls.year_now, 6, 1, tzinfo=tz)


def _refusal(detail: str) -> ExoNodeError:
    fault = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=detail
    )
    return from_status(fault, "10.0.0.2:1")


def test_a_handshake_that_a_clock_spoils_is_not_blamed_on_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verify = "Ssl handshake failed: SSL_ERROR_SSL: error:1000007d: CERTIFICATE_VERIFY_FAILED"
    other = _refusal(f"{verify}: certificate is not yet valid")
    assert isinstance(other, Untrusted)
    assert "compare the clocks" in other.message and "of this cluster" not in other.message
    assert "is not of this cluster" in _refusal(f"{verify}: self-signed").message
    monkeypatch.setattr(channels, "datetime", _At)
    assert "this machine's clock says 2055-06-01" in _refusal(verify).message
