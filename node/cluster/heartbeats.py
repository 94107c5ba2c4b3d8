"""Heartbeats as messages, and what `GET /v1/cluster` shows of the nodes that send them."""

from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from ...placement.errors import InvalidRequest
from ...placement.ids import NodeId, Term
from ...proto import peer_pb2 as pb
from ...proto.bounds import fault
from .cluster_state import Heartbeat
from .election import LeaderClaim
from .member import MemberFacts
from .membership import Status, View

_TO_WIRE: Mapping[Status, pb.ViewStatus.ValueType] = {
    "alive": pb.VIEW_STATUS_ALIVE,
    "suspect": pb.VIEW_STATUS_SUSPECT,
    "dead": pb.VIEW_STATUS_DEAD,
}
_FROM_WIRE: Mapping[int, Status] = {number: status for status, number in _TO_WIRE.items()}


_NODE_FACTS = (
    *("id", "name", "version", "host", "port", "http_host", "http_port"),
    *("chip", "backend", "memory_bytes", "memory_bandwidth"),
)
_STAGE_FACTS = (
    *("placement", "model", "stage", "status", "progress", "pid", "live_requests"),
    *("weight_bytes", "checkpoint_bytes_read", "cache_bytes", "prefix_cache_bytes"),
    *("prefix_disk_bytes", "prefix_disk_rows", "prefix_memory_rows", "prefix_peer_rows"),
    "peak_memory_bytes",
)

_Message = TypeVar("_Message", bound=Message)


def checked(message: _Message, sender: str) -> _Message:
    """The same message. Raises InvalidRequest where a number in it is out of its bounds."""
    if (wrong := fault(message)) is not None:
        text = f"{sender} sent {wrong.field} that {wrong.text}; nothing of that message counts"
        raise InvalidRequest(text, param=wrong.field)
    return message


def fill(message: pb.Heartbeat, beat: Heartbeat) -> None:
    """Writes `beat` into a message that has the sender's facts already."""
    message.incarnation, message.boot_id = beat.incarnation, beat.boot_id
    message.term, message.head = beat.claim.term, beat.claim.head or ""
    message.followers, message.head_for_s = beat.claim.followers, beat.claim.head_for_s
    message.draining = beat.draining
    for view in beat.views:
        status = _TO_WIRE[view.status]
        message.views.append(pb.View(node=view.node, incarnation=view.incarnation, status=status))


def read(sender: NodeId, message: pb.Heartbeat) -> Heartbeat:
    """Reads the heartbeat of `sender`; views of a status that is unknown here are left out."""
    views = (
        View(NodeId(view.node), view.incarnation, _FROM_WIRE[view.status])
        for view in message.views
        if view.status in _FROM_WIRE
    )
    claim = LeaderClaim(
        term=Term(message.term),
        head=NodeId(message.head) if message.head else None,
        followers=message.followers,
        head_for_s=message.head_for_s,
    )
    return Heartbeat(
        sender, message.boot_id, message.incarnation, claim, tuple(views), draining=message.draining
    )


def describe_node(member: MemberFacts, status: str) -> dict[str, Any]:
    """An entry of `nodes` in the body of `GET /v1/cluster`."""
    facts = {name: getattr(member.facts, name) for name in _NODE_FACTS}
    return {**facts, "status": status, "stages": [_describe_stage(each) for each in member.stages]}


def _describe_stage(state: pb.StageState) -> dict[str, Any]:
    facts = {name: getattr(state, name) for name in _STAGE_FACTS}
    layers = [state.first_layer, state.end_layer]
    return {**facts, "layers": layers, "error": state.error or None}
