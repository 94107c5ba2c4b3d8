"""Heartbeats pass, whatever the number of other calls to the same node."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from exo_node.node.api.http.connection_limits import ConnectionLimits
from exo_node.node.machine.timing import LAN
from exo_node.node.rpc.channels import Channels
from exo_node.node.rpc.control_client import ControlClient
from exo_node.node.rpc.control_server import NODE_SERVER_OPTIONS
from exo_node.node.trust.certificates import node_credentials, server_credentials
from exo_node.node.trust.keys import load_or_create_cluster_key, load_or_create_identity
from exo_node.proto import peer_pb2 as pb
from exo_node.proto import peer_pb2_grpc

STREAMS = 4


class _Membership(peer_pb2_grpc.MembershipServicer):
    """Answers heartbeats at once."""

    async def Exchange(self, request: pb.Heartbeat, context: Any) -> pb.Heartbeat:
        return pb.Heartbeat(protocol=request.protocol)


async def _never_ends(request: pb.HttpRequest, context: Any) -> AsyncIterator[pb.HttpChunk]:
    yield pb.HttpChunk()
    _ = await asyncio.Event().wait()


def _http() -> grpc.GenericRpcHandler:
    """A handler of the Control service's forwarded requests alone."""
    handler = grpc.unary_stream_rpc_method_handler(
        _never_ends,  # pyright: ignore[reportArgumentType]
        request_deserializer=pb.HttpRequest.FromString,
        response_serializer=pb.HttpChunk.SerializeToString,
    )
    return grpc.method_handlers_generic_handler("exo_node.v1.Control", {"Http": handler})


async def test_heartbeats_pass_streams_that_wait(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path)
    credentials = node_credentials(identity, load_or_create_cluster_key(tmp_path))
    server = grpc.aio.server(options=[("grpc.max_concurrent_streams", STREAMS)])
    peer_pb2_grpc.add_MembershipServicer_to_server(_Membership(), server)
    server.add_generic_rpc_handlers((_http(),))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(credentials))
    await server.start()
    channels = Channels(credentials)
    client, address = ControlClient(channels, LAN), f"127.0.0.1:{port}"

    async def follow() -> None:
        async for _ in client.http(address, identity.node, pb.HttpRequest()):
            pass

    streams = [asyncio.create_task(follow()) for _ in range(3 * STREAMS)]
    await asyncio.sleep(0.5)
    try:
        beat = await client.exchange(address, identity.node, pb.Heartbeat(protocol=7))
        assert beat.protocol == 7
    finally:
        for stream in streams:
            _ = stream.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            _ = await asyncio.gather(*streams, return_exceptions=True)
        await channels.close()
        await server.stop(grace=None)


def test_a_connection_carries_every_request_that_http_may_forward() -> None:
    assert dict(NODE_SERVER_OPTIONS)["grpc.max_concurrent_streams"] > ConnectionLimits().connections
