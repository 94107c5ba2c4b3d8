"""Requests leave no objects behind in the node's process, and no work for the garbage collector.

The whole app behind real HTTP, and the node's own client of runners over gRPC; the runner at its
other end is a script.
"""

import asyncio
import gc
import json
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from fakes import NODE, FakeFacts, FakeOperations, FakeStages, OneHead, leading
from http_node import no_files

from exo_node.mtp.types import GenerationStats
from exo_node.node.api.server import HttpServer, Services, build_app
from exo_node.node.chat.chat import ChatService
from exo_node.node.chat.metrics import Metrics
from exo_node.node.chat.totals import Totals
from exo_node.node.machine.timing import LOCAL
from exo_node.node.rpc.channels import Channels
from exo_node.node.runners.runner_client import Endpoint, RunnerClient
from exo_node.node.trust.certificates import (
    node_credentials,
    runner_credentials,
    server_credentials,
)
from exo_node.node.trust.keys import load_or_create_cluster_key, load_or_create_identity
from exo_node.placement.ids import NodeId
from exo_node.proto import peer_pb2 as pb
from exo_node.proto import peer_pb2_grpc
from exo_node.shard.runner.generator_wire import stats_to_wire

ROUNDS, WINDOWS = 5, 3
"""A window has this many requests of each kind. A leak of one request grows with every window."""
ENDLESS = 7
"""Tokens of an answer that does not end; the client of such a one goes away."""
PATIENCE_S = 60.0
_STATS = stats_to_wire(GenerationStats("native_mtp", 1, "", "greedy", 3, 2), "bitwise")
_RUNNING = ("coroutine", "async_generator", "frame", "traceback")


_SERVICER: Any = peer_pb2_grpc.GeneratorServicer


class _Script(_SERVICER):
    """Two tokens for each request."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        yield pb.GenerateEvent(started=pb.Started(prompt_ids=[7, 8, 9]))
        for token in (5, 6):
            delta = pb.Delta(text="a", round=pb.Round(tokens=[token]))
            delta.pieces.add(text="a")
            yield pb.GenerateEvent(delta=delta)
        if request.limits.max_tokens == ENDLESS:
            _ = await asyncio.Event().wait()
        yield pb.GenerateEvent(finished=pb.Finished(reason="stop", stats=_STATS))

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeReply:
        return pb.EncodeReply(ids=[1, 2], context_length=64)


@dataclass(kw_only=True)
class _Runners(FakeStages):
    """Stages at that port, loaded at once."""

    client: RunnerClient
    port: int

    async def load(self, node: NodeId, spec: pb.StageSpec, progress: Any) -> pb.LoadReady:
        return pb.LoadReady(
            host="127.0.0.1", port=self.port, mtp_head="loaded", greedy_identity="bitwise"
        )

    def generate(
        self, endpoint: Endpoint, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        return self.client.generate(endpoint, request)

    async def encode(self, endpoint: Endpoint, request: pb.EncodeRequest) -> pb.EncodeReply:
        return await self.client.encode(endpoint, request)


@asynccontextmanager
async def _node(folder: Path) -> AsyncGenerator[int]:
    """The port of an app with everything behind it but a model, all in this loop."""
    key, identity = load_or_create_cluster_key(folder), load_or_create_identity(folder)
    runner = grpc.aio.server()
    peer_pb2_grpc.add_GeneratorServicer_to_server(_Script(), runner)
    credentials = server_credentials(runner_credentials(NODE, key))
    port = runner.add_secure_port("127.0.0.1:0", credentials)
    await runner.start()
    channels = Channels(node_credentials(identity, key))
    facts, totals = FakeFacts(), Totals()
    stages = _Runners(client=RunnerClient(channels, LOCAL), port=port)
    placements = leading(stages, facts)
    heads, metrics = OneHead(placements, facts), Metrics(totals)
    chat = ChatService(heads, stages, metrics, LOCAL)
    app = build_app(Services(chat, FakeOperations()), no_files, LOCAL)
    server = HttpServer(app, grace_s=0)
    await server.start("127.0.0.1", 0)
    try:
        yield server.port
    finally:
        await server.close()
        await placements.close()
        await channels.close()
        await runner.stop(None)


_ASK: dict[str, Any] = {"model": "demo", "temperature": 0}
_MESSAGES: dict[str, Any] = {**_ASK, "messages": [{"role": "user", "content": "hi"}]}
_LIMITED: dict[str, Any] = {**_MESSAGES, "max_tokens": 3}
KINDS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "chat completions": ("/v1/chat/completions", _MESSAGES, b'"choices"'),
    "completions": ("/v1/completions", {**_ASK, "prompt": "hi"}, b'"choices"'),
    "responses": ("/v1/responses", {**_ASK, "input": "hi", "store": False}, b'"output"'),
    "messages": ("/v1/messages", _LIMITED, b"end_turn"),
    "ollama's chat": ("/api/chat", {"stream": False, **_MESSAGES}, b'"done":true'),
    "ollama's generate": (
        "/api/generate",
        {**_ASK, "prompt": "hi", "stream": False},
        b'"done":true',
    ),
    "tokens": ("/v1/messages/count_tokens", _MESSAGES, b'"input_tokens"'),
    "bad field": ("/v1/chat/completions", {**_MESSAGES, "max_tokens": "x"}, b"max_tokens"),
    "no such model": ("/v1/chat/completions", {**_MESSAGES, "model": "nobody"}, b"nobody"),
}
"""Path, body, and what is in the answer. A response that may be continued is kept for an hour."""


def _requests() -> Iterator[tuple[str, dict[str, Any], bytes]]:
    for path, body, expected in KINDS.values():
        yield path, body, expected
        if "count_tokens" not in path:
            yield path, {**body, "stream": True}, expected


async def _ask(port: int, path: str, body: dict[str, Any], expected: bytes) -> None:
    """Reads the answer, which contains `expected`; a client that leaves stops reading there."""
    leaves = body.get("max_tokens") == ENDLESS
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + content)
    got = await (reader.readuntil(expected) if leaves else reader.read())
    assert expected in got, got
    writer.close()
    await writer.wait_closed()


async def _round(port: int) -> None:
    for path, body, expected in _requests():
        await _ask(port, path, body, expected)
    endless = {**_MESSAGES, "max_tokens": ENDLESS, "stream": True}
    await _ask(port, "/v1/chat/completions", endless, b"data: ")


async def _quiet(tasks: int) -> None:
    """Waits until at most `tasks` tasks run: the end of an answer may run after its last byte.

    Then makes asyncio drop cancelled timers, which it does when there are many.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE_S):
        while len(asyncio.all_tasks()) > tasks:
            await asyncio.sleep(0.01)
    for _ in range(1000):
        loop.call_later(PATIENCE_S, print).cancel()
    await asyncio.sleep(0)


def _alive() -> Counter[str]:
    """Objects by type, and what all containers hold."""
    objects: list[object] = gc.get_objects()
    counts = Counter[str]()
    for each in objects:
        kind = type(each)
        counts[f"{kind.__module__}.{kind.__qualname__}"] += 1
        if isinstance(each, dict | list | set | deque):
            counts["held"] += len(each)  # pyright: ignore[reportUnknownArgumentType]
    return counts


def _ours(kind: str) -> bool:
    """asyncio and gRPC's server have cycles of their own, one for each connection and call."""
    module, _, name = kind.rpartition(".")
    return module.startswith(("exo_node.", "grpc.aio.")) or name in _RUNNING


@pytest.fixture
def uncollected() -> Generator[None]:
    """No garbage is collected but by hand, and what there was before is not looked at."""
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.usefixtures("uncollected")
async def test_requests_leave_nothing_behind(tmp_path: Path) -> None:
    """Neither for good nor, of what is the node's own, until the garbage collector comes by."""
    leaked, waiting = dict[str, int](), dict[str, int]()
    async with _node(tmp_path) as port:
        await _ask(port, *KINDS["chat completions"])
        idle = len(asyncio.all_tasks())
        for window in range(WINDOWS + 1):
            before = _alive()
            for _ in range(ROUNDS if window else 3):
                await _round(port)
            await _quiet(idle)
            ended = _alive()
            gc.collect()
            collected = _alive()
            if window:  # the first one fills what is filled once
                _least(leaked, before, collected)
                _least(waiting, before, ended)
    # A table that grows by steps grows in one window or another, a leak in each.
    assert not {kind: n for kind, n in leaked.items() if n >= ROUNDS}
    assert not {kind: n for kind, n in waiting.items() if n >= ROUNDS and _ours(kind)}


def _least(least: dict[str, int], before: Counter[str], after: Counter[str]) -> None:
    for kind, count in after.items():
        grown = count - before[kind]
        least[kind] = min(grown, least.get(kind, grown))
