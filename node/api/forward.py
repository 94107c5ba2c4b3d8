"""Forwards requests about cluster state to the head, from every other node."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...placement.errors import HeadGone, PeerLost, PeerRefused
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..machine.events import EVENTS_PATH
from ..machine.tasks import cancel, unless
from ..machine.timing import Timing
from .http.dialects import ANSWERING, ANTHROPIC_HEADER, OLLAMA_MODELS, SEARCH_PATH
from .http.guard import METHODS_WITH_BODY
from .http.session_api import SESSION_PATH, TICKET_PATH
from .http.sse import while_attended
from .http.strict_json import decode
from .operations.join_api import JOIN_PREFIX
from .operations.models_api import MODELS_PREFIX, PULL_PATHS
from .operations.operations_api import REACH_PATH
from .shared.profile_file import ProfileFile

LOCAL = (
    "/v1/cluster",
    REACH_PATH,
    "/v1/mtp/stats",
    SEARCH_PATH,
    SESSION_PATH,
    TICKET_PATH,
    *ANSWERING,
)
"""Paths under /v1 that every node answers itself."""
FORWARDED = "forwarded"
"""The client of a request that another node forwarded."""
_OWN_SCOPE = ("scope", "node")
"""The query parameter that asks for this node's own events, not the head's."""
_PROFILES = "profiles"
"""The header of a forwarded request with the entry node's profiles, in JSON."""
_PASSED_ON = ("content-type", "accept", "user-agent", "last-event-id", ANTHROPIC_HEADER)


def naming_profiles(app: ASGIApp, profiles: ProfileFile) -> ASGIApp:
    """ASGI middleware that adds this node's profiles to requests for lists of models, which the
    head answers."""

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        if _lists_models(scope) and not _is_forwarded(scope):
            await profiles.refresh()
            scope["state"]["profiles"] = profiles.listed()
        await app(scope, receive, send)

    return named


class HeadClient(Protocol):
    """The connection to the head, on a node that is not the head."""

    async def head_elsewhere(self) -> NodeId | None:
        """The head's id; None if this node is the head. Waits during an election.

        Raises PeerLost if that takes too long.
        """
        ...

    def node_elsewhere(self, name: str) -> NodeId | None:
        """The live node with that name or id, or None for this one. Raises InvalidRequest."""
        ...

    def http(self, head: NodeId, request: pb.HttpRequest) -> AsyncGenerator[pb.HttpChunk, None]: ...

    async def until_gone(self, node: NodeId) -> None:
        """Returns when that node is dead, has left or has restarted."""
        ...


class HeadForwarder:
    """ASGI middleware inside the guard, which has allowed every request that arrives.

    Requests about a node's files go to the node that their query names. It raises PeerLost if no
    head, or not that node, can answer; the guard turns that into an answer, or ends a stream
    with it.
    """

    def __init__(self, app: ASGIApp, client: HeadClient, timing: Timing) -> None:
        self._app = app
        self._client = client
        self._timing = timing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_of_files(scope):
            await self._to_node(scope, receive, send)
        elif _is_local(scope):
            await self._app(scope, receive, send)
        else:
            await self._to_head(scope, receive, send)

    async def _to_head(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Asks one head after another, this node among them, until one begins an answer.

        An election may take as long as for an answer's claim.
        """
        request = await _collect(scope, receive)
        passage = _Passage(self._client, request, receive, send)
        patience_s, give_up_at = self._timing.election_s, inf
        while True:
            head = await self._client.head_elsewhere()
            asked_at = time.monotonic()
            try:
                if head is None:
                    await self._app(scope, _with_body(request.body, receive), passage.send)
                else:
                    await passage.through(head)
                return
            except PeerLost as fault:
                is_head_lost = head is not None or isinstance(fault, HeadGone)
                if passage.started or not is_head_lost or not _may_be_repeated(request, fault):
                    raise
                now = time.monotonic()
                if now - asked_at > patience_s:
                    give_up_at = inf  # that head had begun its work
                give_up_at = min(give_up_at, now + patience_s)
                if now >= give_up_at:
                    raise
            await asyncio.sleep(self._timing.tick_s)

    async def _to_node(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on to the node that `node` in its query names, if it is another."""
        name = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("node")
        node = None
        if name is not None and not _is_forwarded(scope):
            node = self._client.node_elsewhere(name)
        if node is None:
            await self._app(scope, receive, send)
            return
        request = await _collect(scope, receive)
        await _Passage(self._client, request, receive, send).through(node)


@dataclass
class _Passage:
    """One request on its way to a head, and its answer back."""

    _client: HeadClient
    _request: pb.HttpRequest
    _receive: Receive
    _send: Send
    started: bool = False

    async def through(self, head: NodeId) -> None:
        """Ends with the answer, or with the client. Raises PeerLost as soon as the head is lost.

        gRPC reports a process that ended at once, and a stopped one only after a while; the
        membership may detect that earlier.
        """
        answer = self._client.http(head, self._request)
        relay = unless(
            self._client.until_gone(head),
            self._relay(answer),
            lambda: PeerLost(f"node {head} was lost while it answered; try again"),
        )
        async with aclosing(answer):
            with suppress(ClientDisconnect):
                await while_attended(relay, self._receive)

    async def _relay(self, answer: AsyncGenerator[pb.HttpChunk, None]) -> None:
        async for chunk in answer:
            if not self.started:
                headers = [(k.encode(), v.encode()) for k, v in chunk.headers.items()]
                await self.send(
                    {"type": "http.response.start", "status": chunk.status, "headers": headers}
                )
            await self.send({"type": "http.response.body", "body": chunk.body, "more_body": True})
        if not self.started:
            raise PeerLost("the node ended the request without an answer; try again")
        await self.send({"type": "http.response.body", "body": b""})

    async def send(self, message: Message) -> None:
        self.started = True
        await self._send(message)


def _may_be_repeated(request: pb.HttpRequest, fault: PeerLost) -> bool:
    """Whether it does no harm if two heads attend to it.

    Requests read, measure, or say how the state should be. But a second removal of one of several
    replicas lowers their desired number again.
    """
    return request.method != "DELETE" or isinstance(fault, PeerRefused)


def _is_forwarded(scope: Scope) -> bool:
    return (scope.get("client") or ("",))[0] == FORWARDED


def _lists_models(scope: Scope) -> bool:
    path: str = scope.get("path", "")
    return path in OLLAMA_MODELS or f"{path}/".startswith(MODELS_PREFIX)


def _is_of_files(scope: Scope) -> bool:
    """Whether the request is about the files on one node's disk."""
    path: str = scope.get("path", "")
    if scope["type"] != "http":
        return False
    return path in PULL_PATHS or (scope["method"] == "DELETE" and path.startswith(MODELS_PREFIX))


def _is_local(scope: Scope) -> bool:
    path: str = scope.get("path", "")
    if scope["type"] != "http" or path in LOCAL:
        return True
    if not path.startswith("/v1/") and path not in OLLAMA_MODELS:
        return True
    if path.startswith(f"{JOIN_PREFIX}/"):
        return True
    return path == EVENTS_PATH and _OWN_SCOPE in parse_qsl(scope["query_string"].decode())


async def answer_forwarded(
    app: ASGIApp, request: pb.HttpRequest, host: str, credentials: Mapping[str, str]
) -> AsyncIterator[pb.HttpChunk]:
    """Runs a forwarded request through the head's own application; closing it disconnects.

    `credentials`: headers that the head's guard accepts.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=64)

    async def until_cancelled() -> Message:
        _ = await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def run() -> None:
        receive = _with_body(request.body, until_cancelled)
        try:
            await app(_scope(request, host, credentials), receive, messages.put)
        finally:
            await messages.put(None)

    task = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in message["headers"]}
                yield pb.HttpChunk(status=message["status"], headers=headers)
            elif message.get("body"):
                yield pb.HttpChunk(body=message["body"])
    finally:
        await cancel([task])


async def _collect(scope: Scope, receive: Receive) -> pb.HttpRequest:
    request = Request(scope, receive)
    query = scope["query_string"].decode()
    headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    if profiles := scope.get("state", {}).get("profiles"):
        headers[_PROFILES] = json.dumps(profiles)
    return pb.HttpRequest(
        method=request.method,
        path=scope["path"] + (f"?{query}" if query else ""),
        # The guard bounds the bodies of these.
        body=await request.body() if request.method in METHODS_WITH_BODY else b"",
        headers=headers,
    )


def _with_body(body: bytes, receive: Receive) -> Receive:
    """`receive` for a request with this body, after the real one was read."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def body_first() -> Message:
        return messages.pop() if messages else await receive()

    return body_first


def _scope(request: pb.HttpRequest, host: str, credentials: Mapping[str, str]) -> dict[str, Any]:
    path, _, query = request.path.partition("?")
    name, _, port = host.rpartition(":")
    passed = dict(request.headers)
    profiles = decode(passed.pop(_PROFILES, "{}").encode())
    items = [*passed.items(), *credentials.items()]
    headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in items]
    headers += [(b"host", host.encode()), (b"content-length", str(len(request.body)).encode())]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": headers,
        "client": (FORWARDED, 0),
        "server": (name, int(port)),
        "state": {"profiles": profiles},
    }
