"""Fixtures: a page over a node with fake answers and a fake cluster."""

from collections.abc import Generator

import pytest
from browser import NO_BROWSER, Visit, browsers, installed_browser, visit
from http_node import Node, serving_fakes
from page_cluster import Cluster
from playwright.sync_api import Browser, expect

from exo_node.dashboard import asset
from exo_node.node.machine.events import EventLog

expect.set_options(timeout=20_000)  # a busy machine draws a page late


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a browser, skips the tests with one line for each file."""
    if installed_browser() is None:
        for item in items:
            if "browser" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(NO_BROWSER))


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with browsers() as running:
        yield running


@pytest.fixture
def events() -> EventLog:
    return EventLog()


@pytest.fixture
def node(events: EventLog) -> Generator[Node]:
    with serving_fakes(static=asset, events=events) as running:
        yield running


@pytest.fixture
def cluster(node: Node) -> Cluster:
    return Cluster(node)


@pytest.fixture
def view(browser: Browser, node: Node, cluster: Cluster) -> Generator[Visit]:
    with visit(browser, f"http://127.0.0.1:{node.port}") as page:
        yield page
