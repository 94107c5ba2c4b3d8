"""A server over fakes for each file of tests, and the official clients as clients of it."""

from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import pytest
from http_node import Node, serving_fakes


@pytest.fixture(scope="module")
def running() -> Generator[Node]:
    with serving_fakes() as node:
        yield node


@pytest.fixture
def node(running: Node) -> Node:
    """The shared server, with the scripts of a new one."""
    running.chat.reset()
    return running


@pytest.fixture
def closing() -> Generator[ExitStack]:
    """Closes clients at the end of the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def openai(node: Node, closing: ExitStack) -> Any:
    return _client("openai", "OpenAI", f"http://127.0.0.1:{node.port}/v1", closing)


@pytest.fixture
def anthropic(node: Node, closing: ExitStack) -> Any:
    return _client("anthropic", "Anthropic", f"http://127.0.0.1:{node.port}", closing)


def _client(package: str, kind: str, url: str, closing: ExitStack) -> Any:
    """A client that does not retry; skips the test where its package is not installed."""
    client = getattr(pytest.importorskip(package), kind)
    return closing.enter_context(client(base_url=url, api_key="any", max_retries=0))


@pytest.fixture
def ollama(node: Node, closing: ExitStack) -> Any:
    client: Any = pytest.importorskip("ollama").Client(host=f"http://127.0.0.1:{node.port}")
    closing.callback(client._client.close)
    return client
