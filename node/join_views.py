"""Requests to join as members tell them to each other and as `GET /v1/join/requests` shows them."""

from typing import Any

from ..placement.ids import NodeId
from ..proto import peer_pb2 as pb
from .join_client import Asking
from .join_requests import Request


def on_the_wire(request: Request, left_s: float) -> pb.JoinRequest:
    """For the other members."""
    party = request.party
    return pb.JoinRequest(
        id=request.id,
        node=party.node,
        name=party.name,
        chip=party.chip,
        version=party.version,
        address=request.address,
        code=request.code,
        expires_in_s=max(0, round(left_s)),
    )


def shown_request(
    request: pb.JoinRequest, at: NodeId, at_name: str, *, here: bool
) -> dict[str, Any]:
    """One of `data`; `at` is the member at which it waits."""
    return {
        "id": request.id,
        "node": request.node,
        "name": request.name,
        "chip": request.chip,
        "version": request.version,
        "address": request.address,
        "code": request.code,
        "expires_in_s": request.expires_in_s,
        "at": {"node": at, "name": at_name, "self": here},
    }


def shown_asking(asking: Asking) -> dict[str, Any]:
    """One of `asking`."""
    approver = asking.approver
    return {
        "cluster": approver.cluster,
        "node": approver.node,
        "name": approver.name,
        "address": asking.address,
        "code": asking.code,
        "since": asking.since,
    }
