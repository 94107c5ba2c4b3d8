"""A node's keys, its cluster's and its own, and the certificates made with them."""

import logging
from dataclasses import dataclass

from ..machine.settings import Settings
from .certificates import Credentials, cluster_fingerprint, node_credentials, runner_credentials
from .cluster_key import KeyFolder
from .keys import ClusterKey, Identity, load_or_create_identity

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Keyring:
    """What proves who a node is, and of which cluster. With another key it is another node."""

    folder: KeyFolder
    cluster: ClusterKey
    identity: Identity
    credentials: Credentials
    """Of the node process, for its calls to others."""
    fingerprint: str
    """Names the cluster in public."""

    @classmethod
    def load(cls, settings: Settings) -> "Keyring":
        """What the data folder holds, made on the first start. Raises InvalidSettings."""
        given = settings.cluster_key.get_secret_value() if settings.cluster_key else None
        folder = KeyFolder(settings.data_dir, given, settings.cluster_key_file)
        if (cluster_id := folder.finish_rekey()) is not None:
            log.warning(
                "a rekey from this node was cut off before it took the new key itself: it has it "
                "now (cluster %s). Give the key (`exo-node key`) to nodes that do not come back "
                "(`exo-node join` on them)",
                cluster_id,
            )
        cluster = folder.load()
        identity = load_or_create_identity(settings.data_dir)
        credentials = node_credentials(identity, cluster)
        return cls(folder, cluster, identity, credentials, cluster_fingerprint(cluster))

    def for_server(self, join_port: int) -> Credentials:
        """Of the node process where it listens: from them strangers learn the join port."""
        return node_credentials(self.identity, self.cluster, join_port)

    def for_runner(self) -> Credentials:
        """Of one runner, under a fresh key."""
        return runner_credentials(self.identity.node, self.cluster)
