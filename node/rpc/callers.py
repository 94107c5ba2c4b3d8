"""Admits only nodes to a node's gRPC services; a runner's certificate is for runners' calls.

A runner parses hostile files, so a runner under an attacker's control must not reach Control or
Link.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio

from ...placement.errors import Untrusted
from ..trust.certificates import authenticated_node

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class PeersOnly(grpc.aio.ServerInterceptor):
    """Checks the caller's certificate before any method of any service runs."""

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        return None if handler is None else _guarded(handler)


def _guarded(handler: "Handler") -> "Handler":
    inner: Any = handler
    codec = {
        "request_deserializer": inner.request_deserializer,
        "response_serializer": inner.response_serializer,
    }
    behaviour = inner.unary_unary or inner.stream_unary or inner.unary_stream or inner.stream_stream

    async def one(request: Any, context: "Context") -> Any:
        await _require_node(context)
        return await behaviour(request, context)

    async def many(request: Any, context: "Context") -> AsyncIterator[Any]:
        await _require_node(context)
        async with aclosing(behaviour(request, context)) as answers:
            async for answer in answers:
                yield answer

    match inner.request_streaming, inner.response_streaming:
        case False, False:
            return grpc.unary_unary_rpc_method_handler(one, **codec)
        case True, False:
            return grpc.stream_unary_rpc_method_handler(one, **codec)
        case False, True:
            return grpc.unary_stream_rpc_method_handler(many, **codec)
        case _:
            return grpc.stream_stream_rpc_method_handler(many, **codec)


async def _require_node(context: "Context") -> None:
    try:
        _ = authenticated_node(context.auth_context())
    except Untrusted as fault:
        metadata = (("exo-code", fault.code), ("exo-param", fault.param or ""))
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, fault.message, metadata)
