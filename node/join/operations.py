"""What a person does about joining, over HTTP: see who waits, decide, take a key, leave, rekey."""

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from ...placement.errors import InvalidRequest, InvalidSettings, JoinRefused
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..cluster.member import MemberFacts
from ..cluster.node_exit import RestartWithKey
from ..machine.node_names import matching_nodes
from ..trust.certificates import cluster_fingerprint
from ..trust.keys import parse_cluster_key
from .asker import Asking
from .handshake import parse_code, refuse_malformed_code
from .joining import Joining
from .requests import Request, not_found


def on_the_wire(request: Request) -> pb.JoinRequest:
    """For the other members."""
    party = request.party
    return pb.JoinRequest(
        id=request.id,
        node=party.node,
        name=party.name,
        chip=party.chip,
        version=party.version,
        address=request.address,
    )


class JoinOperations:
    """Every node answers these for itself; a decision goes to the member where the node waits."""

    def __init__(self, joining: Joining) -> None:
        self._joining = joining

    def requests(self, *, trusted: bool) -> dict[str, Any]:
        """Who waits to be let in, here or at another member; whom this node asks itself.

        The digits that let this node in are for who may decide on it (`trusted`).
        """
        joining = self._joining
        name = joining.state.own().name
        data = [_shown_request(each, joining.state.node, name, here=True) for each in self._own()]
        data += [
            _shown_request(each, member.id, member.facts.name, here=False)
            for member in joining.state.members.others()
            for each in member.facts.join_requests
        ]
        return {
            "object": "list",
            "data": data,
            "asking": [_shown_asking(each) for each in joining.asker.asking()],
            "node": joining.state.node,
            "digits": joining.asker.code if trusted else None,
            "failure": joining.asker.failure or None,
            "may_decide": trusted,
            "fresh": joining.state.fresh,
            "open": joining.state.open_name is not None,
        }

    async def approve(self, id_: str, code: str) -> dict[str, Any]:
        """Lets the node in that shows these digits; returns when it has the key.

        Raises InvalidRequest, JoinRequestNotFound, DigitsDiffer, JoinRefused, PeerLost.
        """
        digits = parse_code(code)
        if digits is None:
            raise refuse_malformed_code(code)
        decided = await self._decide(id_, digits)
        return {"id": id_, "node": decided.node, "name": decided.name, "approved": True}

    async def deny(self, id_: str) -> dict[str, Any]:
        """Raises JoinRequestNotFound, PeerLost."""
        decided = await self._decide(id_, "")
        return {"id": id_, "node": decided.node, "name": decided.name, "approved": False}

    async def decide(self, decision: pb.JoinDecision) -> pb.JoinDecided:
        """On a node that waits here; empty digits deny it. Raises as `approve`."""
        if decision.code:
            party = await self._joining.approver.let_in(decision.id, decision.code)
        else:
            party = self._joining.approver.deny(decision.id)
        return pb.JoinDecided(node=party.node, name=party.name)

    async def take_key(self, text: str) -> dict[str, Any]:
        """`exo-node join KEY`. Raises InvalidRequest."""
        with _as_request_fault("key"):
            key = parse_cluster_key(text, "the key")
            aside = await asyncio.to_thread(self._joining.state.folder.take, key)
        if aside is not None:
            self._joining.state.ending.rekeyed(RestartWithKey("given"))
        return {"cluster": cluster_fingerprint(key), "changed": aside is not None}

    async def leave(self) -> dict[str, Any]:
        """`exo-node leave`. Raises InvalidRequest."""
        with _as_request_fault("body"):
            _ = await asyncio.to_thread(self._joining.state.folder.leave)
        self._joining.state.ending.rekeyed(RestartWithKey("left"))
        return {"left": self._joining.state.fingerprint}

    async def rekey(self, without: Sequence[str], *, drop_absent: bool) -> dict[str, Any]:
        """A new cluster key for all live members but `without`.

        Raises InvalidRequest; JoinRefused where others are away, unless they may be dropped.
        """
        joining = self._joining
        others, absent = joining.state.members.others(), joining.state.members.absent()
        excluded = [_meant(name, [*others, *absent]) for name in without]
        away = [m for m in absent if m.id not in excluded]
        if away and not drop_absent:
            raise JoinRefused(
                f"nothing was changed: {_listed(away)} cannot be reached and would be left out of "
                "the cluster; bring them back first, or leave them out with --yes",
                param="without",
            )
        with joining.state.doing("changes the cluster key"), _as_request_fault("without"):
            missed = await joining.rekeying.send(excluded)
        told = [m.facts.name for m in others if m.id not in excluded]
        return {
            "kept": [name for name in told if name not in missed],
            "missed": missed,
            "excluded": [*excluded, *(m.id for m in away)],
        }

    async def _decide(self, id_: str, code: str) -> pb.JoinDecided:
        decision = pb.JoinDecision(id=id_, code=code)
        if (owner := self._owner(id_)) is None:
            return await self.decide(decision)
        joining = self._joining
        return await joining.client.decide_join(
            joining.state.members.address(owner), owner, decision
        )

    def _owner(self, id_: str) -> NodeId | None:
        """The other member at which a request waits; None: it is this node's, or nobody's."""
        for member in self._joining.state.members.others():
            if any(request.id == id_ for request in member.facts.join_requests):
                return member.id
        if all(request.id != id_ for request in self._joining.desk.pending()):
            raise not_found()
        return None

    def _own(self) -> list[pb.JoinRequest]:
        return [on_the_wire(request) for request in self._joining.desk.pending()]


def _shown_request(
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
        "at": {"node": at, "name": at_name, "self": here},
    }


def _shown_asking(asking: Asking) -> dict[str, Any]:
    """One of `asking`."""
    approver = asking.approver
    return {
        "cluster": approver.cluster,
        "node": approver.node,
        "name": approver.name,
        "address": asking.address,
        "since": asking.since,
    }


def _meant(name: str, known: Sequence[MemberFacts]) -> str:
    """The id of the node that a name or the beginning of an id means. Raises InvalidRequest."""
    found = matching_nodes(name, known, name=lambda m: m.facts.name, id=lambda m: m.id)
    if len(found) == 1:
        return found[0].id
    raise InvalidRequest(
        f"'{name[:64]}' means {'several nodes' if found else 'no other node'} of this cluster; "
        f"the others are: {_listed(known) or 'none'}",
        param="without",
    )


def _listed(members: Sequence[MemberFacts]) -> str:
    return ", ".join(f"{m.facts.name} ({m.id})" for m in members)


@contextmanager
def _as_request_fault(param: str) -> Generator[None]:
    """What is wrong with this node's settings is, over HTTP, wrong with the request."""
    try:
        yield
    except InvalidSettings as fault:
        raise InvalidRequest(fault.message, param=param) from fault
