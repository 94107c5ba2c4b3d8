"""The world of tests with an argument of that name: they run in virtual time."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from cluster_world import VirtualLoop, World, known_nodes
from loops import TestLoop


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    is_virtual = "world" in request.fixturenames
    return "asyncio", {"loop_factory": VirtualLoop if is_virtual else TestLoop}


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncGenerator[World]:
    """Nodes that know each other; the mark `world` may give their `count` and `room`."""
    node: Any = request.node
    mark: Any = node.get_closest_marker("world")
    options: dict[str, Any] = mark.kwargs if mark else {}
    async with known_nodes(**options) as nodes:
        yield nodes
