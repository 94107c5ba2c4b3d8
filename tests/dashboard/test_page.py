"""The page in a browser, over a node whose answers and cluster are made up."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest
from browser import DARK, PHONE, Visit, browsers, visit
from fakes import FINISHED, Json, Script, says
from http_node import Node, serving_fakes
from page_cluster import Cluster, member, model
from playwright.sync_api import Browser, Locator, expect

from exo_node.dashboard import asset
from exo_node.node.chat.requests import (
    Called,
    Event,
    Finished,
    PrefillProgress,
    Reasoned,
    Started,
    TextDelta,
    TokenLogprob,
)
from exo_node.node.machine.events import EventLog

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


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with browsers() as running:
        yield running


@pytest.fixture
def events() -> EventLog:
    return EventLog()


@pytest.fixture
def node(events: EventLog) -> Generator[Node]:
    with serving_fakes(static=asset, events=events) as running:
        yield running


@pytest.fixture
def cluster(node: Node) -> Cluster:
    return Cluster(node)


@pytest.fixture
def seen(browser: Browser, node: Node, cluster: Cluster) -> Generator[Visit]:
    with visit(browser, f"http://127.0.0.1:{node.port}") as page:
        yield page


def say(seen: Visit, text: str) -> None:
    seen.page.get_by_label("Message").fill(text)
    seen.page.keyboard.press("Enter")


def answers(seen: Visit) -> Locator:
    return seen.page.locator("article.said")


def over(seen: Visit) -> None:
    """The last answer has ended."""
    expect(answers(seen).last.get_by_role("button", name="Regenerate")).to_be_enabled()


def test_the_first_load_is_small_and_chooses_a_model_that_runs(seen: Visit) -> None:
    page = seen.go()
    expect(page.get_by_label("Model")).to_have_value("demo")
    page.wait_for_timeout(700)
    done = [request for request in seen.requests if "/v1/events" not in request.url]
    sizes = [request.sizes()["responseBodySize"] for request in done]
    assert len(seen.requests) <= 20, [request.url for request in seen.requests]
    assert sum(sizes) < 300_000
    assert seen.violations() == []
    seen.shot("first")


def test_no_state_is_asked_for_while_nothing_happens(seen: Visit, events: EventLog) -> None:
    page = seen.go("#/cluster")
    expect(page.locator(".topology .name")).to_have_text("mac-1")
    page.wait_for_timeout(1000)
    before = len(seen.requests)
    page.wait_for_timeout(4000)
    assert len(seen.requests) == before


def test_figures_are_asked_for_only_where_somebody_looks_at_them(seen: Visit) -> None:
    seen.page.clock.install()
    page = seen.go("#/insight")
    expect(page.get_by_text("Tokens per second")).to_be_visible()
    seen.until(lambda: seen.asked("/metrics") == 1)
    page.clock.run_for(2_100)
    seen.until(lambda: seen.asked("/metrics") == 2)
    hide(seen, hidden=True)
    page.clock.run_for(20_000)
    assert seen.asked("/metrics") == 2
    hide(seen, hidden=False)
    seen.until(lambda: seen.asked("/metrics") == 3)
    page.get_by_role("navigation").get_by_role("link", name="Settings").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Settings")
    page.clock.run_for(20_000)
    assert seen.asked("/metrics") == 3


def test_a_conversation_outlives_the_page(seen: Visit) -> None:
    page = seen.go()
    say(seen, "Who are you?")
    over(seen)
    expect(answers(seen)).to_contain_text("héllo")
    page.reload()
    expect(answers(seen)).to_contain_text("héllo")
    expect(page.locator("#conversations")).to_contain_text("Who are you?")


def test_editing_and_regenerating_add_branches(seen: Visit, node: Node) -> None:
    page = seen.go()
    say(seen, "First?")
    over(seen)
    node.chat.scripts["demo"] = says(Started((1,)), TextDelta("another", (1,)), FINISHED)
    answers(seen).get_by_role("button", name="Regenerate").click()
    expect(answers(seen)).to_contain_text("another")
    page.get_by_role("button", name="Previous answer").click()
    expect(answers(seen)).to_contain_text("héllo")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the question").fill("Second?")
    page.get_by_role("button", name="Send as a new branch").click()
    over(seen)
    expect(page.locator(".question")).to_contain_text("Second?")
    assert node.chat.requests[-1].messages == ({"role": "user", "content": "Second?"},)
    page.get_by_role("button", name="Previous question").click()
    expect(page.locator(".question")).to_contain_text("First?")


def test_conversations_are_found_renamed_exported_and_deleted(seen: Visit) -> None:
    page = seen.go()
    for number in range(7):
        say(seen, f"Question {number}")
        over(seen)
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
    seen: Visit, node: Node, cluster: Cluster
) -> None:
    cluster.nodes = [member(1, name="<img src=x onerror=document.title=1>")]
    cluster.models[1] |= {"native_mtp": None, "mtp": "<b onclick=1>bold</b>"}
    node.chat.scripts["demo"] = says(Started((1,)), TextDelta(HOSTILE, (1,)), FINISHED)
    page = seen.go()
    say(seen, "<script>document.title=1</script>")
    over(seen)
    assert page.locator("main :is(img, script, b, [onerror])").count() == 0
    assert page.locator("main a[href^=javascript]").count() == 0
    for place, text in (("#/cluster", "<img src=x onerror="), ("#/models", "<b onclick=1>")):
        seen.go(place)
        expect(page.get_by_role("main").get_by_text(text).last).to_be_visible()
        assert page.locator("main :is(img, script, b, [onerror])").count() == 0
    assert page.title() == "exo-node"
    assert all(request.url.startswith(seen.base) for request in seen.requests)


def logprobs(*texts: str) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(7, text.encode(), -0.1) for text in texts)


def test_an_answer_shows_its_thinking_its_calls_and_where_its_tokens_come_from(
    seen: Visit, node: Node
) -> None:
    node.chat.scripts["demo"] = says(
        PrefillProgress(1, 2),
        Started((1,)),
        Reasoned("First I think."),
        TextDelta("one two three", (1, 2, 3), logprobs("one", " two", " three"), 2),
        Called("look_up", '{"city": "Bern"}'),
        Finished("stop", 3, 3, 2, 1, STATS),
    )
    page = seen.go()
    page.get_by_role("button", name="Options", exact=True).click()
    page.get_by_label("Keep each token's origin").check()
    page.get_by_label("Close options").click()
    say(seen, "Go")
    over(seen)
    said = answers(seen)
    expect(said.get_by_text("First I think.")).to_be_hidden()
    said.locator("summary").click()
    expect(said.get_by_text("First I think.")).to_be_visible()
    expect(said.locator(".call")).to_contain_text("look_up")
    expect(said.locator(".brief")).to_contain_text("41.5 tok/s")
    said.get_by_role("button", name="Tokens", exact=True).click()
    expect(said.locator(".token-text .token.draft")).to_have_text(["one", " two"])
    expect(said.locator(".token-text .token.own")).to_have_text([" three"])
    # Two rounds drafted, and one of them a second token: what was not drafted was not rejected.
    positions = said.get_by_label("Accepted drafts by position").get_by_role("listitem")
    expect(positions).to_have_text(["draft 1100 %", "draft 2100 %"])
    assert seen.violations() == []
    seen.shot("tokens")


def test_code_is_highlighted_and_copied(seen: Visit, node: Node) -> None:
    code = "```python\ndef f():\n    return 1\n```\n"
    node.chat.scripts["demo"] = says(Started((1,)), TextDelta(code, (1,)), FINISHED)
    page = seen.go()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    say(seen, "Code")
    over(seen)
    expect(answers(seen).locator(".hljs-keyword").first).to_have_text("def")
    page.get_by_role("button", name="Copy", exact=True).last.click()
    page.locator("button.copy-code").click()
    expect(page.locator("button.copy-code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def f():\n    return 1\n"
    assert seen.violations() == []


def test_options_reach_the_request_and_a_preset_keeps_them(seen: Visit, node: Node) -> None:
    page = seen.go()
    page.get_by_role("button", name="Options", exact=True).click()
    page.get_by_label("System prompt").fill("Be short.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Drafts (K)").select_option("3")
    page.get_by_label("Name for a new preset").fill("Mine")
    page.get_by_role("button", name="Keep", exact=True).click()
    assert seen.violations() == []
    say(seen, "Go")
    over(seen)
    asked = node.chat.requests[-1]
    assert asked.messages[0] == {"role": "system", "content": "Be short."}
    assert (asked.sampling.temperature, asked.num_draft_tokens) == (0.5, 3)
    page.reload()
    page.get_by_role("link", name="New chat").click()
    page.get_by_role("button", name="Mine").click()
    page.get_by_role("combobox", name="Preset").select_option("Greedy")
    expect(page.get_by_label("Temperature")).to_have_value("0")
    page.get_by_role("combobox", name="Preset").select_option("Mine")
    expect(page.get_by_label("Temperature")).to_have_value("0.5")


def test_a_profile_is_chosen_as_a_model_is_and_says_what_it_sets(
    seen: Visit, node: Node, cluster: Cluster
) -> None:
    named = {"profile_of": "demo", "profile": {"temperature": 0.2, "system": True}}
    cluster.models += [model("coder", loaded=False, nodes=1, **named)]
    node.chat.scripts["coder"] = says(Started((1,)), TextDelta("as told", (1,)), FINISHED)
    page = seen.go()
    picker = page.get_by_label("Model")
    expect(picker).to_have_value("demo")
    expect(picker.locator("optgroup option")).to_have_text(["coder (demo, on disk)"])
    picker.select_option("coder")
    welcome = page.locator(".welcome")
    expect(welcome).to_contain_text("profile of demo: temperature 0.2, a system message.")
    page.get_by_role("button", name="Options", exact=True).click()
    expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "0.2")
    assert seen.violations() == []
    page.get_by_label("Close options").click()
    say(seen, "Go")
    expect(answers(seen)).to_contain_text("as told")
    page.get_by_role("navigation").get_by_role("link", name="Models").click()
    listed = page.get_by_role("region", name="Profiles")
    expect(listed.get_by_role("listitem")).to_have_text(
        "coderdemo · temperature 0.2, a system message"
    )
    expect(page.get_by_role("button", name="Load coder")).to_have_count(0)


def slowly(count: int) -> Script:
    async def script() -> AsyncGenerator[Event]:
        yield Started((1,))
        for number in range(count):
            yield TextDelta(f"word{number} " + ("\n\n" if number % 50 == 49 else ""), (number,))
            if number % 10 == 0:
                await asyncio.sleep(0.01)
        yield FINISHED

    return script


def test_an_answer_is_stopped_and_says_so(seen: Visit, node: Node) -> None:
    node.chat.scripts["demo"] = slowly(100_000)
    page = seen.go()
    say(seen, "Go on and on")
    expect(answers(seen)).to_contain_text("word9")
    page.get_by_role("button", name="Stop").click()
    expect(answers(seen).get_by_text("Stopped.")).to_be_visible()
    assert node.chat.closed.wait(30)


TOOLS = '[{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]'


def test_a_tools_result_goes_back_and_is_answered(seen: Visit, node: Node) -> None:
    node.chat.scripts["demo"] = says(
        Started((1,)), Reasoned("Bern."), Called("look_up", '{"city": "Bern"}'), FINISHED
    )
    page = seen.go()
    page.get_by_role("button", name="Options", exact=True).click()
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Tools", exact=True).fill("[{}]")
    expect(page.get_by_role("alert")).to_contain_text("no JSON list")
    expect(page.get_by_label("Message")).to_be_disabled()
    page.get_by_label("Tools", exact=True).fill(TOOLS)
    page.get_by_label("Close options").click()
    say(seen, "How warm is it?")
    over(seen)
    assert [tool["function"]["name"] for tool in node.chat.requests[-1].tools] == ["look_up"]
    field = answers(seen).get_by_label("Result of look_up")
    node.chat.scripts["demo"] = says(Started((1,)), TextDelta("21 degrees.", (1,)), FINISHED)
    field.fill('{"celsius": 21}')
    assert seen.violations() == []
    seen.shot("tool")
    page.get_by_role("button", name="Send result").click()
    expect(answers(seen).last).to_contain_text("21 degrees.")
    over(seen)
    asked, called, given = node.chat.requests[-1].messages
    [call] = called["tool_calls"]
    assert asked == {"role": "user", "content": "How warm is it?"}
    assert (called["reasoning_content"], call["function"]["name"]) == ("Bern.", "look_up")
    assert given["tool_call_id"] == call["id"] and given["content"] == '{"celsius": 21}'
    assert seen.violations() == []
    page.reload()
    expect(page.locator(".given")).to_contain_text("celsius")
    expect(answers(seen)).to_have_count(2)


def test_a_reload_during_an_answer_keeps_what_had_arrived(seen: Visit, node: Node) -> None:
    node.chat.scripts["demo"] = slowly(100_000)
    page = seen.go()
    say(seen, "Go on and on")
    expect(answers(seen)).to_contain_text("word99")
    page.reload()
    expect(answers(seen)).to_contain_text("Cut off")
    expect(answers(seen)).to_contain_text("word99")
    node.chat.reset()
    over(seen)
    answers(seen).get_by_role("button", name="Regenerate").click()
    expect(answers(seen)).to_contain_text("héllo")


def test_memory_is_flat_over_a_long_answer(seen: Visit, node: Node) -> None:
    node.chat.scripts["demo"] = slowly(2000)
    page = seen.go()
    session = page.context.new_cdp_session(page)

    def heap() -> float:
        session.send("HeapProfiler.collectGarbage")  # pyright: ignore[reportUnknownMemberType]
        return float(page.evaluate("performance.memory.usedJSHeapSize"))

    say(seen, "once")
    over(seen)
    before = heap()
    for _ in range(2):
        say(seen, "again")
        over(seen)
    expect(answers(seen).last).to_contain_text("word1999")
    assert heap() < before + 1_000_000


def test_a_refusal_is_told_and_tried_again(seen: Visit, node: Node) -> None:
    del node.chat.scripts["demo"]
    page = seen.go()
    say(seen, "Hello")
    expect(answers(seen).get_by_role("alert")).to_contain_text("there is no model 'demo'")
    node.chat.reset()
    page.get_by_role("button", name="Try again").click()
    expect(answers(seen).last).to_contain_text("héllo")


@pytest.mark.parametrize("look", [{}, PHONE, DARK], ids=["desk", "phone", "dark"])
def test_sixteen_nodes_are_drawn_in_the_order_that_people_count(
    browser: Browser, node: Node, cluster: Cluster, look: dict[str, Any], request: Any
) -> None:
    cluster.nodes = [member(number) for number in reversed(range(1, 17))]
    with visit(browser, f"http://127.0.0.1:{node.port}", **look) as seen:
        page = seen.go("#/cluster")
        names = page.locator(".topology .name")
        expect(names).to_have_text([f"mac-{number}" for number in range(1, 17)])
        for box in ("html", "main"):
            fits = "box => box.scrollWidth <= box.clientWidth"
            assert page.locator(box).evaluate(fits), f"{box} scrolls sideways"
        assert seen.violations() == []
        seen.shot(f"sixteen-{request.node.callspec.id}")


def test_what_happens_is_told_without_asking_by_the_clock(
    seen: Visit, events: EventLog, cluster: Cluster
) -> None:
    page = seen.go("#/cluster")
    expect(page.locator(".topology .name")).to_have_count(1)
    cluster.nodes = [member(1), member(2)]
    assert cluster.loop is not None
    cluster.loop.call_soon_threadsafe(lambda: events.add("joined", "mac-2 joined"))
    expect(page.locator(".timeline")).to_contain_text("mac-2 joined")
    expect(page.locator(".topology .name")).to_have_count(2)


def test_with_a_key_the_page_asks_for_it_and_refuses_a_wrong_one(browser: Browser) -> None:
    with serving_fakes(static=asset, events=EventLog(), api_key="right") as node:
        Cluster(node)
        with visit(browser, f"http://127.0.0.1:{node.port}") as seen:
            page = seen.go()
            page.get_by_label("API key").fill("wrong")
            page.get_by_role("button", name="Continue").click()
            expect(page.get_by_role("alert")).to_contain_text("refused the key")
            assert seen.violations() == []
            page.get_by_label("API key").fill("right")
            page.get_by_role("button", name="Continue").click()
            expect(page.get_by_label("Message")).to_be_enabled()
            say(seen, "Hello")
            expect(answers(seen)).to_contain_text("héllo")


def hide(seen: Visit, *, hidden: bool) -> None:
    """As if another tab were looked at, or this one again."""
    _ = seen.page.evaluate(
        """hidden => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def test_a_node_that_is_gone_is_told_and_its_return_noticed(seen: Visit) -> None:
    page = seen.go()
    expect(page.get_by_label("Message")).to_be_enabled()
    page.route("**/v1/**", lambda route: route.abort())
    hide(seen, hidden=True)
    hide(seen, hidden=False)
    expect(page.locator(".banner")).to_contain_text("Connection lost")
    page.unroute("**/v1/**")
    expect(page.locator(".banner")).to_have_count(0)
