"""The HTTP side of a node, for clients and for peers that forward their requests."""

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..dashboard import asset
from ..proto import peer_pb2 as pb
from .api.forward import HeadForwarder, answer_forwarded
from .api.http.connection_limits import ConnectionLimits
from .api.http.drain import Drain
from .api.http.guard import Access
from .api.server import HttpServer, Services, build_app
from .api.shared.profile_file import ProfileFile
from .chat.chat import ChatService
from .chat.metrics import Metrics
from .chat.totals import Totals
from .head_client import ClusterHead
from .join.operations import JoinOperations
from .local_node import LocalNode
from .machine.open_files import connections_within, soft_limit
from .machine.setting_values import is_loopback
from .node_models import NodeModels
from .operations import NodeOperations
from .peering import PeerWiring
from .placements.placements import Placements
from .placements.planner_view import NodeFactsSource
from .placements.stage_runners import ClusterStages
from .trust.api_tokens import ApiTokens
from .trust.local_token import TOKEN_HEADER, LocalToken

CONNECTIONS = 256
_LOG: Final = logging.getLogger(__name__)


class NodeApi:
    """The application with its services, and the server that runs it."""

    def __init__(
        self,
        local: LocalNode,
        peering: PeerWiring,
        placements: Placements,
        stages: ClusterStages,
        facts: NodeFactsSource,
        head: ClusterHead,
        leaving: Drain,
    ) -> None:
        self._local = local
        self._settings = settings = local.settings
        timing = local.timing
        self._token = LocalToken.load(settings.data_dir)
        _delete_stored_responses(settings.data_dir / "responses")
        beyond = not is_loopback(settings.host)
        self._tokens = ApiTokens(settings.data_dir, always=beyond)
        metrics = Metrics(Totals())
        self._chat = ChatService(head, stages, metrics, timing, guards_loops=settings.loop_guard)
        operations = NodeOperations(local, peering, placements, facts, metrics, self._tokens)
        profiles = ProfileFile(settings.profiles_file)
        self._models = NodeModels(local, peering, operations.model_list, stages.local)
        services = Services(
            self._chat,
            operations,
            events=local.events,
            joining=JoinOperations(peering.joining),
            profiles=profiles,
            files=self._models,
        )
        access = Access(
            hosts=(*_host_names(settings.host), *settings.allowed_hosts),
            origins=settings.allowed_origins,
            api_key=self._api_key,
            token=self._token,
            tokens=self._tokens,
        )
        self._app = build_app(
            services,
            asset,
            timing,
            access,
            between=lambda app: leaving.around(HeadForwarder(app, head, timing)),
        )
        limits = ConnectionLimits(connections=connections_within(soft_limit(), CONNECTIONS))
        self._server = HttpServer(self._app, limits=limits, grace_s=timing.grace_s)

    async def start(self) -> int:
        """Returns the port. Raises InvalidSettings where it is in use."""
        await self._server.start(self._settings.host, self._settings.port)
        return self._server.port

    async def pause_downloads(self) -> None:
        """They would hold a node that stops for hours, and resume where they were."""
        await self._models.close()

    async def close(self) -> None:
        await self._models.close()
        await self._server.close()

    def answer(self, request: pb.HttpRequest) -> AsyncIterator[pb.HttpChunk]:
        """A request that another node forwarded to this one as the head."""
        host = f"{self._settings.host}:{self._local.http_port}"
        return answer_forwarded(self._app, request, host, self._credentials())

    def login_link(self, address: str) -> str:
        """A link to the dashboard with the rights of the node's own user, valid once."""
        return f"http://{address}/#login={self._token.ticket()}"

    @property
    def answer_events(self) -> int:
        """Number of events that this node's clients were sent; grows while an answer progresses."""
        return self._chat.events

    def _credentials(self) -> dict[str, str]:
        """Headers with which this node calls its own application: the caller was checked there."""
        if (key := self._api_key) is not None:
            return {"authorization": f"Bearer {key}"}
        return {TOKEN_HEADER: self._token.text}

    @property
    def _api_key(self) -> str | None:
        key = self._settings.api_key
        return None if key is None else key.get_secret_value()


def _delete_stored_responses(folder: Path) -> None:
    """Deletes the conversations that earlier versions stored there: nothing reads them any more."""
    for path in folder.glob("responses.db*"):
        try:
            path.unlink()
            _LOG.warning("deleted %s: responses are no longer stored on the disk", path)
        except OSError as fault:
            _LOG.warning("%s has conversations that nothing reads; delete it: %s", path, fault)
    with suppress(OSError):  # it is not there, or has other files
        folder.rmdir()


def _host_names(host: str) -> list[str]:
    """Host names by which browsers may address this node if it listens beyond loopback."""
    if is_loopback(host):
        return []
    name = socket.gethostname().removesuffix(".local")
    return [host, name, f"{name}.local"]
