"""The cluster key on disk over a join and a leave: founded, taken over, kept aside, marked fresh.

A node is fresh while it is alone in a cluster that it founded itself: only then may it leave that
cluster for another without being told to. The mark is a file that names the founded cluster, so
that a folder without it, or with another key, is taken for established.
"""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...placement.errors import InvalidSettings
from ..machine.private_files import create_private, read_text, replace_private
from .certificates import cluster_fingerprint
from .keys import KEY_FILE, ClusterKey, load_or_create_cluster_key, parse_cluster_key

FRESH_FILE: Final = "cluster.fresh"
NEXT_FILE: Final = "cluster.key.next"
_MAX_LEFT: Final = 16


@dataclass(frozen=True, slots=True)
class KeyFolder:
    """The data folder's cluster key, or the one that a person gave for this process."""

    data_dir: Path
    given: str | None = None
    """The key in EXO_CLUSTER_KEY."""
    key_file: Path | None = None

    @property
    def origin(self) -> str | None:
        """The flag or variable that decides on the key; None where the data folder does."""
        if self.key_file is not None:
            return "--cluster-key-file"
        return None if self.given is None else "EXO_CLUSTER_KEY"

    def load(self) -> ClusterKey:
        """The key in use; the first start founds a cluster of one. Raises InvalidSettings."""
        if self.origin is None and not (self.data_dir / KEY_FILE).exists():
            self._found(left=())
        return load_or_create_cluster_key(self.data_dir, self.given, self.key_file)

    def is_fresh(self, fingerprint: str) -> bool:
        """Whether `fingerprint` is the cluster that this node founded and has been alone in."""
        return self.origin is None and self._mark().get("cluster") == fingerprint

    def left(self) -> frozenset[str]:
        """Fingerprints of clusters that this node was told to leave: it does not ask them again."""
        left = self._mark().get("left")
        return frozenset(map(str, left)) if isinstance(left, list) else frozenset()  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]

    def establish(self) -> None:
        """Somebody joined, or was met: this cluster is not left for another any more."""
        (self.data_dir / FRESH_FILE).unlink(missing_ok=True)

    def take(self, key: ClusterKey) -> Path | None:
        """Makes `key` this node's; returns where the old one was kept, None if it is the same.

        Raises InvalidSettings where a flag or variable decides on the key, or the disk refuses.
        """
        self._require_own("join another cluster")
        try:
            return self._swap(key)
        except OSError as fault:
            raise self._unusable(fault) from fault

    def plan_rekey(self, key: ClusterKey) -> None:
        """Records a key that other nodes are about to get and that this one takes last.

        `finish_rekey` takes it at the next start, should this process not live to do so. Raises
        InvalidSettings as `take` does.
        """
        self._require_own("change its key")
        try:
            replace_private(self.data_dir / NEXT_FILE, _line(key))
        except OSError as fault:
            raise self._unusable(fault) from fault

    def finish_rekey(self) -> str | None:
        """The fingerprint of the cluster whose key was planned and is taken now, if one was.

        Raises InvalidSettings.
        """
        path = self.data_dir / NEXT_FILE
        if self.origin is not None or not path.exists():
            return None
        key = parse_cluster_key(read_text(path, "the key of a rekey that was cut off"), str(path))
        return None if self.take(key) is None else cluster_fingerprint(key)

    def leave(self) -> Path:
        """Forgets the cluster and founds one of one; returns where the old key was kept.

        Raises InvalidSettings as `take` does.
        """
        self._require_own("leave its cluster")
        old = self.load()
        left = (*self.left(), cluster_fingerprint(old))[-_MAX_LEFT:]
        try:
            aside = self._keep_aside(old)
            # First: a planned key that outlived the old one would bring the node back at its start.
            (self.data_dir / NEXT_FILE).unlink(missing_ok=True)
            self._found(left)
        except OSError as fault:
            raise self._unusable(fault) from fault
        return aside

    def _swap(self, key: ClusterKey) -> Path | None:
        path = self.data_dir / KEY_FILE
        aside = None
        if path.exists():
            old = self.load()
            if old == key:
                self.establish()
                (self.data_dir / NEXT_FILE).unlink(missing_ok=True)
                return None
            aside = self._keep_aside(old)
        replace_private(path, _line(key))
        self.establish()
        (self.data_dir / NEXT_FILE).unlink(missing_ok=True)
        return aside

    def _keep_aside(self, key: ClusterKey) -> Path:
        aside = self.data_dir / f"{KEY_FILE}.{cluster_fingerprint(key)}"
        replace_private(aside, _line(key))
        return aside

    def _found(self, left: tuple[str, ...]) -> None:
        """The mark goes first: without its key it says nothing, and a key without it says too much
        of a node that was cut off in between."""
        key = ClusterKey(secrets.token_bytes(20))
        mark = {"cluster": cluster_fingerprint(key), "left": list(left)}
        try:
            replace_private(self.data_dir / FRESH_FILE, json.dumps(mark).encode() + b"\n")
            if left:
                replace_private(self.data_dir / KEY_FILE, _line(key))
            else:
                create_private(self.data_dir / KEY_FILE, _line(key))
        except OSError as fault:
            raise self._unusable(fault) from fault

    def _mark(self) -> dict[str, Any]:
        try:
            mark = json.loads((self.data_dir / FRESH_FILE).read_text())
        except (OSError, ValueError):
            return {}
        return mark if isinstance(mark, dict) else {}  # pyright: ignore[reportUnknownVariableType]

    def _require_own(self, deed: str) -> None:
        if self.origin is not None:
            raise InvalidSettings(
                f"this node's cluster key comes from {self.origin}, so it cannot {deed} by itself; "
                "start it without that, or with another key",
                param=self.origin,
            )

    def _unusable(self, fault: OSError) -> InvalidSettings:
        return InvalidSettings(
            f"{self.data_dir} cannot hold the cluster key: {fault.strerror}; check who owns the "
            "data folder, and its disk",
            param="--data-dir",
        )


def _line(key: ClusterKey) -> bytes:
    return key.text.encode() + b"\n"
