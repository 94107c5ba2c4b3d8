"""Admits only nodes to a node's gRPC services; a runner's certificate is for runners' calls.

A runner parses hostile files, so a runner under an attacker's control must not reach Control or
Link.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from ...placement.errors import ExoNodeError, InvalidRequest, Untrusted
from ...proto.checked_calls import CheckedCalls
from ..trust.certificates import authenticated_node


class PeersOnly(CheckedCalls):
    """Checks the caller's certificate before any method, whose errors become the call's status."""

    @asynccontextmanager
    async def around(self, request: Any, context: Any, method: str) -> AsyncGenerator[None]:
        try:
            _ = authenticated_node(context.auth_context())
            yield
        except ExoNodeError as fault:
            status = grpc.StatusCode.UNAVAILABLE
            if isinstance(fault, InvalidRequest):
                status = grpc.StatusCode.INVALID_ARGUMENT
            elif isinstance(fault, Untrusted):
                status = grpc.StatusCode.UNAUTHENTICATED
            metadata = (("exo-code", fault.code), ("exo-param", fault.param or ""))
            await context.abort(status, fault.message, metadata)
