"""A new cluster key for the nodes that stay, which locks a lost machine out of the cluster.

The key travels over the join port, where each side proves its own key pair to the other's program:
elsewhere the holder of the old cluster key could pass for any node. First every node is asked
whether it can change its key, and nothing is changed unless all can; then all get it and restart.
"""

import asyncio
import secrets
import ssl
from collections.abc import Sequence
from typing import Final

from ...placement.errors import ExoNodeError, InvalidRequest, InvalidSettings, PeerLost, Untrusted
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..cluster.member import MemberFacts
from ..cluster.node_exit import RestartWithKey
from ..trust.certificates import cluster_fingerprint
from ..trust.keys import ClusterKey, parse_cluster_key
from .handshake import PeerIdentity
from .state import JoinState
from .wire import (
    JoinConnection,
    Refusal,
    ask_for_hint,
    connect,
    hello,
    join_address,
    party_of,
    split,
)

TRIES: Final = 3


class Rekeying:
    """Both sides of a rekey, on one node."""

    def __init__(self, state: JoinState, tls: ssl.SSLContext) -> None:
        self._state = state
        self._tls = tls

    async def send(self, excluded: Sequence[str]) -> list[str]:
        """Sends every live member but the excluded a new key; this node takes it last.

        Returns the names of nodes that did not get it although they could have changed. Raises
        InvalidRequest where this node or one of the others cannot change its key.
        """
        self._require_own_key()
        others = [m for m in self._state.members.others() if m.id not in excluded]
        answers = await asyncio.gather(
            *(self._send(m.id, pb.JoinRekey(only_ask=True)) for m in others), return_exceptions=True
        )
        for member, answer in zip(others, answers, strict=True):
            if isinstance(answer, ExoNodeError):
                raise InvalidRequest(
                    f"nothing was changed: {member.facts.name} cannot take a new key: "
                    f"{answer.message}",
                    param="without",
                )
            if isinstance(answer, BaseException):
                raise answer
        return await self._change(others)

    async def _change(self, others: Sequence[MemberFacts]) -> list[str]:
        key = ClusterKey(secrets.token_bytes(20))
        addresses = [self._state.members.address(m.id) for m in others]
        await asyncio.to_thread(self._state.keys.folder.plan_rekey, key)
        rekey = pb.JoinRekey(key=key.text, peers=[self._state.describe_self().address, *addresses])
        deliveries = await asyncio.gather(*(self._try(m.id, rekey) for m in others))
        _ = await asyncio.to_thread(self._state.keys.folder.take, key)
        missed = [m.facts.name for m, ok in zip(others, deliveries, strict=True) if not ok]
        self._restart(tuple(addresses), cluster_fingerprint(key))
        return missed

    async def _try(self, node: NodeId, rekey: pb.JoinRekey) -> bool:
        """Whether one of TRIES deliveries succeeded."""
        for tries_left in reversed(range(TRIES)):
            try:
                await self._send(node, rekey)
            except ExoNodeError:
                if tries_left:
                    await asyncio.sleep(self._state.timing.retry_s)
            else:
                return True
        return False

    async def _send(self, node: NodeId, rekey: pb.JoinRekey) -> None:
        """Sends a member a new key, or asks whether one may come. Raises ExoNodeError."""
        control = self._state.members.address(node)
        hint = await ask_for_hint(control, self._state.timing)
        if hint is None:
            raise PeerLost(f"{control} does not tell its join port")
        address = join_address(split(control)[0], hint.join_port)
        async with connect(address, self._tls, self._state.timing) as line:
            if line.peer.node != node:
                raise Untrusted(f"{address} is {line.peer.node} and not {node}")
            await line.send(hello(self._state.describe_self(), self._state.keys.cluster))
            other = party_of((await line.receive("hello")).hello, line.peer)
            if other.cluster != self._state.keys.fingerprint:
                raise Untrusted(f"{other.name} is of another cluster ({other.cluster})")
            await line.send(pb.JoinFrame(rekey=rekey))
            _ = await line.receive("stored", self._state.timing.slow_reply_s)

    async def receive(self, line: JoinConnection, other: PeerIdentity, rekey: pb.JoinRekey) -> None:
        """Takes a live member's key and restarts; for `only_ask` it only checks. Raises Refusal."""
        if other.node not in [member.id for member in self._state.members.others()]:
            raise Refusal("malformed", "a new key is taken from live members only")
        key = None
        try:
            self._require_own_key()
            if not rekey.only_ask:
                key = parse_cluster_key(rekey.key, "the new key")
                _ = await asyncio.to_thread(self._state.keys.folder.take, key)
        except (InvalidSettings, InvalidRequest) as fault:
            raise Refusal("malformed", fault.message) from fault
        try:
            await line.send(pb.JoinFrame(stored=pb.JoinStored()))
        finally:
            if key is not None:  # it is on the disk, whether or not the other side learns it
                self._restart(tuple(rekey.peers), cluster_fingerprint(key))

    def _require_own_key(self) -> None:
        if (origin := self._state.keys.folder.origin) is not None:
            raise InvalidRequest(
                f"its cluster key comes from {origin}: give it and the others a new one there",
                param=origin,
            )

    def _restart(self, peers: tuple[str, ...], fingerprint: str) -> None:
        text = f"this node has a new cluster key (cluster {fingerprint}) and starts anew with it"
        _ = self._state.events.add("rekeyed", text)
        self._state.ending.decide(RestartWithKey(peers))
