"""gRPC servers of this project: what is checked before any of their methods runs."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, ClassVar, Final

import grpc
import grpc.aio

from .bounds import Fault, fault

log = logging.getLogger(__name__)

_MAX_LOGGED: Final = 256


class CheckedCalls(grpc.aio.ServerInterceptor):
    """Runs each call of a server within `around`, which refuses one by aborting it."""

    checks_streams: ClassVar[bool] = True
    """Whether calls with a stream of requests are checked, which `around` gets as an iterator."""

    def around(self, request: Any, context: Any, method: str) -> Any:
        """An asynchronous context manager; `method`: the name without its service."""
        raise NotImplementedError

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or (handler.request_streaming and not self.checks_streams):
            return handler
        method = str(handler_call_details.method).rpartition("/")[2]
        takes = "stream" if handler.request_streaming else "unary"
        kind = f"{takes}_{'stream' if handler.response_streaming else 'unary'}"
        behaviour = getattr(handler, kind)

        async def one(request: Any, context: Any) -> Any:
            async with self.around(request, context, method):
                return await behaviour(request, context)

        async def many(request: Any, context: Any) -> AsyncIterator[Any]:
            async with (
                self.around(request, context, method),
                aclosing(behaviour(request, context)) as answers,
            ):
                async for answer in answers:
                    yield answer

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        checked = many if handler.response_streaming else one
        return make(checked, handler.request_deserializer, handler.response_serializer)


class BoundNumbers(CheckedCalls):
    """Refuses a request with a number out of its bounds, to its sender and once in the log.

    Only of calls with one request: streams of frames and copies have readers of their own.
    """

    checks_streams = False

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    @asynccontextmanager
    async def around(self, request: Any, context: Any, method: str) -> AsyncGenerator[None]:
        if (violation := fault(request)) is not None:
            self._log_once(method, violation, context)
            metadata = (("exo-code", "invalid_value"), ("exo-param", violation.field))
            text = f"{violation.field} {violation.text}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text, metadata)
        yield

    def _log_once(self, method: str, violation: Fault, context: Any) -> None:
        key = (method, violation.field)
        if key not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(key)
            peer = context.peer()
            log.warning("refused %s from %s: %s %s", method, peer, violation.field, violation.text)
