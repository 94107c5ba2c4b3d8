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
    partial = {"role": "assistant", "content": "one, ", "reasoning_content": "I count."}
    assert node.chat.requests[-1].messages == ({"role": "user", "content": "Count"}, partial)
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
    expect(answers(view).get_by_role("alert")).to_contain_text("A stage is gone")
    expect(answers(view)).to_contain_text("half")
    node.chat.scripts["demo"] = says(then=InvalidRequest("the template cannot continue"))
    again.click()
    expect(answers(view).get_by_role("alert")).to_contain_text(
        "This answer cannot be continued; “Regenerate” asks for another. The template cannot"
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
    page.get_by_role("button", name="Save as a new branch").click()
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


def attach(page: Page, name: str, data: bytes, kind: str = "") -> None:
    page.get_by_label("Choose images or text files").set_input_files(
        [{"name": name, "mimeType": kind, "buffer": data}]
    )


DROP = """([name, text]) => {
  const files = new DataTransfer();
  files.items.add(new File([text], name));
  const drop = new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true });
  document.querySelector(".composer textarea").dispatchEvent(drop);
}"""


def test_text_files_become_text_with_their_names(view: Visit, node: Node) -> None:
    page = view.go()
    expect(page.get_by_label("Message")).to_be_enabled()
    attach(page, "code.md", b"```py\nprint(1)\n```", "text/markdown")
    page.evaluate(DROP, ["<b>\nx.txt", "grüße\n"])
    listed = page.locator(".composer .files li")
    expect(listed.locator("summary")).to_have_text(["code.md 18 B", "<b> x.txt 8 B"])
    go_to(page, "Cluster")
    go_to(page, "Chat")
    expect(listed).to_have_count(2)
    assert view.violations() == []
    send(view, "Explain")
    wait_for_answer(view)
    assert node.chat.requests[-1].messages[-1]["content"] == (
        "code.md:\n````\n```py\nprint(1)\n```\n````\n\n<b> x.txt:\n```\ngrüße\n```\n\nExplain"
    )
    expect(listed).to_have_count(0)
    page.reload()
    expect(page.locator(".question .files li")).to_have_count(2)
    assert view.violations() == []


def test_more_files_than_a_message_takes_are_told(view: Visit) -> None:
    """They were left out without a word."""
    page = view.go()
    expect(page.get_by_label("Message")).to_be_enabled()
    for number in range(17):
        attach(page, f"{number}.txt", b"x")
    expect(page.get_by_role("alert")).to_have_text(
        "A message takes 16 text files; the first 16 go with it."
    )
    expect(page.locator(".composer .files li")).to_have_count(16)


def test_a_file_of_nothing_but_fences_is_quoted_too(view: Visit) -> None:
    """Its runs of backticks were arguments of one call, which takes fewer."""
    view.go()
    quoted = view.page.evaluate(
        """async (text) => {
          const { withFiles } = await import("/static/files.js");
          return withFiles("", [{ name: "a", text }]);
        }""",
        "` " * 128_000,
    )
    assert quoted.startswith("a:\n```\n` ` `") and quoted.endswith("\n```")


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.bin", b"ab\0c", "a.bin is neither an image nor text in UTF-8."),
        ("b.txt", b"\xff\xfe\x01", "b.txt is neither an image nor text in UTF-8."),
        ("c.log", b"x" * 256_001, "c.log has 256 kB; a file may have 256 kB."),
    ],
)
def test_what_is_no_text_or_too_long_is_named(
    view: Visit, name: str, data: bytes, why: str
) -> None:
    page = view.go()
    expect(page.get_by_label("Message")).to_be_enabled()
    attach(page, name, data)
    expect(page.get_by_role("alert")).to_have_text(why)
    expect(page.locator(".composer .files li")).to_have_count(0)


def test_keys_begin_a_chat_search_and_copy_the_last_answer(view: Visit) -> None:
    page = view.go()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    send(view, "First?")
    wait_for_answer(view)
    page.keyboard.press("Control+Shift+C")
    expect(page.get_by_text("The last answer was copied.")).to_be_visible()
    assert "héllo" in page.evaluate("navigator.clipboard.readText()")
    page.keyboard.press("Control+k")
    expect(page.get_by_label("Search conversations")).to_be_focused()
    page.keyboard.press("Control+/")
    listed = page.get_by_role("dialog", name="Keys")
    expect(listed).to_contain_text("Ctrl Shift O")
    assert view.violations() == []
    view.shot("keys")
    page.keyboard.press("Escape")
    expect(listed).to_have_count(0)
    go_to(page, "Cluster")
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".welcome")).to_be_visible()
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.press("Control+Shift+C")
    expect(page.get_by_text("There is no answer to copy.")).to_be_visible()


def test_the_machine_is_kept_awake_as_chosen_and_the_refusal_of_a_fixed_choice_is_shown(
    view: Visit,
) -> None:
    page = view.go("#/settings")
    chosen = page.get_by_label("Keep this machine awake")
    expect(chosen).to_have_value("answers")
    chosen.select_option("always")
    expect(chosen).to_be_enabled()
    expect(chosen).to_have_value("always")
    page.reload()
    expect(chosen).to_have_value("always")
    assert view.violations() == []
    view.shot("settings-awake")
    fixed = {"value": "never", "source": "environment", "writable": False, "reason": "fixed by X=1"}
    page.route("**/v1/settings", lambda route: route.fulfill(json={"keep_awake": fixed}))
    page.reload()
    expect(chosen).to_have_value("never")
    expect(chosen).to_be_disabled()
    expect(page.get_by_text("fixed by X=1")).to_be_visible()


def test_colours_are_chosen_and_kept(view: Visit) -> None:
    page = view.go("#/settings")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_label("Colours").select_option("dark")
    dark = page.evaluate(ground)
    assert dark != light
    assert view.violations() == []
    page.reload()
    expect(page.get_by_label("Colours")).to_have_value("dark")
    assert page.evaluate(ground) == dark
    view.shot("settings-dark")
    page.get_by_label("Colours").select_option("system")
    assert page.evaluate(ground) == light
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) == dark
