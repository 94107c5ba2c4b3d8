"""Ends a gRPC call with an error of `placement.errors`."""

from typing import Any, NoReturn

import grpc
import grpc.aio

from ...placement.errors import ExoNodeError, InvalidFrame, InvalidRequest

Context = grpc.aio.ServicerContext[Any, Any]


async def refuse(context: "Context", fault: ExoNodeError) -> NoReturn:
    """Ends a call with an error, which `placement.errors.from_code` restores at the caller."""
    invalid = isinstance(fault, InvalidRequest | InvalidFrame)
    status = grpc.StatusCode.INVALID_ARGUMENT if invalid else grpc.StatusCode.UNAVAILABLE
    metadata = (("exo-code", fault.code), ("exo-param", fault.param or ""))
    await context.abort(status, fault.message, metadata)
