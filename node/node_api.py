"""The HTTP side of a node, for clients and for peers that forward their requests."""

import socket
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from starlette.types import ASGIApp

from ..dashboard import asset
from ..proto import peer_pb2 as pb
from .api.connection_limits import ConnectionLimits
from .api.drain import Drain
from .api.forward import HeadForwarder, answer_forwarded
from .api.guard import Access
from .api.profile_file import ProfileFile
from .api.server import HttpServer, Services, build_app
from .chat.chat import ChatService
from .chat.metrics import Metrics
from .chat.readiness import Readiness
from .chat.totals import Totals
from .head_client import ClusterHead
from .join.operations import JoinOperations
from .local_node import LocalNode
from .machine.events import EventLog
from .machine.open_files import connections_within, soft_limit
from .machine.setting_values import is_loopback
from .machine.settings import Settings
from .machine.tasks import Loops
from .machine.timing import Timing
from .model_list import ModelList
from .operations import NodeOperations
from .peering import PeerWiring
from .placements.placements import Placements
from .placements.planner_view import NodeFactsSource
from .placements.stage_runners import ClusterStages
from .store.fetching import ModelFetcher
from .trust.api_tokens import ApiTokens
from .trust.certificates import clock_trouble
from .trust.local_token import TOKEN_HEADER, LocalToken

CONNECTIONS = 256


class NodeApi:
    """The application with everything behind it, and the server that runs it."""

    def __init__(
        self,
        settings: Settings,
        local: LocalNode,
        peering: PeerWiring,
        facts: NodeFactsSource,
        placements: Placements,
        stages: ClusterStages,
        head: ClusterHead,
        leaving: Drain,
        events: EventLog,
        loops: Loops,
        timing: Timing,
        fetcher: ModelFetcher,
    ) -> None:
        self._settings = settings
        self._fetcher = fetcher
        self._local = local
        self._peering = peering
        self._facts = facts
        self._placements = placements
        self._stages = stages
        self._head = head
        self._leaving = leaving
        self._events = events
        self._loops = loops
        self._timing = timing
        self._token = LocalToken.load(settings.data_dir)
        beyond = not is_loopback(settings.host)
        self._tokens = ApiTokens(settings.data_dir, always=beyond)
        self._app = self._build()
        limits = ConnectionLimits(connections=connections_within(soft_limit(), CONNECTIONS))
        self._server = HttpServer(self._app, limits=limits, grace_s=timing.serving.grace_s)

    async def start(self) -> int:
        """Returns the port. Raises InvalidSettings where it is in use."""
        await self._server.start(self._settings.host, self._settings.port)
        return self._server.port

    async def close(self) -> None:
        """Lets answers in progress go on for a while."""
        await self._server.close()

    def answer(self, request: pb.HttpRequest) -> AsyncIterator[pb.HttpChunk]:
        """A request that another node forwarded to this one as the head."""
        host = f"{self._settings.host}:{self._local.http_port}"
        return answer_forwarded(self._app, request, host, self._credentials())

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

    def _build(self) -> ASGIApp:
        totals = Totals()
        metrics = Metrics(totals)
        self._chat = ChatService(self._head, self._stages, totals, metrics, self._timing.chat)
        services = Services(
            self._chat,
            self._operations(totals, metrics),
            events=self._events,
            measurements=self._local.profiling,
            joining=JoinOperations(self._peering.joining),
            profiles=ProfileFile(self._settings.profiles_file),
        )
        access = Access(
            hosts=(*_host_names(self._settings.host), *self._settings.allowed_hosts),
            origins=self._settings.allowed_origins,
            api_key=self._api_key,
            token=self._token,
            tokens=self._tokens,
        )
        return build_app(
            services,
            asset,
            self._timing.serving,
            access,
            between=lambda app: self._leaving.around(HeadForwarder(app, self._head)),
            version=self._local.version,
        )

    def _operations(self, totals: Totals, metrics: Metrics) -> NodeOperations:
        return NodeOperations(
            ModelList(
                self._local.library,
                self._placements,
                self._peering.cluster,
                self._facts,
                int(time.time()),
            ),
            self._placements,
            Readiness(self._placements, self._stages, self._timing.chat),
            self._peering.cluster,
            self._facts,
            self._local.switches,
            totals,
            metrics,
            self._local.version,
            self._trouble,
            self._peering.search.reach,
            self._fetcher.layout,
            lambda: self._tokens.trouble,
            self._local.library.offline_by,
        )

    def _trouble(self) -> str:
        own = (self._peering.cluster.trouble(), self._loops.trouble())
        return "; ".join(filter(None, (*own, clock_trouble(datetime.now(UTC)))))


def _host_names(host: str) -> list[str]:
    """Host names by which browsers may address this node if it listens beyond loopback."""
    if is_loopback(host):
        return []
    name = socket.gethostname().removesuffix(".local")
    return [host, name, f"{name}.local"]
