"""Requests about cluster state go to the head, whichever node they reach."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..placement.errors import ExoNodeError
from ..placement.ids import NodeId
from ..proto import peer_pb2 as pb

log = logging.getLogger(__name__)

LOCAL = ("/v1/cluster",)
"""What every node answers for itself, under /v1."""
_PASSED_ON = ("content-type", "accept", "user-agent")


class HeadClient(Protocol):
    """The way to the head, where this node is not it."""

    def head_elsewhere(self) -> NodeId | None:
        """The head's id; None while this node is the head."""
        ...

    def http(self, head: NodeId, request: pb.HttpRequest) -> AsyncGenerator[pb.HttpChunk, None]: ...


class HeadForwarder:
    """ASGI middleware inside the guard: what arrives here is allowed already."""

    def __init__(
        self,
        app: ASGIApp,
        client: HeadClient,
        refuse: Callable[[ExoNodeError], ASGIApp],
    ) -> None:
        """`refuse` makes the response of an error, in the API's shape."""
        self._app = app
        self._client = client
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = self._client.head_elsewhere() if scope["type"] == "http" else None
        path: str = scope.get("path", "")
        if head is None or not path.startswith("/v1/") or path in LOCAL:
            await self._app(scope, receive, send)
            return
        request = await _collect(scope, receive)
        answer = self._client.http(head, request)
        gone = asyncio.create_task(_disconnected(receive))
        relay = asyncio.create_task(self._relay(answer, scope, receive, send))
        try:
            _ = await asyncio.wait({gone, relay}, return_when=asyncio.FIRST_COMPLETED)
            if relay.done():
                relay.result()
        finally:
            for task in (gone, relay):
                _ = task.cancel()
            _ = await asyncio.gather(gone, relay, return_exceptions=True)
            await answer.aclose()

    async def _relay(
        self,
        answer: AsyncGenerator[pb.HttpChunk, None],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        started = False
        try:
            async for chunk in answer:
                if not started:
                    started = True
                    headers = [(k.encode(), v.encode()) for k, v in chunk.headers.items()]
                    await send(
                        {"type": "http.response.start", "status": chunk.status, "headers": headers}
                    )
                body = {"type": "http.response.body", "body": chunk.body, "more_body": True}
                await send(body)
        except ExoNodeError as fault:
            if started:
                raise  # the connection breaks off: headers are out and no error fits any more
            await self._refuse(fault)(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": b""})


async def answer_forwarded(
    app: ASGIApp, request: pb.HttpRequest, host: str, api_key: str | None
) -> AsyncIterator[pb.HttpChunk]:
    """Runs a forwarded request through the head's own application; closing it disconnects."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=64)
    body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        _ = await asyncio.Event().wait()  # until the task is cancelled
        raise AssertionError("unreachable")

    async def run() -> None:
        try:
            await app(_scope(request, host, api_key), receive, messages.put)
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
        _ = task.cancel()
        _ = await asyncio.gather(task, return_exceptions=True)


async def _collect(scope: Scope, receive: Receive) -> pb.HttpRequest:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    query = scope["query_string"].decode()
    headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
    return pb.HttpRequest(
        method=scope["method"],
        path=scope["path"] + (f"?{query}" if query else ""),
        body=body,
        headers={name: headers[name] for name in _PASSED_ON if name in headers},
    )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _scope(request: pb.HttpRequest, host: str, api_key: str | None) -> dict[str, Any]:
    path, _, query = request.path.partition("?")
    name, _, port = host.rpartition(":")
    headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in request.headers.items()]
    headers += [(b"host", host.encode()), (b"content-length", str(len(request.body)).encode())]
    if api_key is not None:
        headers.append((b"authorization", f"Bearer {api_key}".encode()))
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
        "client": ("forwarded", 0),
        "server": (name, int(port)),
    }
