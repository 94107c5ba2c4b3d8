"""The chat on the page keeps its place and its draft; answers are continued, edited and deleted."""

import re
from typing import Any

import pytest
from browser import Visit, answers, send, wait_for_answer
from fakes import FINISHED, hangs, says
from http_node import Node
from playwright.sync_api import Page, expect

from exo_node.node.chat.requests import Finished, ReasoningDelta, Started, TextDelta
from exo_node.placement.errors import InvalidRequest, PeerLost

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("cluster")]


def go_to(page: Page, place: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=place).click()


def script(node: Node, *events: Any, then: Exception | None = None) -> None:
    node.chat.scripts["demo"] = says(Started((1,)), *events, then=then)


def test_chat_leads_back_to_the_conversation_and_its_unsent_text(view: Visit) -> None:
    page = view.go()
    box = page.get_by_label("Message")
    send(view, "First?")
    wait_for_answer(view)
    address = page.url
    assert "#/chat/" in address
    box.fill("not sent yet")
    for place in ("Chat", "Cluster", "Chat", "Chat"):
        go_to(page, place)
    expect(answers(view)).to_contain_text("héllo")
    expect(box).to_have_value("not sent yet")
    expect(page).to_have_url(address)
    page.reload()
    expect(answers(view)).to_contain_text("héllo")
    expect(box).to_have_value("not sent yet")
    page.get_by_role("link", name="New chat").click()
    expect(answers(view)).to_have_count(0)
    expect(box).to_have_value("")
    box.fill("of a new one")
    page.locator("#conversations li a").click()
    expect(box).to_have_value("not sent yet")
    go_to(page, "Models")
    page.get_by_role("link", name="New chat").click()
    expect(box).to_have_value("of a new one")
    page.keyboard.press("Enter")
    wait_for_answer(view)
    expect(box).to_have_value("")
    page.get_by_role("link", name="New chat").click()
    expect(box).to_have_value("")
    page.go_back()
    expect(page.locator(".question")).to_contain_text("of a new one")


def test_a_stopped_answer_is_continued_where_it_stopped(view: Visit, node: Node) -> None:
    node.chat.scripts["demo"] = hangs(
        Started((1,)), ReasoningDelta("I count."), TextDelta("one, ", (1,))
    )
    page = view.go()
    send(view, "Count")
    expect(answers(view)).to_contain_text("one,")
    page.get_by_role("button", name="Stop").click()
    script(node, TextDelta("two", (2,)), Finished("length", 1, 1, 0, 0, {}))
    answers(view).get_by_role("button", name="Continue").click()
    expect(answers(view)).to_contain_text("one, two")
    wait_for_answer(view)
    begun = {"role": "assistant", "content": "one, ", "reasoning_content": "I count."}
    assert node.chat.requests[-1].messages == ({"role": "user", "content": "Count"}, begun)
    expect(answers(view)).to_contain_text("The token limit ended this answer.")
    script(node, TextDelta(", three", (3,)), FINISHED)
    answers(view).get_by_role("button", name="Continue").click()
    expect(answers(view)).to_contain_text("one, two, three")
    wait_for_answer(view)
    expect(answers(view).get_by_role("button", name="Continue")).to_have_count(0)
    assert view.violations() == []
    page.reload()
    expect(answers(view)).to_contain_text("one, two, three")


def test_an_answer_that_cannot_be_continued_says_why_and_stays(view: Visit, node: Node) -> None:
    script(node, TextDelta("half", (1,)), Finished("length", 1, 1, 0, 0, {}))
    page = view.go()
    send(view, "Go")
    wait_for_answer(view)
    again = answers(view).get_by_role("button", name="Continue")
    node.chat.scripts["demo"] = says(then=PeerLost("a stage is gone"))
    again.click()
    expect(answers(view).get_by_role("alert")).to_contain_text("a stage is gone")
    expect(answers(view)).to_contain_text("half")
    node.chat.scripts["demo"] = says(then=InvalidRequest("the template cannot continue"))
    again.click()
    expect(answers(view).get_by_role("alert")).to_contain_text(
        "This answer cannot be continued; “Regenerate” asks for another. the template cannot"
    )
    expect(answers(view)).to_contain_text("half")
    expect(again).to_have_count(0)
    page.reload()
    expect(answers(view)).to_contain_text("half")
    assert view.violations() == []


def test_thoughts_and_whole_answers_are_not_continued(view: Visit, node: Node) -> None:
    page = view.go()
    send(view, "Go")
    wait_for_answer(view)
    expect(answers(view).get_by_role("button", name="Continue")).to_have_count(0)
    script(node, ReasoningDelta("Hm"), Finished("length", 1, 1, 0, 0, {}))
    send(view, "Think")
    wait_for_answer(view)
    expect(answers(view).last).to_contain_text("stopped in its thoughts")
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)


def test_an_answer_is_edited_as_a_branch_and_continued(view: Visit, node: Node) -> None:
    page = view.go()
    send(view, "Go")
    wait_for_answer(view)
    page.get_by_role("button", name="Edit answer").click()
    field = page.get_by_label("Edit the answer")
    field.fill("my words")
    assert view.violations() == []
    field.press("Enter")
    field.press_sequentially("and more")
    page.get_by_role("button", name="Keep as a new branch").click()
    expect(answers(view)).to_contain_text("Edited by you.")
    script(node, TextDelta(" go on", (3,)), FINISHED)
    answers(view).get_by_role("button", name="Continue").click()
    expect(answers(view)).to_contain_text("and more go on")
    assert node.chat.requests[-1].messages[-1]["content"] == "my words\nand more"
    page.get_by_role("button", name="Previous answer").click()
    expect(answers(view)).to_contain_text("héllo")


def test_a_message_is_deleted_with_what_follows_it(view: Visit, node: Node) -> None:
    page = view.go()
    for number in range(3):
        script(node, TextDelta(f"answer {number}", (1,)), FINISHED)
        send(view, f"Question {number}")
        wait_for_answer(view)
    answers(view).nth(2).get_by_role("button", name="Delete answer").click()
    page.get_by_role("button", name="Really delete it", exact=True).click()
    expect(answers(view)).to_have_count(2)
    expect(page.get_by_text("This has no answer.")).to_be_visible()
    page.locator(".question").nth(1).hover()
    page.get_by_role("button", name="Delete question").nth(1).click()
    page.get_by_role("button", name="Really delete it and 2 after it").click()
    expect(answers(view)).to_have_text([re.compile("answer 0")])
    page.reload()
    expect(page.locator(".question")).to_have_count(1)
    page.locator(".question").hover()
    page.get_by_role("button", name="Delete question").click()
    page.get_by_role("button", name="Really delete it and 1 after it").click()
    expect(page.locator(".welcome")).to_be_visible()
    expect(page.locator("#conversations li")).to_have_count(0)
