"""A stub of the node's HTTP API for the tests of commands."""

from collections.abc import Generator

import pytest
from api_stub import Stub, serve_stub


@pytest.fixture
def stub() -> Generator[Stub]:
    with serve_stub() as served:
        yield served
