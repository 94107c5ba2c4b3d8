"""Types of the ids that several processes share."""

from typing import NewType

NodeId = NewType("NodeId", str)
"""20 lower-case base32 characters: the head of SHA-256 over the node's public key."""


def runner_name(node: NodeId) -> str:
    """The TLS name in the certificates of a node's runners."""
    return f"{node}.runner.exo.internal"


ModelId = NewType("ModelId", str)
"""The `model` of a request: a card's id, a folder's name or `owner/repository`."""

PlacementId = NewType("PlacementId", str)
RequestId = NewType("RequestId", str)

Term = NewType("Term", int)
"""Counts the heads of a cluster: a message of a lower term comes from a head that was replaced."""
