"""Checks the numbers of every request to a gRPC server of this project.

Only of calls with one request: streams of frames and copies have readers of their own.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from .bounds import Fault, fault

log = logging.getLogger(__name__)

_MAX_LOGGED: Final = 256


class BoundNumbers(grpc.aio.ServerInterceptor):
    """Refuses a request with a number out of its bounds, to its sender and once in the log."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's own handler behind the check."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        method = str(handler_call_details.method).rpartition("/")[2]
        if handler.response_streaming:
            return self._many(handler, method)
        return self._one(handler, method)

    def _one(self, handler: Any, method: str) -> Any:
        async def checked(request: Message, context: Any) -> Any:
            await self._check(request, context, method)
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(
            checked, handler.request_deserializer, handler.response_serializer
        )

    def _many(self, handler: Any, method: str) -> Any:
        async def checked(request: Message, context: Any) -> AsyncIterator[Any]:
            await self._check(request, context, method)
            async for answer in handler.unary_stream(request, context):
                yield answer

        return grpc.unary_stream_rpc_method_handler(
            checked, handler.request_deserializer, handler.response_serializer
        )

    async def _check(self, request: Message, context: Any, method: str) -> None:
        violation = fault(request)
        if violation is None:
            return
        self._log_once(method, violation, context)
        metadata = (("exo-code", "invalid_value"), ("exo-param", violation.field))
        text = f"{violation.field} {violation.text}"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text, metadata)

    def _log_once(self, method: str, violation: Fault, context: Any) -> None:
        key = (method, violation.field)
        if key not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(key)
            peer = context.peer()
            log.warning("refused %s from %s: %s %s", method, peer, violation.field, violation.text)
