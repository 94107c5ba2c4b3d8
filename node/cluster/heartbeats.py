"""Heartbeats as messages, and what `GET /v1/cluster` shows of the nodes that send them."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from ...placement.errors import InvalidRequest
from ...placement.ids import NodeId, Term
from ...proto import peer_pb2 as pb
from ...proto.bounds import fault
from .cluster_state import Heartbeat
from .election import LeaderClaim
from .membership import Status, View

_TO_WIRE: Mapping[Status, pb.ViewStatus.ValueType] = {
    "alive": pb.VIEW_STATUS_ALIVE,
    "suspect": pb.VIEW_STATUS_SUSPECT,
    "dead": pb.VIEW_STATUS_DEAD,
}
_FROM_WIRE: Mapping[int, Status] = {number: status for status, number in _TO_WIRE.items()}


_Message = TypeVar("_Message", bound=Message)


def checked(message: _Message, sender: str) -> _Message:
    """The same message. Raises InvalidRequest where a number in it is out of its bounds."""
    if (found := fault(message)) is not None:
        text = f"{sender} sent {found.field} that {found.text}; nothing of that message counts"
        raise InvalidRequest(text, param=found.field)
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
    """What the heartbeat of `sender` says; views of a status that is unknown here are left out."""
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


def describe_node(
    facts: pb.NodeFacts,
    states: Iterable[pb.StageState],
    status: str,
    *,
    head: NodeId | None,
    itself: bool,
) -> dict[str, Any]:
    """One of `nodes`."""
    return {
        "id": facts.id,
        "name": facts.name,
        "version": facts.version,
        "host": facts.host,
        "port": facts.port,
        "http_host": facts.http_host,
        "http_port": facts.http_port,
        "chip": facts.chip,
        "backend": facts.backend,
        "memory_bytes": facts.memory_bytes,
        "memory_bandwidth": facts.memory_bandwidth,
        "status": status,
        "self": itself,
        "head": facts.id == head,
        "stages": [_stage(state) for state in states],
    }


def _stage(state: pb.StageState) -> Mapping[str, Any]:
    return {
        "placement": state.placement,
        "model": state.model,
        "stage": state.stage,
        "layers": [state.first_layer, state.end_layer],
        "status": state.status,
        "weight_bytes": state.weight_bytes,
        "checkpoint_bytes_read": state.checkpoint_bytes_read,
        "cache_bytes": state.cache_bytes,
        "prefix_cache_bytes": state.prefix_cache_bytes,
        "peak_memory_bytes": state.peak_memory_bytes,
        "live_requests": state.live_requests,
        "progress": state.progress,
        "pid": state.pid,
        "error": state.error or None,
    }
