"""Several copies of a model on the page: their number, their answers, and why one was chosen."""

from typing import Any

import pytest
from browser import DESK, PHONE, Visit, answers, send, visit, wait_for_answer
from fakes import Json, says
from http_node import Node
from page_cluster import Cluster, copy, member, model
from playwright.sync_api import Browser, Locator, Route, expect

from exo_node.node.chat.requests import Finished, Started, TextDelta

pytestmark = pytest.mark.timeout(300)

NO_ROOM = "no other nodes have room for one: demo needs 60 MB and 2 nodes have it already"


@pytest.fixture
def cluster(node: Node) -> Cluster:
    """Two nodes, one of them with a copy of the demo."""
    cluster = Cluster(node)
    cluster.nodes = [member(1), member(2)]
    cluster.models = [model("demo", loaded=True, nodes=1)]
    cluster.placements = [copy(1)]
    return cluster


def control(view: Visit) -> Locator:
    return view.page.get_by_role("group", name="Copies of demo")


def test_the_number_of_copies_is_set_and_each_shows_its_answers(
    view: Visit, cluster: Cluster
) -> None:
    page = view.go("#/cluster")
    expect(control(view).get_by_role("status")).to_have_text("1")
    control(view).get_by_role("button", name="One copy more").click()
    expect(control(view).get_by_role("status")).to_have_text("1 of 2")
    view.until(lambda: cluster.requested == [{"model": "demo", "replicas": 2}])
    two = {"replicas": 2}
    cluster.placements = [copy(2, status="loading", **two), copy(1, answers=3, **two)]
    copies = page.get_by_role("list", name="The copies of demo").locator(".copy")
    expect(copies.locator("> .line")).to_have_text(
        ["ready3 answers p-00000001", "loading p-00000002"]
    )
    expect(control(view).get_by_role("status")).to_have_text("1 of 2")
    assert view.violations() == []
    cluster.placements = [copy(1, answers=1, **two), copy(2, answers=2, **two)]
    expect(copies.locator("> .line")).to_have_text(
        ["ready1 answer p-00000001", "ready2 answers p-00000002"]
    )
    expect(control(view).get_by_role("status")).to_have_text("2")
    expect(page.get_by_label("Layers of demo by node")).to_have_text(
        ["mac-1layers 0-15", "mac-2layers 0-15"]
    )


def test_the_keyboard_alone_sets_the_number_and_stays_where_it_is(
    view: Visit, cluster: Cluster
) -> None:
    page = view.go("#/cluster")
    more = control(view).get_by_role("button", name="One copy more")
    more.focus()
    for _ in range(9):
        page.keyboard.press("Enter")
    view.until(lambda: len(cluster.requested) == 7)
    assert [each["replicas"] for each in cluster.requested] == [2, 3, 4, 5, 6, 7, 8]
    expect(control(view).get_by_role("status")).to_have_text("1 of 8")
    expect(more).to_be_focused()
    expect(more).to_have_attribute("aria-disabled", "true")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    view.until(lambda: cluster.requested[-1]["replicas"] == 7)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    view.until(lambda: cluster.requested[-1]["replicas"] == "auto")
    expect(control(view).get_by_role("switch", name="As many as answers need")).to_be_focused()


def test_auto_follows_the_answers_and_its_end_keeps_the_number(
    view: Visit, cluster: Cluster
) -> None:
    cluster.placements = [copy(number, replicas=2) for number in (1, 2)]
    _ = view.go("#/cluster")
    follows = control(view).get_by_role("switch", name="As many as answers need")
    less = control(view).get_by_role("button", name="One copy less")
    follows.check()
    view.until(lambda: cluster.requested == [{"model": "demo", "replicas": "auto"}])
    expect(less).to_have_attribute("aria-disabled", "true")
    less.click(force=True)
    follows.uncheck()
    view.until(lambda: cluster.requested[-1] == {"model": "demo", "replicas": 2})
    assert len(cluster.requested) == 2
    less.click()
    view.until(lambda: cluster.requested[-1] == {"model": "demo", "replicas": 1})


@pytest.mark.parametrize("look", [DESK, PHONE], ids=["desk", "phone"])
def test_the_reason_for_a_missing_copy_is_shown(
    browser: Browser, node: Node, cluster: Cluster, look: dict[str, Any], request: Any
) -> None:
    missing = {"replicas": 3, "replicas_missing": NO_ROOM}
    cluster.placements = [copy(1, answers=2, **missing), copy(2, answers=1, **missing)]
    rows = {"prefix_memory_rows": 8012, "prefix_disk_rows": 40, "prefix_peer_rows": 0}
    sizes = {"prefix_cache_bytes": 5 * 10**6, "prefix_disk_bytes": 12 * 10**6}
    stage = {"placement": "p-00000001", "model": "demo", "stage": 0, "layers": [0, 16]}
    cluster.nodes[0]["stages"] = [stage | rows | sizes | {"status": "ready"}]
    with visit(browser, f"http://127.0.0.1:{node.port}", **look) as view:
        page = view.go("#/cluster")
        expect(control(view)).to_contain_text(f"Not 3 yet: {NO_ROOM}")
        expect(control(view).get_by_role("status")).to_have_text("2 of 3")
        row = page.get_by_label("Stages on mac-1").get_by_role("listitem")
        expect(row).to_contain_text("prompts cached: 5 MB in memory, 12 MB on disk")
        expect(row).to_contain_text("prompt tokens reused: 8,012 from memory, 40 from disk")
        fits = "box => box.scrollWidth <= box.clientWidth"
        assert page.locator("main").evaluate(fits), "main scrolls sideways"
        assert view.violations() == []
        view.shot(f"copies-{request.node.callspec.id}")


def test_a_refusal_is_shown_and_the_number_stays(view: Visit, node: Node, cluster: Cluster) -> None:
    def refuse(route: Route) -> None:
        if route.request.method == "GET":
            route.fallback()
        else:
            route.fulfill(status=503, json={"error": {"message": "no head is elected"}})

    view.page.route("**/v1/placements", refuse)
    _ = view.go("#/cluster")
    control(view).get_by_role("button", name="One copy more").click()
    expect(control(view).get_by_role("alert")).to_have_text("No head is elected")
    expect(control(view).get_by_role("status")).to_have_text("1")


def test_a_node_that_is_alone_offers_no_copies(view: Visit, cluster: Cluster) -> None:
    cluster.nodes = [member(1)]
    page = view.go("#/cluster")
    expect(page.get_by_label("Layers of demo by node")).to_be_visible()
    expect(control(view)).to_have_count(0)


def test_unloading_a_model_ends_all_of_its_copies(view: Visit, cluster: Cluster) -> None:
    cluster.placements = [copy(1, answers=1), copy(2, answers=2)]
    page = view.go("#/models")
    expect(page.get_by_role("region", name="Loaded")).to_contain_text("2 copies")
    page.get_by_role("button", name="Unload demo").click()
    expect(page.get_by_text("3 answers running.")).to_be_visible()
    page.get_by_role("button", name="Unload anyway").click()
    view.until(lambda: cluster.placements == [])


CACHED = "8,012 of 8,100 prompt tokens from"


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ("memory", f"{CACHED} memory"),
        ("disk", f"{CACHED} disk"),
        ("peer", f"{CACHED} another copy"),
        ("", CACHED.removesuffix(" from")),
        ("constructor", CACHED.removesuffix(" from")),
    ],
)
def test_an_answer_shows_which_copy_gave_it_why_and_what_was_cached(
    view: Visit, node: Node, cluster: Cluster, tier: str, words: str
) -> None:
    reason = f"8012 of 8100 prompt tokens are in its {tier}"
    where: Json = {"stages": copy(2)["stages"], "reason": reason}
    stats: Json = {"placement": where, "cached_tokens": 8012, "cached_tier": tier}
    facts = facts_of(view, node, stats)
    expect(facts.filter(has_text="Ran on")).to_have_text("Ran onmac-2 layers 0-15")
    expect(facts.filter(has_text="Why there")).to_have_text(f"Why there{reason}")
    expect(facts.filter(has_text="Cached")).to_have_text(f"Cached{words}")
    assert view.violations() == []
    view.shot(f"cached-{tier or 'nowhere'}")


def facts_of(view: Visit, node: Node, stats: Json) -> Locator:
    """The facts that the page shows of an answer with these stats."""
    base: Json = {"drafter_kind": "none", "generation_tps": 41.5, "time_to_first_token_s": 0.2}
    finished = Finished("stop", 8100, 3, 3, 0, base | stats)
    node.chat.scripts["demo"] = says(Started((1,)), TextDelta("Yes.", (1,)), finished)
    _ = view.go()
    send(view, "Go")
    wait_for_answer(view)
    answers(view).locator("button.brief").click()
    return answers(view).locator(".stats dl > div")
