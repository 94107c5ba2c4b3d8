"""A node's keys on disk: the cluster key over joins and leaves, and the certificates made of it.

A node is fresh while it is alone in a cluster that it founded itself: only then may it leave that
cluster for another without a person's command. The mark is a file that names the founded cluster,
so a folder without it, or with another key, counts as established.
"""

import json
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...placement.errors import InvalidSettings
from ..machine.private_files import create_private, replace_private
from ..machine.settings import Settings
from .certificates import Credentials, cluster_fingerprint, node_credentials, runner_credentials
from .keys import (
    KEY_FILE,
    ClusterKey,
    Identity,
    load_or_create_cluster_key,
    load_or_create_identity,
)

FRESH_FILE: Final = "cluster.fresh"
_MAX_LEFT_CLUSTERS: Final = 16


@dataclass(frozen=True, slots=True)
class KeyFolder:
    """The data folder's cluster key, or the one that a flag or variable sets for this process."""

    data_dir: Path
    variable: str | None = None
    """The value of EXO_CLUSTER_KEY."""
    key_file: Path | None = None

    @property
    def origin(self) -> str | None:
        """The flag or variable that sets the key; None where the data folder does."""
        if self.key_file is not None:
            return "--cluster-key-file"
        return None if self.variable is None else "EXO_CLUSTER_KEY"

    def load(self) -> ClusterKey:
        """The key in use; the first start founds a cluster of one. Raises InvalidSettings."""
        if self.origin is None and not (self.data_dir / KEY_FILE).exists():
            self._create_cluster(left_clusters=())
        return load_or_create_cluster_key(self.data_dir, self.variable, self.key_file)

    def is_fresh(self, fingerprint: str) -> bool:
        """Whether `fingerprint` is the cluster that this node founded and was always alone in."""
        return self.origin is None and self._mark().get("cluster") == fingerprint

    def left_clusters(self) -> frozenset[str]:
        """Fingerprints of clusters that a person made this node leave: it does not ask them."""
        entries = self._mark().get("left")
        return frozenset(map(str, entries)) if isinstance(entries, list) else frozenset()  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]

    def forget_left_clusters(self) -> None:
        """Lets this node ask the clusters that it left. Raises InvalidSettings."""
        if not self.left_clusters():
            return
        with self._storing():
            self._write_mark(self._mark() | {"left": []})

    def establish(self) -> None:
        """Removes the mark: another node joined, so this one leaves its cluster for no other."""
        (self.data_dir / FRESH_FILE).unlink(missing_ok=True)

    def take(self, key: ClusterKey) -> Path | None:
        """Makes `key` this node's; returns the old one's backup, None if it is the same key.

        Raises InvalidSettings where a flag or variable sets the key, or the disk refuses.
        """
        self._require_own("join another cluster")
        path = self.data_dir / KEY_FILE
        with self._storing():
            old = self.load() if path.exists() else None
            backup = None if old in (None, key) else self._back_up(old)
            if old != key:
                replace_private(path, _line(key))
            self.establish()
        return backup

    def leave(self) -> Path:
        """Leaves the cluster and founds another one; returns the old key's backup.

        Raises InvalidSettings as `take` does.
        """
        self._require_own("leave its cluster")
        old = self.load()
        left_clusters = (*self.left_clusters(), cluster_fingerprint(old))[-_MAX_LEFT_CLUSTERS:]
        with self._storing():
            backup = self._back_up(old)
            self._create_cluster(left_clusters)
        return backup

    def _back_up(self, key: ClusterKey) -> Path:
        path = self.data_dir / f"{KEY_FILE}.{cluster_fingerprint(key)}"
        replace_private(path, _line(key))
        return path

    def _create_cluster(self, left_clusters: tuple[str, ...]) -> None:
        """Writes the mark, then a new key: a process that ends in between leaves a harmless mark,
        while a key without its mark would count as an established cluster."""
        key = ClusterKey(secrets.token_bytes(20))
        with self._storing():
            self._write_mark({"cluster": cluster_fingerprint(key), "left": list(left_clusters)})
            write = replace_private if left_clusters else create_private
            write(self.data_dir / KEY_FILE, _line(key))

    def _write_mark(self, mark: dict[str, Any]) -> None:
        replace_private(self.data_dir / FRESH_FILE, json.dumps(mark).encode() + b"\n")

    def _mark(self) -> dict[str, Any]:
        try:
            mark = json.loads((self.data_dir / FRESH_FILE).read_text())
        except (OSError, ValueError):
            return {}
        return mark if isinstance(mark, dict) else {}  # pyright: ignore[reportUnknownVariableType]

    def _require_own(self, operation: str) -> None:
        if self.origin is not None:
            raise InvalidSettings(
                f"this node's cluster key comes from {self.origin}, so it cannot {operation} by "
                "itself; start it without that, or with another key",
                param=self.origin,
            )

    @contextmanager
    def _storing(self) -> Generator[None]:
        """Turns a disk's refusal into InvalidSettings."""
        try:
            yield
        except OSError as fault:
            raise InvalidSettings(
                f"{self.data_dir} cannot hold the cluster key: {fault.strerror}; check who owns "
                "the data folder, and its disk",
                param="--data-dir",
            ) from fault


@dataclass(frozen=True, slots=True)
class Keyring:
    """The proofs of a node's identity and its cluster; they change only by a restart."""

    folder: KeyFolder
    cluster: ClusterKey
    identity: Identity
    credentials: Credentials
    """The node process's certificate for its calls to others."""
    fingerprint: str
    """The public name of the cluster."""

    @classmethod
    def load(cls, settings: Settings) -> "Keyring":
        """Reads the data folder's keys, or creates them. Raises InvalidSettings."""
        variable = settings.cluster_key.get_secret_value() if settings.cluster_key else None
        folder = KeyFolder(settings.data_dir, variable, settings.cluster_key_file)
        cluster = folder.load()
        identity = load_or_create_identity(settings.data_dir)
        credentials = node_credentials(identity, cluster)
        return cls(folder, cluster, identity, credentials, cluster_fingerprint(cluster))

    def for_server(self, join_port: int) -> Credentials:
        """The node process's certificate where it listens; it names the join port to anyone."""
        return node_credentials(self.identity, self.cluster, join_port)

    def for_runner(self) -> Credentials:
        """A certificate of one runner, under a new key."""
        return runner_credentials(self.identity.node, self.cluster)


def _line(key: ClusterKey) -> bytes:
    return key.text.encode() + b"\n"
