"""The page of a fresh node, of a visitor without rights, and on a phone."""

from typing import Any

import pytest
from browser import Visit, answers, model_button, send, wait_for_answer
from fakes import FINISHED, Json, says
from http_node import Node
from page_cluster import Cluster, model
from playwright.sync_api import FloatRect, Locator, Route, expect

from exo_node.node.chat.requests import Finished, ReasoningDelta, Started, TextDelta

pytestmark = pytest.mark.timeout(300)

GOOD = "mlx-community/Qwen3.6-27B-4bit"
TOY: Json = {"parameters": 16_500_000}


def offered(id: str, rank: int | None, **more: Any) -> Json:
    """An entry of the catalogue."""
    fits = {"nodes": 0 if rank is None else 1, "needed_bytes": 9 * 10**11, "tokens_per_second": 22}
    figures = {"recommended": rank, "downloaded": False, "size_bytes": 15 * 10**9, "fits": fits}
    return model(id, loaded=False, nodes=1, **figures, **more)


@pytest.fixture
def catalogue(node: Node, cluster: Cluster) -> Cluster:
    """The demo on the disk, and five models of the catalogue."""
    cluster.models = [model("demo", loaded=False, nodes=1, **TOY)]
    entries = [
        offered("huge/model", None),
        *(offered(f"rank/{rank}", rank) for rank in (4, 3, 2)),
        offered(GOOD, 1, capabilities=["thinking", "tools"], drafts=True),
    ]

    async def listed() -> Json:
        return {"object": "list", "data": entries}

    node.operations.catalogue = listed  # type: ignore[method-assign]
    return cluster


def test_a_newcomer_learns_that_demo_is_a_toy_and_which_model_fits(
    view: Visit, node: Node, catalogue: Cluster
) -> None:
    page = view.go()
    welcome = page.locator(".welcome")
    expect(welcome).to_contain_text("A toy to try this page with")
    expect(welcome).to_contain_text(f"{GOOD} fits this machine: 15 GB, estimated 22 tok/s")
    expect(welcome.get_by_label("Command")).to_have_text(f"exo-node models pull {GOOD}")
    fits = "box => box.scrollWidth <= box.clientWidth"
    page.set_viewport_size({"width": 390, "height": 844})
    assert welcome.get_by_label("Command").evaluate(fits), "the command's end is hidden"
    page.set_viewport_size({"width": 1280, "height": 800})
    expect(welcome.get_by_role("listitem")).to_have_count(3)
    assert view.violations() == []
    view.shot("newcomer")
    welcome.get_by_role("link", name="Get it under Models").click()
    expect(page.get_by_role("main").get_by_role("heading", level=2).first).to_have_text(
        "Recommended for this machine"
    )
    page.get_by_role("navigation").get_by_role("link", name="Chat").click()
    page.get_by_role("button", name="Tell me a story.").click()
    wait_for_answer(view)
    assert node.chat.requests[-1].messages == ({"role": "user", "content": "Tell me a story."},)


def test_a_real_model_is_chosen_before_the_toy_and_nothing_is_proposed(
    view: Visit, catalogue: Cluster
) -> None:
    catalogue.models.append(model("real/model", loaded=False, nodes=1, parameters=10**10))
    page = view.go()
    expect(model_button(page)).to_have_text("Model real/model")
    expect(page.locator(".trials")).to_contain_text("recursion")
    assert page.get_by_text("A toy").count() == 0
    assert view.count_requests("/v1/models?catalog=1") == 0


def test_recommended_models_come_first_with_their_abilities_and_speed(
    view: Visit, catalogue: Cluster
) -> None:
    page = view.go("#/models")
    recommended = page.get_by_role("region", name="Recommended").get_by_role("listitem")
    expect(recommended.locator(".model-id")).to_have_text([GOOD, "rank/2", "rank/3"])
    expect(recommended.first.locator(".badge")).to_have_text("drafts for itself")
    expect(recommended.first.locator("> p").last).to_have_text("15 GB · estimated 22 tok/s")
    facts = "15 GB · bfloat16 · fits on one node · estimated 22 tok/s · tools · thinking · "
    details = recommended.first.get_by_text(f"{facts}4,096 tokens of context")
    expect(details).to_be_hidden()
    recommended.first.get_by_text("Details").click()
    expect(details).to_be_visible()
    page.get_by_text("Others that exo-node knows").click()
    others = page.locator(".catalogue .model-id")
    expect(others).to_have_text(["rank/4", "huge/model"])
    assert view.violations() == []


@pytest.mark.parametrize("may", [False, True])
def test_controls_that_need_the_login_link_are_marked(
    view: Visit, catalogue: Cluster, may: bool
) -> None:
    def joining(route: Route) -> None:
        route.fulfill(json={"data": [], "asking": [], "may_decide": may})

    view.page.route("**/v1/join/requests", joining)
    page = view.go("#/models")
    line = page.get_by_text("Looking only: to change anything, run exo-node dashboard")
    expect(page.get_by_role("button", name="Load demo", exact=True)).to_be_enabled(enabled=may)
    expect(page.get_by_role("button", name=f"load {GOOD}")).to_be_enabled(enabled=may)
    expect(line).to_have_count(0 if may else 1)
    assert view.violations() == []
    page.get_by_role("navigation").get_by_role("link", name="Settings").click()
    expect(page.get_by_role("switch").first).to_be_enabled(enabled=may)
    expect(line).to_have_count(0 if may else 1)
    page.get_by_role("navigation").get_by_role("link", name="Chat").click()
    expect(page.get_by_label("Message")).to_be_enabled()
    expect(line).to_have_count(0)


def box(place: Locator) -> FloatRect:
    bounds = place.bounding_box()
    assert bounds is not None
    return bounds


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_of_thoughts_alone_is_marked_and_shows_them(
    view: Visit, node: Node, reason: Any
) -> None:
    node.chat.scripts["demo"] = says(
        Started((1,)), ReasoningDelta("Endless thought."), Finished(reason, 3, 3, 3, 0, {})
    )
    _ = view.go()
    send(view, "Go")
    wait_for_answer(view)
    notice = "The model stopped in its thoughts and gave no answer"
    why = ", because the token limit ended it." if reason == "length" else "."
    expect(answers(view).get_by_text(notice)).to_have_text(notice + why)
    expect(answers(view).get_by_text("Endless thought.")).to_be_visible()
    node.chat.scripts["demo"] = says(
        Started((1,)), ReasoningDelta("Hm."), TextDelta("Yes.", (1,)), FINISHED
    )
    send(view, "Again")
    wait_for_answer(view)
    expect(answers(view).last.get_by_text("Hm.")).to_be_hidden()
    assert answers(view).last.get_by_text(notice).count() == 0


def test_a_long_paste_is_folded(view: Visit, node: Node) -> None:
    page = view.go()
    send(view, "word " * 60_000 + "end")
    wait_for_answer(view)
    question = page.locator(".question > p")
    assert len(question.inner_text()) < 2000
    assert str(node.chat.requests[-1].messages[-1]["content"]).endswith("word end")
    page.get_by_role("button", name="Show all 60,001 words").click()
    expect(question).to_contain_text("word end")
    page.get_by_role("button", name="Show less").click()
    assert len(question.inner_text()) < 2000
    assert view.violations() == []
