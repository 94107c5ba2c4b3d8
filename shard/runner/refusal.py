"""A call that ends with an error of the tree."""

from typing import Any, NoReturn

import grpc
import grpc.aio

from ...placement.errors import ExoNodeError, InvalidFrame, InvalidRequest

Context = grpc.aio.ServicerContext[Any, Any]


async def refuse(context: "Context", fault: ExoNodeError) -> NoReturn:
    """Ends a call with an error of the tree, which `placement.errors.from_code` rebuilds."""
    invalid = isinstance(fault, InvalidRequest | InvalidFrame)
    status = grpc.StatusCode.INVALID_ARGUMENT if invalid else grpc.StatusCode.UNAVAILABLE
    metadata = (("exo-code", fault.code), ("exo-param", fault.param or ""))
    await context.abort(status, fault.message, metadata)
