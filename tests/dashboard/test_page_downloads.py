"""Models found, downloaded and deleted on the page of a real node, from a hub on loopback."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import DESK, PHONE, Visit, found, search, visit
from hub import MODEL, REPOSITORY, FakeHub, serve
from models import make_checkpoint
from nodes import Node, node
from playwright.sync_api import Browser, Page, expect

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
def running(hub: FakeHub, tmp_path: Path) -> Iterator[Node]:
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    with node(tmp_path / "mac-1", "--no-mdns", env=env) as own:
        yield own


def own_page(view: Visit, running: Node) -> Page:
    """The models, with the rights of the node's own user."""
    ticket = running.call("POST", "/v1/session/ticket", {}).body["ticket"]
    page = view.go(f"#login={ticket}")
    expect(page.get_by_label("Message")).to_be_enabled()
    return view.go("#/models")


@pytest.mark.parametrize("look", [DESK, PHONE], ids=["desk", "phone"])
def test_a_model_is_found_downloaded_paused_resumed_and_deleted(
    browser: Browser, running: Node, hub: FakeHub, look: dict[str, Any], request: Any
) -> None:
    kind, total = request.node.callspec.id, sum(map(len, hub.files.values()))
    with visit(browser, f"http://127.0.0.1:{running.port}", **look) as view:
        page = own_page(view, running)
        search(page, "er/")
        expect(found(page)).to_have_count(2)
        expect(found(page).first).to_contain_text("6.2 MB · estimated")
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
        expect(region.locator(".state")).to_have_text("downloaded")
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
    browser: Browser, running: Node, hub: FakeHub
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
