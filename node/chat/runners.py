"""Calls to runners, on any node of the cluster."""

from collections.abc import AsyncGenerator
from typing import Protocol

from ...placement.ids import PlacementId
from ...proto import peer_pb2 as pb
from ..runners.runner_client import Endpoint


class Runners(Protocol):
    """The runners as the entry node calls them."""

    def generate(
        self, endpoint: Endpoint, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        """Generates an answer; closing it cancels. Raises PeerLost, or the runner's own error."""
        ...

    async def encode(self, endpoint: Endpoint, request: pb.EncodeRequest) -> pb.EncodeReply:
        """Tokenises a prompt on the runner. Raises PeerLost, or the runner's own error."""
        ...

    async def find_prefix(self, endpoint: Endpoint, request: pb.GenerateRequest) -> pb.CachedPrefix:
        """How much of a request's prompt the runner has cached; it waits for no computation.

        Raises PeerLost, also where encoding the prompt takes too long, and the runner's refusal.
        """
        ...

    async def ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        """The runner's state, within a second. Raises PeerLost."""
        ...

    async def forget(self, stage: Endpoint) -> None:
        """Closes the connection to a runner that is lost."""
        ...

    def near(self, stage: Endpoint) -> Endpoint:
        """The endpoint of a runner, with the address that is quickest from this node."""
        ...
