"""Where the focus goes, how large and how aligned things are, and how messages are worded."""

import re

import pytest
from browser import Visit, send, wait_for_answer
from http_node import Node
from page_cluster import Cluster, planned, stage
from playwright.sync_api import expect

pytestmark = pytest.mark.timeout(300)


def test_escape_in_the_options_leads_back_to_their_button(view: Visit) -> None:
    page = view.go()
    button = page.get_by_role("button", name="Options", exact=True)
    button.click()
    page.get_by_label("Temperature").press("Escape")
    expect(page.get_by_label("Temperature")).to_have_count(0)
    expect(button).to_be_focused()
    button.click()
    page.get_by_label("Close options").click()
    expect(button).to_be_focused()


def test_the_load_dialog_begins_at_the_chosen_placement(view: Visit, cluster: Cluster) -> None:
    both = {"best": planned(stage(1, 0, 16, 1)), "runner_up": planned(stage(2, 0, 16, 1))}
    cluster.previews = {"": both}
    page = view.go("#/models")
    page.get_by_role("button", name="Load demo", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("radio", name=re.compile("^Best"))).to_be_focused()
    expect(dialog.get_by_text("about 25 tok/s")).to_have_count(2)
    page.keyboard.press("ArrowDown")
    expect(dialog.get_by_role("radio", name="Next best")).to_be_checked()
    dialog.get_by_text("Memory of the context").click()
    dialog.get_by_label("Attention caches").select_option("8")
    expect(dialog.get_by_role("radio").first).to_be_visible()
    expect(dialog.locator("summary").first).to_be_focused()  # another plan moves nobody
    assert view.violations() == []


def test_insight_has_what_happened_while_an_answer_of_the_page_was_written(
    view: Visit, node: Node
) -> None:
    async def metrics() -> tuple[bytes, str]:
        return (
            f"vllm:generation_tokens_total {5 * len(node.chat.requests)}\n".encode(),
            "text/plain",
        )

    node.operations.metrics = metrics  # type: ignore[method-assign]
    page = view.go()
    expect(page.get_by_label("Message")).to_be_enabled()
    assert view.count_requests("/metrics") == 0
    send(view, "Go")
    wait_for_answer(view)
    view.until(lambda: view.count_requests("/metrics") >= 2)
    page.get_by_role("navigation").get_by_role("link", name="Insight").click()
    expect(page.locator(".chart")).to_have_count(9)
    page.get_by_role("navigation").get_by_role("link", name="Chat").click()
    before = view.count_requests("/metrics")
    page.wait_for_timeout(2_500)
    assert view.count_requests("/metrics") == before  # nothing asks while nothing is written
