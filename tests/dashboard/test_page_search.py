"""The search of the models page: known ones at once, the hub's when they come, and giving up."""

import contextlib

import pytest
from browser import Visit, found, search
from http_node import Node
from page_cluster import Cluster, hit
from playwright.sync_api import Error, Route, expect

from exo_node.placement.errors import DownloadFailed

pytestmark = pytest.mark.timeout(300)


def test_a_search_that_fails_or_finds_nothing_says_so(
    view: Visit, node: Node, cluster: Cluster
) -> None:
    page = view.go("#/models")
    search(page, "nothing like it")
    expect(page.get_by_text("The hub has no model in safetensors format")).to_be_visible()
    node.files.refusal = DownloadFailed("the hub could not be searched", param="HF_ENDPOINT")
    search(page, "again")
    expect(page.get_by_role("alert")).to_have_text("The hub could not be searched")
    assert view.violations() == []


def test_known_models_are_found_at_once_and_the_hubs_others_when_they_come(
    view: Visit, node: Node, cluster: Cluster
) -> None:
    routes: list[Route] = []
    view.page.route("**/v1/models/search?*source=hub*", lambda route: routes.append(route))
    node.files.cards = [hit("owner/known")]
    page = view.go("#/models")
    search(page, "known")
    expect(found(page).locator(".model-id")).to_have_text(["owner/known"])
    expect(page.get_by_text("Asking the hub…")).to_be_visible()
    assert view.violations() == []
    view.until(lambda: len(routes) == 1)
    routes[0].fulfill(json={"data": [hit("owner/known"), hit("other/known")]})
    expect(found(page).locator(".model-id")).to_have_text(["owner/known", "other/known"])
    expect(page.get_by_text("Asking the hub…")).to_have_count(0)
    assert view.violations() == []
    search(page, "known again")
    view.until(lambda: len(routes) == 2)
    routes[1].fulfill(json={"data": [hit("owner/known")]})
    expect(page.get_by_text("The hub has no other model in safetensors format")).to_be_visible()


@pytest.mark.parametrize("way", ["Escape", "Stop", "a new word", "another search", "elsewhere"])
def test_a_search_that_is_given_up_is_cancelled_and_never_shown(
    view: Visit, node: Node, cluster: Cluster, way: str
) -> None:
    routes: list[Route] = []
    aborted: list[str] = []
    view.page.route("**/v1/models/search?*source=hub*", lambda route: routes.append(route))
    view.page.on("requestfailed", lambda request: aborted.append(request.url))
    page = view.go("#/models")
    search(page, "first")
    view.until(lambda: len(routes) == 1)
    field = page.get_by_label("Name of a model on Hugging Face")
    if way == "Escape":
        field.press("Escape")
        expect(field).to_have_value("first")
        expect(page.get_by_text("Stopped: the hub has not answered for first.")).to_be_visible()
    elif way == "Stop":
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Search", exact=True)).to_be_focused()
    elif way == "a new word":
        field.press_sequentially("er")
    elif way == "another search":
        field.fill("second")
        field.press("Enter")
        view.until(lambda: len(routes) == 2)
        routes[1].fulfill(json={"data": [hit("owner/second")]})
        expect(found(page).locator(".model-id")).to_have_text(["owner/second"])
    else:
        page.get_by_role("navigation").get_by_role("link", name="Settings").click()
    view.until(lambda: routes[0].request.url in aborted)  # and the node's, if it still ran
    expect(page.get_by_text("Asking the hub…")).to_have_count(0)
    with contextlib.suppress(Error):  # nobody waits for it
        routes[0].fulfill(json={"data": [hit("owner/first")]})
    page.wait_for_timeout(200)
    assert page.get_by_text("owner/first").count() == 0


def test_known_models_stay_where_the_hub_does_not_answer(
    view: Visit, node: Node, cluster: Cluster
) -> None:
    node.files.cards = [hit("owner/known")]
    node.files.refusal = DownloadFailed("the hub did not answer", param="HF_ENDPOINT")
    page = view.go("#/models")
    search(page, "known")
    expect(found(page).locator(".model-id")).to_have_text(["owner/known"])
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.get_by_role("button", name="Search", exact=True)).to_be_enabled()
