"""The list of models over a chat: search, keys, what each row says, and a phone."""

from typing import Any

import pytest
from browser import DARK, DESK, PHONE, Visit, model_button, visit
from http_node import Node
from page_cluster import Cluster, copy, member, model
from playwright.sync_api import Browser, Locator, Page, expect

from exo_node.node.machine.events import EventLog

pytestmark = pytest.mark.timeout(300)

FITS = "box => box.scrollWidth <= box.clientWidth"


@pytest.fixture
def many(cluster: Cluster) -> Cluster:
    """One model that is loaded, twenty that fit, and four that a chat cannot use at once."""
    fast = {"nodes": 1, "needed_bytes": 9 * 10**9, "tokens_per_second": 31.2}
    cluster.nodes = [member(1), member(2)]
    cluster.placements = [copy(1)]
    cluster.models = [
        model("aa/too-large", loaded=False, nodes=0),
        model("demo", loaded=True, nodes=1),
        *(model(f"mlx-community/Qwen3-{n}B-4bit", loaded=False, nodes=1, fits=fast)
          for n in range(1, 21)),
        model("peer/unchecked", loaded=False, nodes=1, fits=None, native_mtp=None),
        model("some/embedder", loaded=False, nodes=1, capabilities=["embeddings"]),
        model("some/broken", loaded=False, nodes=1, error="its files are damaged"),
        model("coder", loaded=True, nodes=1, profile_of="demo", profile={"temperature": 0.2}),
    ]  # fmt: skip
    return cluster


def opened(page: Page) -> Locator:
    """The field of the list, once it is open."""
    model_button(page).click()
    field = page.get_by_role("combobox", name="Search your models")
    expect(field).to_be_visible()
    return field


@pytest.mark.parametrize("look", [DESK, PHONE, DARK], ids=["desk", "phone", "dark"])
def test_each_row_says_size_and_whether_it_is_loaded_or_fits(
    browser: Browser, node: Node, many: Cluster, look: dict[str, Any], request: Any
) -> None:
    with visit(browser, f"http://127.0.0.1:{node.port}", **look) as view:
        page = view.go()
        _ = opened(page)
        rows = page.get_by_role("option")
        expect(rows).to_have_count(24)  # without the embedder and the broken one
        expect(rows.first.locator("p")).to_have_text(["demoready", "33 MB · loaded on mac-1"])
        qwen = "mlx-community/Qwen3-1B-4bit"
        expect(rows.nth(1).locator("p")).to_have_text(
            [qwen, "33 MB · estimated 31.2 tok/s · fits on one node"]
        )
        expect(rows.nth(20)).to_contain_text("Qwen3-20B")  # after 19, not after 2
        expect(rows.nth(21).locator("p").last).to_have_text("33 MB · size not checked")
        expect(rows.nth(22).locator("p")).to_have_text(
            ["aa/too-largetoo large", "33 MB · does not fit: needs 47 GB"]
        )
        expect(rows.last.locator("p").last).to_have_text("demo · 33 MB · loaded on mac-1")
        assert view.violations() == []
        view.shot(f"picker-{request.node.callspec.id}")
        panel = page.get_by_role("dialog", name="Choose a model")
        bounds, window = panel.bounding_box(), page.viewport_size
        assert bounds is not None and window is not None
        assert bounds["x"] >= 0 and bounds["x"] + bounds["width"] <= window["width"]
        assert bounds["y"] + bounds["height"] <= window["height"]
        assert panel.evaluate(FITS) and page.locator("html").evaluate(FITS)
        name = model_button(page).locator(".chosen")
        assert name.evaluate(FITS), "the name is cut"
        rows.nth(2).click()
        expect(panel).to_be_hidden()
        expect(model_button(page)).to_have_text("Model mlx-community/Qwen3-2B-4bit")


def test_words_in_any_order_find_a_model_and_keys_choose_it(view: Visit, many: Cluster) -> None:
    page = view.go()
    field = opened(page)
    expect(field).to_be_focused()
    rows = page.get_by_role("option")
    active = page.locator(".model.active")
    expect(active).to_contain_text("demo")
    field.press("ArrowUp")
    expect(active).to_contain_text("demo")
    field.press("ArrowDown")
    field.press("ArrowDown")
    expect(active).to_contain_text("Qwen3-2B")
    field.fill("4BIT 1 qwen")
    expect(rows).to_have_count(11)
    expect(active).to_contain_text("Qwen3-1B")
    field.press("ArrowDown")
    marked = active.get_attribute("id")
    assert field.get_attribute("aria-activedescendant") == marked
    expect(active).to_contain_text("Qwen3-10B")
    assert view.violations() == []
    field.press("Enter")
    expect(field).to_have_count(0)
    expect(model_button(page)).to_have_text("Model mlx-community/Qwen3-10B-4bit")
    expect(model_button(page)).to_be_focused()
    page.keyboard.press("Enter")
    expect(active).to_contain_text("Qwen3-10B")
    expect(active).to_be_in_viewport()


def test_escape_closes_and_leads_back_to_the_button_and_nothing_was_chosen(
    view: Visit, many: Cluster
) -> None:
    page = view.go()
    field = opened(page)
    field.fill("qwen")
    field.press("Escape")
    expect(field).to_have_count(0)
    expect(model_button(page)).to_be_focused()
    expect(model_button(page)).to_have_text("Model demo")
    field = opened(page)
    expect(field).to_have_value("")
    page.get_by_label("Message").click()
    expect(field).to_have_count(0)
    expect(page.get_by_label("Message")).to_be_focused()
    field = opened(page)
    model_button(page).click()
    expect(field).to_have_count(0)
    field = opened(page)
    for _ in range(4):  # over the list and the link out of what is open
        page.keyboard.press("Tab")
    expect(field).to_have_count(0)


def test_what_does_not_fit_is_never_chosen_and_a_name_that_nobody_has_leads_to_others(
    view: Visit, many: Cluster
) -> None:
    page = view.go()
    field = opened(page)
    field.fill("too-large")
    expect(page.get_by_role("option")).to_have_attribute("aria-disabled", "true")
    field.press("Enter")
    page.get_by_role("option").click(force=True)
    expect(model_button(page)).to_have_text("Model demo")
    field.fill("<nobody> $& \\")
    expect(page.get_by_text("None of your models has that name.")).to_be_visible()
    for key in ("ArrowDown", "Enter"):
        field.press(key)
    expect(model_button(page)).to_have_text("Model demo")
    assert view.violations() == []
    page.get_by_role("link", name="Get other models").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Models")


def test_the_list_follows_the_node_while_it_is_open(
    view: Visit, many: Cluster, events: EventLog
) -> None:
    page = view.go()
    field = opened(page)
    field.fill("20b")
    expect(page.get_by_role("option")).to_contain_text("fits on one node")
    name = "mlx-community/Qwen3-20B-4bit"
    many.placements = [copy(1), copy(2, model=name, status="loading", progress="reading 3 %")]
    many.models.append(model("new/20B", loaded=False, nodes=1))
    assert many.loop is not None
    many.loop.call_soon_threadsafe(lambda: events.add("placed", "it loads"))
    rows = page.get_by_role("option")
    expect(rows).to_have_count(2)
    expect(rows.first.locator(".state.busy")).to_have_text("reading 3 %")
    expect(field).to_have_value("20b")
    expect(field).to_be_focused()
