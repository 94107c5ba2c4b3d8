"""Ends a gRPC call with an error of `placement.errors`."""

import logging
from typing import Any, NoReturn

import grpc
import grpc.aio

from ...placement.errors import ExoNodeError, InvalidFrame, InvalidRequest

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


async def refuse(context: "Context", fault: ExoNodeError) -> NoReturn:
    """Ends a call with an error, which `placement.errors.from_code` restores at the caller."""
    invalid = isinstance(fault, InvalidRequest | InvalidFrame)
    status = grpc.StatusCode.INVALID_ARGUMENT if invalid else grpc.StatusCode.UNAVAILABLE
    metadata = (("exo-code", fault.code), ("exo-param", fault.param or ""))
    await context.abort(status, fault.message, metadata)


def as_public(fault: BaseException) -> ExoNodeError:
    """The error of a computation for its client; what is no ExoNodeError is logged."""
    if isinstance(fault, ExoNodeError):
        return fault
    log.error("a computation failed", exc_info=fault)
    # Not PeerLost: the runner lives, and the same request would fail again.
    return ExoNodeError(f"the computation failed: {type(fault).__name__}; see the log")
