"""The page after a node was lost: what is, with names, and nothing of what was."""

from typing import Any

import pytest
from browser import DARK, DESK, PHONE, visit
from http_node import Node
from page_cluster import Cluster, copy, member, model
from playwright.sync_api import Browser, Route, expect

pytestmark = pytest.mark.timeout(300)

REASON = "mac-1 + mac-2 + mac-3: mac-1 layers 0-5, mac-2 layers 5-10, because it was asked for; why"


def stages(*numbers: int) -> list[dict[str, Any]]:
    ends = [0, 5, 10, 16]
    return [
        {"node": member(number)["id"], "layers": ends[at : at + 2], "status": "ready"}
        for at, number in enumerate(numbers)
    ]


@pytest.mark.parametrize("look", [DESK, PHONE, DARK], ids=["desk", "phone", "dark"])
def test_the_page_shows_where_the_layers_are_now(
    browser: Browser, node: Node, cluster: Cluster, look: dict[str, Any], request: Any
) -> None:
    cluster.nodes = [member(1), member(2, status="dead"), member(3)]
    cluster.models = [model("demo", loaded=True, nodes=1)]
    moved = "mac-1 has the layers of mac-2, which was lost"
    where = {"stages": stages(1, 1, 3), "reason": REASON, "moved": moved}
    cluster.placements = [copy(1, asked_for="at least 3 nodes", **where)]
    with visit(browser, f"http://127.0.0.1:{node.port}", **look) as view:
        page = view.go("#/cluster")
        drawing = page.locator(".topology")
        expect(drawing.locator(".hop")).to_have_count(1)  # from mac-1 to mac-3, and not mac-2
        expect(page.locator("header .state")).to_have_class("state warn")
        expect(page.get_by_text(moved)).to_be_visible()
        expect(page.get_by_text(REASON)).to_be_hidden()
        view.shot(f"lost-{request.node.callspec.id}")
        page.get_by_text("Why", exact=True).click()
        expect(page.get_by_text(REASON)).to_be_visible()
        expect(page.get_by_text("Placed with at least 3 nodes, as was asked for.")).to_be_visible()
        assert view.violations() == []
        page.get_by_role("button", name="Drop that").click()
        body = {"model": "demo", "min_nodes": 1, "replicas": 1}
        view.until(lambda: cluster.requested == [body])
        view.go("#/chat")
        expect(page.locator("header .where")).to_have_text("mac-1 → mac-3")
        expect(page.get_by_text("Loaded on mac-1, mac-3.")).to_be_visible()


def test_a_cluster_that_was_left_is_named_and_asked_again_by_a_button(
    browser: Browser, node: Node, cluster: Cluster
) -> None:
    asked: list[str] = []

    def joining(route: Route) -> None:
        left = [] if asked else [{"cluster": "c" * 16, "name": "studio"}]
        route.fulfill(json={"data": [], "asking": [], "not_asked": left, "may_decide": True})

    def again(route: Route) -> None:
        asked.append(route.request.method)
        route.fulfill(json={"asked": ["studio"]})

    with visit(browser, f"http://127.0.0.1:{node.port}", **PHONE) as view:
        view.page.route("**/v1/join/requests", joining)
        view.page.route("**/v1/join/again", again)
        page = view.go("#/cluster")
        notice = page.get_by_text("This node left the cluster of studio, or was turned away there")
        expect(notice).to_be_visible()
        assert view.violations() == []
        view.shot("left")
        page.get_by_role("button", name="Ask again").click()
        expect(notice).to_have_count(0)
        expect(page.get_by_text("This node asks again")).to_be_visible()
        assert asked == ["POST"]
