"""A person's operations on joining, over HTTP: list, approve, deny, take a key, leave."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from ...placement.errors import InvalidRequest, InvalidSettings
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..cluster.node_exit import RestartWithKey
from ..trust.certificates import cluster_fingerprint
from ..trust.keys import parse_cluster_key
from .calls import JoinApplication
from .handshake import parse_code, refuse_malformed_code
from .joining import Joining
from .requests import PendingRequest, not_found

_PARTY_FACTS: Final = ("node", "name", "chip", "version")
"""The fields of PeerIdentity that a JoinRequest and the API have under the same names."""


def request_message(request: PendingRequest) -> pb.JoinRequest:
    """The request as heartbeats carry it to the other members."""
    party = {name: getattr(request.party, name) for name in _PARTY_FACTS}
    return pb.JoinRequest(id=request.id, address=request.address, **party)


class JoinOperations:
    """One node's operations; a decision is forwarded to the member at which the node waits."""

    def __init__(self, joining: Joining) -> None:
        self._joining = joining

    def requests(self, *, trusted: bool) -> dict[str, Any]:
        """The nodes that wait at any member, and the clusters that this node asks itself.

        A caller that may decide (`trusted`) gets the digits of this node as well.
        """
        joining = self._joining
        name = joining.state.describe_self().name
        data = [
            _request_entry(request_message(each), joining.state.node, name, here=True)
            for each in joining.requests.pending()
        ]
        data += [
            _request_entry(each, member.id, member.facts.name, here=False)
            for member in joining.state.members.others()
            for each in member.facts.join_requests
        ]
        return {
            "object": "list",
            "data": data,
            "asking": [_application_entry(each) for each in joining.asker.calls.applications()],
            "not_asked": [
                {"cluster": cluster, "name": name}
                for cluster, name in joining.asker.calls.closed_names.items()
            ],
            "node": joining.state.node,
            "digits": joining.asker.code if trusted else None,
            "failure": joining.asker.failure or None,
            "may_decide": trusted,
            "fresh": joining.state.fresh,
        }

    async def approve(self, id_: str, code: str) -> dict[str, Any]:
        """Lets the node in that shows these digits; returns once it has the key.

        Raises InvalidRequest, JoinRequestNotFound, DigitsDiffer, JoinRefused, PeerLost.
        """
        if (digits := parse_code(code)) is None:
            raise refuse_malformed_code(code)
        return await self._decide(id_, digits)

    async def deny(self, id_: str) -> dict[str, Any]:
        """Refuses the node. Raises JoinRequestNotFound, PeerLost."""
        return await self._decide(id_, "")

    async def decide(self, decision: pb.JoinDecision) -> pb.JoinDecided:
        """Decides on a node that waits here; empty digits deny it. Raises as `approve`."""
        if decision.code:
            party = await self._joining.approver.let_in(decision.id, decision.code)
        else:
            party = self._joining.approver.deny(decision.id)
        return pb.JoinDecided(node=party.node, name=party.name)

    async def take_key(self, text: str) -> dict[str, Any]:
        """Takes a cluster key, for `exo-node join`, and restarts. Raises InvalidRequest."""
        with _as_request_fault("key"):
            key = parse_cluster_key(text, "the key")
            backup = await asyncio.to_thread(self._joining.state.keys.folder.take, key)
        if backup is not None:
            self._joining.state.ending.decide(RestartWithKey())
        return {"cluster": cluster_fingerprint(key), "changed": backup is not None}

    async def ask_again(self) -> dict[str, Any]:
        """Asks clusters that a person made this node leave, or that denied it, for
        `exo-node join --again`. Raises InvalidRequest."""
        calls = self._joining.asker.calls
        with _as_request_fault("body"):
            await asyncio.to_thread(self._joining.state.keys.folder.forget_left_clusters)
        names = list(calls.closed_names.values())
        calls.ask_again()
        return {"asked": names}

    async def leave(self) -> dict[str, Any]:
        """Founds a cluster of one, for `exo-node leave`, and restarts. Raises InvalidRequest."""
        with _as_request_fault("body"):
            _ = await asyncio.to_thread(self._joining.state.keys.folder.leave)
        self._joining.state.ending.decide(RestartWithKey())
        return {"left": self._joining.state.keys.fingerprint}

    async def _decide(self, id_: str, code: str) -> dict[str, Any]:
        joining, decision = self._joining, pb.JoinDecision(id=id_, code=code)
        if (owner := self._owner(id_)) is None:
            party = await self.decide(decision)
        else:
            address = joining.state.members.address(owner)
            party = await joining.client.decide_join(address, owner, decision)
        return {"id": id_, "node": party.node, "name": party.name, "approved": bool(code)}

    def _owner(self, id_: str) -> NodeId | None:
        """The member at which a request waits, or None if here. Raises JoinRequestNotFound."""
        for member in self._joining.state.members.others():
            if any(request.id == id_ for request in member.facts.join_requests):
                return member.id
        if all(request.id != id_ for request in self._joining.requests.pending()):
            raise not_found()
        return None


def _request_entry(
    request: pb.JoinRequest, at: NodeId, at_name: str, *, here: bool
) -> dict[str, Any]:
    """An entry of `data`; `at` is the member at which the node waits."""
    fields = {name: getattr(request, name) for name in ("id", *_PARTY_FACTS, "address")}
    return fields | {"at": {"node": at, "name": at_name, "self": here}}


def _application_entry(application: JoinApplication) -> dict[str, Any]:
    """An entry of `asking`."""
    approver = application.approver
    return {
        "cluster": approver.cluster,
        "node": approver.node,
        "name": approver.name,
        "address": application.address,
        "since": application.since,
    }


@contextmanager
def _as_request_fault(param: str) -> Generator[None]:
    """Turns InvalidSettings into InvalidRequest of that parameter."""
    try:
        yield
    except InvalidSettings as fault:
        raise InvalidRequest(fault.message, param=param) from fault
