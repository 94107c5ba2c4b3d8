"""Search, downloads and deletions on the page, over a node with fake answers."""

from typing import Any

import pytest
from browser import DARK, DESK, PHONE, Visit, found, search, visit
from fake_files import state
from fakes import Json
from http_node import Node
from page_cluster import Cluster, hit, member, model
from playwright.sync_api import Browser, Route, expect

from exo_node.placement.errors import RemovalRefused

pytestmark = pytest.mark.timeout(300)

FITS = "box => box.scrollWidth <= box.clientWidth"


def pulling(view: Visit) -> list[str]:
    """The paths and bodies of the requests that changed something."""
    bodies: list[str] = []
    view.page.on(
        "request",
        lambda request: (
            bodies.append(
                f"{request.method} {request.url.removeprefix(view.base)} {request.post_data}"
            )
            if request.method != "GET"
            else None
        ),
    )
    return bodies


@pytest.mark.parametrize("look", [DESK, PHONE, DARK], ids=["desk", "phone", "dark"])
def test_of_several_nodes_each_says_how_fast_it_would_be_and_one_downloads(
    browser: Browser, node: Node, cluster: Cluster, look: dict[str, Any], request: Any
) -> None:
    cluster.nodes = [member(1), member(2)]
    here = model("owner/here", loaded=False, nodes=1) | {"nodes": ["mac-1", "mac-2"]}
    cluster.models = [model("demo", loaded=True, nodes=1), here]
    node.files.found = [
        hit("owner/good"),
        hit("owner/closed", gated=True),
        hit("owner/here"),
    ]
    node.files.listed = [
        state("downloading", 40) | {"model": "owner/slow", "node": "mac-2", "seconds_left": 7200.0},
        state("waiting", 0, None) | {"model": "owner/next"},
        state("failed", 4) | {"error": "owner/broken needs 9 GB more. Free some space."},
    ]
    with visit(browser, f"http://127.0.0.1:{node.port}", **look) as view:
        page = view.go("#/models")
        rows = page.get_by_role("region", name="Downloads").get_by_role("listitem")
        expect(rows.nth(0)).to_contain_text("40 B of 100 B, 40 % · 2 h 0 min left · on mac-2")
        expect(rows.nth(1)).to_contain_text("asking the hub for its files · on mac-1")
        expect(rows.nth(2)).to_contain_text("Free some space.")
        expect(rows.nth(2).get_by_role("button", name="Resume")).to_be_enabled()
        search(page, "good")
        alone = "mac-1 alone: too small · mac-2 alone: estimated 31.2 tok/s"
        expect(found(page).first).to_contain_text(alone)
        expect(found(page).nth(1)).to_contain_text("gated")
        expect(found(page).last).to_contain_text("on mac-1, mac-2")
        bodies = pulling(view)
        page.get_by_role("button", name="Download owner/good").click()
        expected = 'POST /v1/models/pull?node=mac-2 {"model":"owner/good","stream":false}'
        view.until(lambda: bodies == [expected])
        page.get_by_label("Download to").select_option("mac-1")
        page.get_by_role("button", name="Download owner/closed").click()
        view.until(lambda: len(bodies) == 2)
        assert f"?node={cluster.nodes[0]['id']} " in bodies[1]
        assert page.locator("main").evaluate(FITS), "main scrolls sideways"
        assert view.violations() == []
        view.shot(f"models-nodes-{request.node.callspec.id}")


def test_a_model_on_two_disks_is_deleted_from_the_chosen_one(
    view: Visit, node: Node, cluster: Cluster
) -> None:
    cluster.nodes = [member(1), member(2)]
    cluster.models = [model("own/er", loaded=False, nodes=1) | {"nodes": ["mac-1", "mac-2"]}]
    page = view.go("#/models")
    page.get_by_role("button", name="Delete own/er").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("from mac-1's disk and frees 100 B")
    dialog.get_by_label("From the disk of").select_option("mac-2")
    expect(dialog).to_contain_text("from mac-2's disk")
    bodies = pulling(view)
    dialog.get_by_role("button", name="Delete, free").click()
    deletion = "DELETE /v1/models/own/er?node=mac-2 None"
    view.until(lambda: ("remove", "own/er", False) in node.files.calls)
    assert [each for each in bodies if "dry_run" not in each] == [deletion]


def test_a_refusal_says_why_before_anything_is_deleted(
    view: Visit, node: Node, cluster: Cluster
) -> None:
    cluster.models = [model("own/er", loaded=False, nodes=1)]
    node.files.refusal = RemovalRefused("own/er lies in a folder of yours", param="model")
    page = view.go("#/models")
    page.get_by_role("button", name="Delete own/er").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("alert")).to_have_text("own/er lies in a folder of yours")
    expect(dialog.get_by_role("button", name="Delete")).to_be_disabled()
    assert view.violations() == []


def test_an_offline_node_says_so_and_a_visitor_may_change_nothing(
    view: Visit, node: Node, cluster: Cluster
) -> None:
    def joining(route: Route) -> None:
        route.fulfill(json={"data": [], "asking": [], "may_decide": False})

    node.files.listed = [state("paused", 40)]
    cluster.models = [model("own/er", loaded=False, nodes=1)]
    view.page.route("**/v1/join/requests", joining)
    page = view.go("#/models")
    for name in ("Resume the download", "Cancel the download", "Delete own/er"):
        expect(page.get_by_role("button", name=name)).to_be_disabled()
    expect(page.get_by_label("Name of a model on Hugging Face")).to_be_disabled()
    view.page.unroute("**/v1/join/requests")
    cluster.identity = {"offline": "EXO_OFFLINE"}
    page.reload()
    expect(page.get_by_text("This node is offline (EXO_OFFLINE)")).to_be_visible()
    expect(page.get_by_label("Name of a model on Hugging Face")).to_be_disabled()
    expect(page.get_by_role("button", name="Delete own/er")).to_be_enabled()
    assert view.violations() == []


def test_progress_is_asked_for_only_while_a_download_runs(
    view: Visit, node: Node, cluster: Cluster
) -> None:
    node.files.listed = [state("paused", 40)]
    view.page.clock.install()
    page = view.go("#/models")
    expect(page.get_by_role("region", name="Downloads")).to_contain_text("paused")
    before = view.count_requests("/v1/models/pull")
    page.clock.run_for(20_000)
    assert view.count_requests("/v1/models/pull") == before
    node.files.listed = [state("downloading", 50)]
    page.get_by_role("button", name="Resume the download").click()
    expect(page.get_by_role("region", name="Downloads")).to_contain_text("50 %")
    node.files.listed = []
    page.clock.run_for(1_100)
    expect(page.get_by_role("region", name="Downloads")).to_have_count(0)


@pytest.mark.parametrize("look", [DESK, PHONE, DARK], ids=["desk", "phone", "dark"])
def test_mine_come_first_and_a_row_has_size_speed_one_badge_and_no_refused_button(
    browser: Browser, node: Node, cluster: Cluster, look: dict[str, Any], request: Any
) -> None:
    fast = {"nodes": 1, "needed_bytes": 9 * 10**9, "tokens_per_second": 31.2}
    plain = {"native_mtp": None, "mtp": "the checkpoint has no MTP head"}
    cluster.models = [
        model("demo", loaded=False, nodes=1, kept="it is part of exo-node", parameters=10**7),
        model("mine/folder", loaded=False, nodes=1, **plain, kept="/srv/m is a folder of yours"),
        model("mine/large", loaded=False, nodes=0),
        *(model(f"mine/model-{n}", loaded=False, nodes=1, fits=fast) for n in range(17)),
    ]

    async def listed() -> Json:
        cards = [model("hub/best", loaded=False, nodes=1, fits=fast, drafts=True)]
        return {"data": [each | {"downloaded": False, "recommended": 1} for each in cards]}

    node.operations.catalogue = listed  # type: ignore[method-assign]
    with visit(browser, f"http://127.0.0.1:{node.port}", **look) as view:
        page = view.go("#/models")
        expect(page.get_by_role("region", name="Recommended")).to_be_visible()
        names = [each.get_attribute("aria-label") for each in page.locator("main section").all()]
        mine = ["On disk", "On disk, too large"]
        assert names[:4] == [*mine, "Recommended", "Find a model"]
        row = page.locator("li.model", has_text="mine/model-16")
        expect(row.locator("> p")).to_have_text(
            ["mine/model-16drafts for itself", "33 MB · estimated 31.2 tok/s"]
        )
        kept = page.locator("li.model", has_text="mine/folder")
        expect(kept.get_by_role("button")).to_have_text(["Load…", "Chat"])
        expect(kept.get_by_text("MTP")).to_have_count(0)
        kept.get_by_text("Details").click()
        expect(kept.get_by_text("Not deleted from here: /srv/m is a folder")).to_be_visible()
        large = page.locator("li.model", has_text="mine/large")
        expect(large.locator(".badge")).to_have_text("too large")
        expect(large.get_by_role("button")).to_have_text(["Delete…"])
        assert page.locator("main").evaluate(FITS), "main scrolls sideways"
        assert view.violations() == []
        view.shot(f"models-{request.node.callspec.id}")
