"""A node's control port refuses every call with a runner's certificate (M9)."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from exo_node.node.rpc.control_server import ControlServer, NodeCalls
from exo_node.node.rpc.link_rpc import LinkService
from exo_node.node.rpc.model_files import FileSource, ModelFilesService
from exo_node.node.trust.certificates import (
    Credentials,
    channel_credentials,
    node_credentials,
    node_name,
    runner_credentials,
)
from exo_node.node.trust.keys import ClusterKey, Identity, load_or_create_identity
from exo_node.proto import peer_pb2 as pb

KEY = ClusterKey(bytes(range(20)))
SERVICES = ("Membership", "Control", "Link", "ModelFiles")
DESCRIBED = cast(Any, pb.DESCRIPTOR).services_by_name
METHODS = [
    pytest.param(f"/exo.{service}/{method.name}", method, id=f"{service}.{method.name}")
    for service in SERVICES
    for method in DESCRIBED[service].methods
]


class NoNode:
    """A node that records each attribute that a method reads, and raises for it."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.reached.append(name)
        raise AssertionError(f"{name} was reached")


@asynccontextmanager
async def served(side: NoNode) -> AsyncGenerator[tuple[str, Identity]]:
    with tempfile.TemporaryDirectory() as folder:
        identity = load_or_create_identity(Path(folder))
        links = LinkService()
        files = ModelFilesService(cast(FileSource, side), lambda: False)
        server = ControlServer(cast(NodeCalls, side), node_credentials(identity, KEY), links, files)
        port = await server.start(["127.0.0.1"], 0)
        try:
            yield f"127.0.0.1:{port}", identity
        finally:
            await server.close()


async def call(path: str, method: Any, credentials: Credentials) -> tuple[Any, list[str]]:
    """(the final status of a call under `credentials`, the attributes that it reached)."""
    side = NoNode()
    async with served(side) as (address, identity):
        options = [("grpc.ssl_target_name_override", node_name(identity.node))]
        channel = grpc.aio.secure_channel(address, channel_credentials(credentials), options)
        async with channel:
            full = path.replace("/exo.", f"/{method.containing_service.file.package}.")
            stream = cast(Any, channel).stream_stream(full)(_bytes(), timeout=60)
            try:
                async for _ in stream:
                    pass
            except grpc.aio.AioRpcError as fault:
                return fault.code(), side.reached
            return grpc.StatusCode.OK, side.reached


async def _bytes() -> AsyncIterator[bytes]:
    yield b""


@pytest.mark.parametrize(("path", "method"), METHODS)
def test_a_runners_certificate_is_refused_by_every_method(
    tmp_path: Path, path: str, method: Any
) -> None:
    identity_of_the_runner = load_or_create_identity(Path(tmp_path))
    credentials = runner_credentials(identity_of_the_runner.node, KEY)
    status, reached = asyncio.run(call(path, method, credentials))
    assert (status, reached) == (grpc.StatusCode.UNAUTHENTICATED, [])


def test_a_nodes_certificate_is_accepted(tmp_path: Path) -> None:
    method = DESCRIBED["Link"].methods_by_name["Echo"]
    identity = load_or_create_identity(Path(tmp_path))
    credentials = node_credentials(identity, KEY)
    status, reached = asyncio.run(call("/exo.Link/Echo", method, credentials))
    assert (status, reached) == (grpc.StatusCode.OK, [])
