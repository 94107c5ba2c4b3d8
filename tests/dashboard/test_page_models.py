"""Models found, downloaded and deleted on the page: over a real node and a hub on loopback."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import DARK, DESK, PHONE, Visit, visit
from fake_files import state
from fakes import Json
from http_node import Node
from hub import MODEL, REPOSITORY, FakeHub, serve
from models import make_checkpoint
from nodes import Node as RealNode
from nodes import node as real_node
from page_cluster import Cluster, member, model
from playwright.sync_api import Browser, Locator, Page, Route, expect

from exo_node.placement.errors import DownloadFailed, RemovalRefused

pytestmark = pytest.mark.timeout(300)

FITS = "box => box.scrollWidth <= box.clientWidth"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = make_checkpoint(tmp_path / "source", "qwen3_5", hidden=256)
    hub = FakeHub({path.name: path.read_bytes() for path in folder.iterdir()})
    hub.others["other/gguf"] = {"config.json": b"{}", "model.gguf": b"x"}
    with serve(hub):
        yield hub


@pytest.fixture
def running(hub: FakeHub, tmp_path: Path) -> Iterator[RealNode]:
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    with real_node(tmp_path / "mac-1", "--no-mdns", env=env) as node:
        yield node


def own_page(view: Visit, running: RealNode) -> Page:
    """The models, with the rights of the node's own user."""
    ticket = running.call("POST", "/v1/session/ticket", {}).body["ticket"]
    page = view.go(f"#login={ticket}")
    expect(page.get_by_label("Message")).to_be_enabled()
    return view.go("#/models")


def found(page: Page) -> Locator:
    return page.get_by_role("region", name="Find a model").get_by_role("listitem")


def search(page: Page, text: str) -> None:
    page.get_by_label("Name of a model on Hugging Face").fill(text)
    page.get_by_role("button", name="Search", exact=True).click()


@pytest.mark.parametrize("look", [DESK, PHONE], ids=["desk", "phone"])
def test_a_model_is_found_downloaded_paused_resumed_and_deleted(
    browser: Browser, running: RealNode, hub: FakeHub, look: dict[str, Any], request: Any
) -> None:
    kind, total = request.node.callspec.id, sum(map(len, hub.files.values()))
    with visit(browser, f"http://127.0.0.1:{running.port}", **look) as view:
        page = own_page(view, running)
        search(page, "t")
        expect(found(page)).to_have_count(2)
        expect(found(page).first).to_contain_text("6.2 MB · bfloat16 · fits on one node · about")
        expect(found(page).first).to_contain_text("1,234 downloads a month · 5 likes")
        expect(found(page).last).to_contain_text("Not usable: other/gguf has no config.json")
        assert found(page).last.get_by_role("button").count() == 0
        assert view.violations() == []
        view.shot(f"models-found-{kind}")

        hub.slow_s = 0.1
        page.get_by_role("button", name=f"Download {REPOSITORY}").click()
        region = page.get_by_role("region", name="Downloads")
        expect(region).to_contain_text(re.compile(r"\d+ [kM]B of 6\.2 MB, \d+ %"))
        bar = region.get_by_role("progressbar", name=f"Downloaded of {REPOSITORY}")
        view.until(lambda: float(bar.get_attribute("value") or 0) > 0.1)
        expect(region).to_contain_text("B/s")
        region.get_by_text("2 files").click()
        expect(region.get_by_role("progressbar", name=MODEL)).to_be_visible()
        expect(found(page).first).to_contain_text("downloading")
        assert view.violations() == []
        view.shot(f"models-downloading-{kind}")

        region.get_by_role("button", name=f"Pause the download of {REPOSITORY}").click()
        expect(region.locator(".state")).to_have_text("paused")
        assert hub.ranges(MODEL) == [None]
        page.reload()
        hub.slow_s = 0
        region.get_by_role("button", name=f"Resume the download of {REPOSITORY}").click()
        expect(region).to_have_count(0)
        [_, resumed] = hub.ranges(MODEL)
        assert resumed is not None and 0 < int(resumed[6:-1]) < total

        here = page.get_by_role("region", name="On disk", exact=True)
        expect(here).to_contain_text("tiny")
        page.get_by_role("button", name=f"Delete {REPOSITORY}").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("from the disk and frees 6.2 MB")
        assert view.violations() == []
        view.shot(f"models-delete-{kind}")
        dialog.get_by_role("button", name="Keep").click()
        expect(dialog).to_have_count(0)
        page.get_by_role("button", name=f"Delete {REPOSITORY}").click()
        dialog.get_by_role("button", name="Delete, free 6.2 MB").click()
        expect(here).not_to_contain_text("tiny")
        assert not list((running.data_dir.parent / "hf" / "hub").glob("models--*"))
        assert page.locator("main").evaluate(FITS), "main scrolls sideways"


def test_a_download_is_cancelled_after_a_second_question(
    browser: Browser, running: RealNode, hub: FakeHub
) -> None:
    hub.slow_s = 0.1
    with visit(browser, f"http://127.0.0.1:{running.port}") as view:
        page = own_page(view, running)
        search(page, "tiny")
        page.get_by_role("button", name=f"Download {REPOSITORY}").click()
        region = page.get_by_role("region", name="Downloads")
        bar = region.get_by_role("progressbar", name=f"Downloaded of {REPOSITORY}")
        view.until(lambda: float(bar.get_attribute("value") or 0) > 0.05)
        region.get_by_role("button", name=f"Cancel the download of {REPOSITORY}").click()
        region.get_by_role("button", name="Keep").click()
        expect(region.locator(".state")).to_have_text("downloading")
        region.get_by_role("button", name=f"Cancel the download of {REPOSITORY}").click()
        region.get_by_role("button", name="Cancel and delete").click()
        expect(region).to_have_count(0)
        assert not list((running.data_dir.parent / "hf" / "hub").glob("models--*"))


# ------------------------------------------------------------------ over a node with fake answers


def hit(id: str, **more: Any) -> Json:
    fits = {"nodes": 1, "needed_bytes": 9 * 10**9, "tokens_per_second": 31.2, "on": ["mac-2"]}
    by_node = [
        {"node": "mac-1", "fits": False, "tokens_per_second": None},
        {"node": "mac-2", "fits": True, "tokens_per_second": 31.2},
    ]
    return {
        "id": id,
        "size_bytes": 17 * 10**9,
        "download_bytes": 17 * 10**9,
        "format": "4-bit",
        "context_length": 262_144,
        "downloads": 12_345,
        "likes": 67,
        "gated": False,
        "downloaded": False,
        "nodes": [],
        "fits": fits,
        "by_node": by_node,
        **more,
    }


def pulling(view: Visit) -> list[str]:
    """The paths and bodies of the requests that changed something."""
    sent: list[str] = []
    view.page.on(
        "request",
        lambda request: (
            sent.append(
                f"{request.method} {request.url.removeprefix(view.base)} {request.post_data}"
            )
            if request.method != "GET"
            else None
        ),
    )
    return sent


@pytest.mark.parametrize("look", [DESK, PHONE, DARK], ids=["desk", "phone", "dark"])
def test_of_several_nodes_each_says_how_fast_it_would_be_and_one_downloads(
    browser: Browser, node: Node, cluster: Cluster, look: dict[str, Any], request: Any
) -> None:
    cluster.nodes = [member(1), member(2)]
    node.files.found = [
        hit("owner/good"),
        hit("owner/closed", gated=True),
        hit("owner/here", downloaded=True, nodes=["mac-1", "mac-2"]),
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
        alone = "mac-1 alone: too small · mac-2 alone: about 31.2 tok/s"
        expect(found(page).first).to_contain_text(alone)
        expect(found(page).nth(1)).to_contain_text("gated")
        expect(found(page).last).to_contain_text("on mac-1, mac-2")
        sent = pulling(view)
        page.get_by_role("button", name="Download owner/good").click()
        expected = 'POST /v1/models/pull?node=mac-2 {"model":"owner/good","stream":false}'
        view.until(lambda: sent == [expected])
        page.get_by_label("Download to").select_option("mac-1")
        page.get_by_role("button", name="Download owner/closed").click()
        view.until(lambda: len(sent) == 2)
        assert f"?node={cluster.nodes[0]['id']} " in sent[1]
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
    sent = pulling(view)
    dialog.get_by_role("button", name="Delete, free").click()
    deletion = "DELETE /v1/models/own/er?node=mac-2 None"
    view.until(lambda: [each for each in sent if "dry_run" not in each] == [deletion])
    assert node.files.calls[-1] == ("remove", "own/er", False)


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


def test_a_search_that_fails_or_finds_nothing_says_so(
    view: Visit, node: Node, cluster: Cluster
) -> None:
    page = view.go("#/models")
    search(page, "nothing like it")
    expect(page.get_by_text("The hub has no model in safetensors format")).to_be_visible()
    node.files.refusal = DownloadFailed("the hub could not be searched", param="HF_ENDPOINT")
    search(page, "again")
    expect(page.get_by_role("alert")).to_have_text("the hub could not be searched")
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
