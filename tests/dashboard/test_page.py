"""Chat on the page in a browser, over a node with fake answers and a fake cluster."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from browser import Visit, answers, model_button, send, wait_for_answer
from fakes import FINISHED, Json, Script, says
from http_node import Node
from page_cluster import Cluster, member
from playwright.sync_api import expect

from exo_node.node.chat.requests import (
    AnswerProgress,
    CallPart,
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
)

pytestmark = pytest.mark.timeout(300)

STATS: Json = {
    "drafter_kind": "native_mtp",
    "num_draft_tokens": 2,
    "draft_policy": "adaptive",
    "acceptance_rule": "greedy",
    "spec_decode_rounds": 2,
    "proposed_draft_tokens": 3,
    "accepted_draft_tokens": 3,
    "accepted_per_position": [2, 1],
    "draft_k_histogram": [1, 1, 1],
    "generation_tps": 41.5,
    "prompt_tps": 900.0,
    "time_to_first_token_s": 0.21,
    "peak_memory_bytes": 10**9,
}


def test_the_first_load_is_small_and_chooses_a_model_that_runs(view: Visit) -> None:
    page = view.go()
    expect(model_button(page)).to_have_text("Model demo")
    page.wait_for_timeout(700)
    requests = [request for request in view.requests if "/v1/events" not in request.url]
    sizes = [request.sizes()["responseBodySize"] for request in requests]
    assert len(view.requests) <= 28, [request.url for request in view.requests]
    assert sum(sizes) < 300_000
    assert view.violations() == []
    view.shot("first")


FULL_STORE = """async () => {
  const { LIMIT } = await import("/static/store.js");
  const request = indexedDB.open("exo-node");
  await new Promise((resolve) => (request.onsuccess = resolve));
  const transaction = request.result.transaction("conversations", "readwrite");
  for (let number = 0; number < LIMIT; number++) {
    const title = ["Eldest", "Second"][number] ?? "Later";
    const one = { id: `old-${number}`, title, created: number, updated: number };
    transaction.objectStore("conversations").put({ ...one, options: {}, leaf: null, messages: [] });
  }
  await new Promise((resolve) => (transaction.oncomplete = resolve));
  request.result.close();
}"""


@pytest.mark.smoke
def test_a_conversation_outlives_the_page_and_in_a_full_store_the_oldest_makes_room(
    view: Visit,
) -> None:
    page = view.go()
    expect(page.get_by_label("Message")).to_be_enabled()
    _ = page.evaluate(FULL_STORE)
    send(view, "Who are you?")
    wait_for_answer(view)
    expect(answers(view)).to_contain_text("héllo")
    page.reload()
    expect(answers(view)).to_contain_text("héllo")
    listed = page.locator("#conversations li")
    expect(listed.first).to_contain_text("Who are you?")
    search = page.get_by_label("Search conversations")
    search.fill("Second")
    expect(listed).to_have_count(1)
    search.fill("Eldest")
    expect(listed).to_have_count(0)


SLOW_STORE = """
const open = IDBFactory.prototype.open;
const opened = new Promise((resolve) => (globalThis.openStore = resolve));
IDBFactory.prototype.open = function (...given) {
  const request = open.apply(this, given);
  return {
    get result() { return request.result; },
    set onupgradeneeded(act) { request.onupgradeneeded = act; },
    set onsuccess(act) { request.onsuccess = () => opened.then(act); },
    set onerror(act) { request.onerror = act; },
  };
};
"""


def test_nothing_can_be_typed_before_the_conversations_are_read(view: Visit) -> None:
    """Reading them replaces the conversation on the page, and with it an earlier message."""
    view.page.add_init_script(SLOW_STORE)
    page = view.go()
    expect(page.get_by_role("link", name="1 node")).to_be_visible()
    box = page.get_by_label("Message")
    expect(box).to_be_disabled()
    _ = page.evaluate("globalThis.openStore()")
    expect(box).to_be_enabled()
    send(view, "Who are you?")
    expect(answers(view)).to_contain_text("héllo")


@pytest.mark.smoke
def test_editing_and_regenerating_add_branches(view: Visit, node: Node) -> None:
    page = view.go()
    send(view, "First?")
    wait_for_answer(view)
    node.chat.scripts["demo"] = says(Started((1,)), TextDelta("another", (1,)), FINISHED)
    answers(view).get_by_role("button", name="Regenerate").click()
    expect(answers(view)).to_contain_text("another")
    page.get_by_role("button", name="Previous answer").click()
    expect(answers(view)).to_contain_text("héllo")
    page.get_by_role("button", name="Edit", exact=True).click()
    page.get_by_label("Edit the question").fill("Second?")
    page.get_by_role("button", name="Send as a new branch").click()
    wait_for_answer(view)
    expect(page.locator(".question")).to_contain_text("Second?")
    assert node.chat.requests[-1].messages == ({"role": "user", "content": "Second?"},)
    page.get_by_role("button", name="Previous question").click()
    expect(page.locator(".question")).to_contain_text("First?")


def test_conversations_are_found_renamed_exported_and_deleted(view: Visit) -> None:
    page = view.go()
    for number in range(7):
        send(view, f"Question {number}")
        wait_for_answer(view)
        page.get_by_role("link", name="New chat").click()
    listed = page.locator("#conversations li")
    expect(listed).to_have_count(7)
    page.get_by_label("Search conversations").fill("question 3")
    expect(listed).to_have_count(1)
    listed.hover()
    page.get_by_role("button", name="More for Question 3").click()
    page.get_by_label("Name", exact=True).fill("The third")
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Search conversations").fill("")
    expect(listed.first).to_contain_text("Question 6")
    page.get_by_role("button", name="More for The third").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export text").click()
    assert "Question 3" in download.value.path().read_text()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Really delete").click()
    expect(listed).to_have_count(6)


HOSTILE = (
    '<img src=x onerror="document.title=1"><script>document.title=1</script>\n\n'
    "[click](javascript:document.title=1) ![pixel](http://127.0.0.1:9/pixel.png)\n\n"
    '```html"><script>document.title=1</script>\n<b>raw</b>\n```\n'
)


def test_a_hostile_answer_and_hostile_names_stay_text(
    view: Visit, node: Node, cluster: Cluster
) -> None:
    cluster.nodes = [member(1, name="<img src=x onerror=document.title=1>")]
    cluster.models[1] |= {"id": "<b onclick=1>bold"}
    node.chat.scripts["demo"] = says(Started((1,)), TextDelta(HOSTILE, (1,)), FINISHED)
    page = view.go()
    send(view, "<script>document.title=1</script>")
    wait_for_answer(view)
    assert page.locator("main :is(img, script, b, [onerror])").count() == 0
    assert page.locator("main a[href^=javascript]").count() == 0
    for place, text in (("#/cluster", "<img src=x onerror="), ("#/models", "<b onclick=1>")):
        view.go(place)
        expect(page.get_by_role("main").get_by_text(text).last).to_be_visible()
        assert page.locator("main :is(img, script, b, [onerror])").count() == 0
    assert page.title() == "exo-node"
    assert all(request.url.startswith(view.base) for request in view.requests)


def logprobs(*texts: str) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(id=7, bytes=text.encode(), logprob=-0.1) for text in texts)


@pytest.mark.smoke
def test_an_answer_shows_its_thinking_its_calls_and_where_its_tokens_come_from(
    view: Visit, node: Node
) -> None:
    node.chat.scripts["demo"] = says(
        AnswerProgress("prefill 1/2"),
        Started((1,)),
        ReasoningDelta("First I think."),
        TextDelta("one two three", (1, 2, 3), logprobs("one", " two", " three"), 2),
        CallPart(name="look_up", arguments='{"city": "Bern"}', ends=True),
        Finished("stop", 3, 3, 2, 1, STATS),
    )
    page = view.go()
    page.get_by_role("button", name="Options", exact=True).click()
    page.get_by_label("Keep each token's origin").check()
    page.get_by_label("Close options").click()
    send(view, "Go")
    wait_for_answer(view)
    answer = answers(view)
    expect(answer.get_by_text("First I think.")).to_be_hidden()
    answer.locator("summary").click()
    expect(answer.get_by_text("First I think.")).to_be_visible()
    expect(answer.locator(".call")).to_contain_text("look_up")
    expect(answer.locator(".brief")).to_contain_text("41.5 tok/s")
    answer.get_by_role("button", name="Tokens", exact=True).click()
    expect(answer.locator(".token-text .token.draft")).to_have_text(["one", " two"])
    expect(answer.locator(".token-text .token.own")).to_have_text([" three"])
    answer.locator(".token-text .token").nth(1).click()
    expect(answer.locator(".legend").get_by_role("status")).to_have_text(
        "two: accepted draft, 90.5 %"
    )
    # Two rounds drafted, and one of them a second token: what was not drafted was not rejected.
    positions = answer.get_by_label("Accepted drafts by position").get_by_role("listitem")
    expect(positions).to_have_text(["draft 1100 %", "draft 2100 %"])
    assert view.violations() == []
    view.shot("tokens")


def test_code_is_highlighted_and_copied(view: Visit, node: Node) -> None:
    code = "```python\ndef f():\n    return 1\n```\n"
    node.chat.scripts["demo"] = says(Started((1,)), TextDelta(code, (1,)), FINISHED)
    page = view.go()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    send(view, "Code")
    wait_for_answer(view)
    expect(answers(view).locator(".hljs-keyword").first).to_have_text("def", timeout=60_000)
    page.get_by_role("button", name="Copy", exact=True).last.click()
    page.locator("button.copy-code").click()
    expect(page.locator("button.copy-code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def f():\n    return 1\n"
    assert view.violations() == []


def test_options_reach_the_request_and_a_preset_keeps_them(view: Visit, node: Node) -> None:
    page = view.go()
    page.get_by_role("button", name="Options", exact=True).click()
    page.get_by_label("System prompt").fill("Be short.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Drafts (K)").select_option("3")
    page.get_by_label("Name for a new preset").fill("Mine")
    page.get_by_role("button", name="Keep", exact=True).click()
    assert view.violations() == []
    send(view, "Go")
    wait_for_answer(view)
    request = node.chat.requests[-1]
    assert request.messages[0] == {"role": "system", "content": "Be short."}
    assert (request.sampling.temperature, request.num_draft_tokens) == (0.5, 3)
    page.reload()
    page.get_by_role("link", name="New chat").click()
    page.get_by_role("button", name="Mine").click()
    page.get_by_role("combobox", name="Preset").select_option("Greedy")
    expect(page.get_by_label("Temperature")).to_have_value("0")
    page.get_by_role("combobox", name="Preset").select_option("Mine")
    expect(page.get_by_label("Temperature")).to_have_value("0.5")


def slowly(count: int) -> Script:
    async def script() -> AsyncGenerator[Event]:
        yield Started((1,))
        for number in range(count):
            yield TextDelta(f"word{number} " + ("\n\n" if number % 50 == 49 else ""), (number,))
            if number % 10 == 0:
                await asyncio.sleep(0.01)
        yield FINISHED

    return script


TOOLS = '[{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]'


def test_a_tools_result_is_sent_and_answered(view: Visit, node: Node) -> None:
    node.chat.scripts["demo"] = says(
        Started((1,)),
        ReasoningDelta("Bern."),
        CallPart(name="look_up", arguments='{"city": "Bern"}', ends=True),
        FINISHED,
    )
    page = view.go()
    page.get_by_role("button", name="Options", exact=True).click()
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Tools", exact=True).fill("[{}]")
    expect(page.get_by_role("alert")).to_contain_text("no JSON list")
    expect(page.get_by_label("Message")).to_be_disabled()
    page.get_by_label("Tools", exact=True).fill(TOOLS)
    page.get_by_label("Close options").click()
    send(view, "How warm is it?")
    wait_for_answer(view)
    assert [tool["function"]["name"] for tool in node.chat.requests[-1].tools] == ["look_up"]
    field = answers(view).get_by_label("Result of look_up")
    node.chat.scripts["demo"] = says(Started((1,)), TextDelta("21 degrees.", (1,)), FINISHED)
    field.fill('{"celsius": 21}')
    assert view.violations() == []
    view.shot("tool")
    page.get_by_role("button", name="Send result").click()
    expect(answers(view).last).to_contain_text("21 degrees.")
    wait_for_answer(view)
    question, call_message, result = node.chat.requests[-1].messages
    [call] = call_message["tool_calls"]
    assert question == {"role": "user", "content": "How warm is it?"}
    assert (call_message["reasoning_content"], call["function"]["name"]) == ("Bern.", "look_up")
    assert result["tool_call_id"] == call["id"] and result["content"] == '{"celsius": 21}'
    assert view.violations() == []
    page.reload()
    expect(page.locator(".given")).to_contain_text("celsius")
    expect(answers(view)).to_have_count(2)


def test_a_reload_during_an_answer_keeps_its_text(view: Visit, node: Node) -> None:
    node.chat.scripts["demo"] = slowly(100_000)
    page = view.go()
    send(view, "Go on and on")
    expect(answers(view)).to_contain_text("word99")
    page.reload()
    expect(answers(view)).to_contain_text("Cut off")
    expect(answers(view)).to_contain_text("word99")
    node.chat.reset()
    wait_for_answer(view)
    answers(view).get_by_role("button", name="Regenerate").click()
    expect(answers(view)).to_contain_text("héllo")


def test_memory_is_flat_over_a_long_answer(view: Visit, node: Node) -> None:
    node.chat.scripts["demo"] = slowly(2000)
    page = view.go()
    session = page.context.new_cdp_session(page)

    def heap() -> float:
        session.send("HeapProfiler.collectGarbage")  # pyright: ignore[reportUnknownMemberType]
        return float(page.evaluate("performance.memory.usedJSHeapSize"))

    send(view, "once")
    wait_for_answer(view)
    before = heap()
    for _ in range(2):
        send(view, "again")
        wait_for_answer(view)
    expect(answers(view).last).to_contain_text("word1999")
    assert heap() < before + 1_000_000


def test_a_refusal_is_shown_and_can_be_tried_again(view: Visit, node: Node) -> None:
    del node.chat.scripts["demo"]
    page = view.go()
    send(view, "Hello")
    expect(answers(view).get_by_role("alert")).to_contain_text("There is no model 'demo'")
    node.chat.reset()
    page.get_by_role("button", name="Try again").click()
    expect(answers(view).last).to_contain_text("héllo")
