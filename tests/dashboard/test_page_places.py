"""The page's other places, and its connection to the node, over fake answers."""

import pytest
from browser import Visit, answers, model_button, send, visit
from fakes import FINISHED, says
from http_node import Node, serving_fakes
from page_cluster import Cluster, member, model, planned, stage
from playwright.sync_api import Browser, expect

from exo_node.dashboard import asset
from exo_node.node.chat.requests import Started, TextDelta
from exo_node.node.machine.events import EventLog

pytestmark = pytest.mark.timeout(300)


def test_an_idle_page_sends_no_requests(view: Visit, events: EventLog) -> None:
    page = view.go("#/cluster")
    expect(page.locator(".topology .name")).to_have_text("mac-1")
    page.wait_for_timeout(1000)
    before = len(view.requests)
    page.wait_for_timeout(4000)
    assert len(view.requests) == before


def hide(view: Visit, *, hidden: bool) -> None:
    """Sets the page's visibility, as a change of tabs does."""
    _ = view.page.evaluate(
        """hidden => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def test_metrics_are_requested_only_while_they_are_visible(view: Visit) -> None:
    view.page.clock.install()
    page = view.go("#/insight")
    expect(page.get_by_text("Charts are drawn here")).to_be_visible()
    view.until(lambda: view.count_requests("/metrics") == 1)
    page.clock.run_for(2_100)
    view.until(lambda: view.count_requests("/metrics") == 2)
    hide(view, hidden=True)
    page.clock.run_for(20_000)
    assert view.count_requests("/metrics") == 2
    hide(view, hidden=False)
    view.until(lambda: view.count_requests("/metrics") == 3)
    page.get_by_role("navigation").get_by_role("link", name="Settings").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Settings")
    page.clock.run_for(20_000)
    assert view.count_requests("/metrics") == 3


def test_a_profile_is_chosen_as_a_model_and_shows_its_settings(
    view: Visit, node: Node, cluster: Cluster
) -> None:
    published = {"value": 0.8, "source": "generation_config.json"}
    named = {
        "profile_of": "demo",
        "profile": {"temperature": 0.2, "system": True},
        "sampling": {"temperature": published, "top_p": published},
    }
    cluster.models += [model("coder", loaded=False, nodes=1, **named)]
    node.chat.scripts["coder"] = says(Started((1,)), TextDelta("as told", (1,)), FINISHED)
    page = view.go()
    expect(model_button(page)).to_have_text("Model demo")
    model_button(page).click()
    profiles = page.get_by_role("group", name="Your profiles").get_by_role("option")
    expect(profiles).to_contain_text(["demo · 33 MB · fits on one node"])
    assert view.violations() == []
    profiles.click()
    expect(model_button(page)).to_have_text("Model coder")
    welcome = page.locator(".welcome")
    expect(welcome).to_contain_text("profile of demo: temperature 0.2, a system message.")
    page.get_by_role("button", name="Options", exact=True).click()
    expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "0.2")
    expect(page.get_by_label("Top P")).to_have_attribute("placeholder", "0.8")
    expect(page.get_by_title("0.8: the publisher's generation_config.json")).to_have_count(1)
    assert view.violations() == []
    page.get_by_label("Close options").click()
    send(view, "Go")
    expect(answers(view)).to_contain_text("as told")
    page.get_by_role("navigation").get_by_role("link", name="Models").click()
    listed = page.get_by_role("region", name="Profiles")
    expect(listed.get_by_role("listitem")).to_have_text(
        "coderdemo · temperature 0.2, a system message"
    )
    expect(page.get_by_role("button", name="Load coder")).to_have_count(0)


def test_each_recipe_has_the_address_the_model_and_its_context(
    view: Visit, cluster: Cluster
) -> None:
    size = {"fits": {"nodes": 1, "needed_bytes": 1, "context_length": 12_288}}
    cluster.models = [model("Qwen/Qwen3-8B", loaded=False, nodes=1, **size)]
    cluster.identity = {"command": "~/exo/exo-node"}
    page = view.go("#/connect")
    expect(page.locator(".recipes h2").first).to_have_text("Coding tools")
    recipes = {
        "Coding tools": ["~/exo/exo-node launch claude Qwen/Qwen3-8B"],
        "Claude Code": [f"BASE_URL={view.base} ", "CONTEXT_TOKENS=12288", "OUTPUT_TOKENS=3072"],
        "Codex": [f'base_url = "{view.base}/v1"', "model_context_window = 12288"],
        "opencode": ['"exo/Qwen/Qwen3-8B"', '"context": 12288, "output": 3072', '"apiKey": "any"'],
        "Qwen Code": ["--model Qwen/Qwen3-8B", '"contextWindowSize": 12288'],
        "Cline": [f"-b {view.base}/v1 -k any -m Qwen/Qwen3-8B"],
        "Continue": ["contextLength: 12288"],
        "aider": ["--model openai/Qwen/Qwen3-8B --openai-api-base", '"max_input_tokens": 12288'],
        "Open WebUI, and anything in Docker": [f"docker.internal:{view.base.split(':')[-1]}/v1"],
    }
    for name, texts in recipes.items():
        section = page.get_by_role("region", name=name, exact=True)
        for text in texts:
            expect(section.locator("pre", has_text=text)).to_have_count(1)
    allowed = page.locator("pre", has_text="EXO_ALLOWED_HOSTS")
    expect(allowed).to_have_text("EXO_ALLOWED_HOSTS=host.docker.internal ~/exo/exo-node start")
    by_hand = page.get_by_role("region", name="pi", exact=True).locator("code")
    expect(by_hand.filter(has_text="--provider")).to_have_text(
        "pi --provider exo --model Qwen/Qwen3-8B"
    )
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the recipe for aider").first.click()
    assert view.base in page.evaluate("navigator.clipboard.readText()")
    assert page.get_by_text("not run").count() == 0
    assert view.violations() == []
    view.shot("connect")


def test_a_preview_shows_each_figure_of_the_plan(view: Visit, cluster: Cluster) -> None:
    cluster.nodes = [member(1), member(2)]
    one, two = (stage(number, at, at + 8, 24 * 10**9) for number, at in ((1, 0), (2, 8)))
    copied = {"node": two["node"], "name": "mac-2", "bytes": 2 * 10**9, "from": "mac-1"}
    best = planned(one, two, brings=[{**copied, "seconds": 1200.0}])
    alone = planned(stage(1, 0, 16, 47_500_000_000)) | {"seconds_per_token": 0.1}
    cluster.previews = {
        "": {"best": best, "runner_up": alone},
        one["node"]: {"best": planned(stage(2, 0, 16, 1))},
        two["node"]: {"best": alone},
    }
    page = view.go("#/models")
    page.get_by_role("button", name="Load demo", exact=True).click()
    dialog = page.get_by_role("dialog")
    choices = dialog.get_by_role("radiogroup").locator("label")
    expect(choices).to_have_text(
        [
            "Best: 2 nodes · about 25 tok/smac-1 layers 0-7 → mac-2 layers 8-15because",
            "Next best: mac-1 · about 10 tok/sbecause",
        ]
    )
    room = "24 GB of the 48 GB that are left of its memory;"
    moves = "; if it leaves: it moves to"
    expect(dialog.locator("dd")).to_have_text(
        [
            f"{room} its files are on its disk{moves} mac-2, about 25 tok/s",
            f"{room} up to 2 GB are copied from mac-1, about 20 min{moves} mac-1, about 10 tok/s",
            "4,096 tokens",
        ]
    )
    choices.last.click()
    expect(dialog.locator("dd").first).to_contain_text("48 GB of the 48 GB")
    assert view.violations() == []


def test_the_bits_of_caches_are_planned_and_loaded_as_chosen(view: Visit, cluster: Cluster) -> None:
    cluster.previews = {"": {"best": planned(stage(1, 0, 16, 1)) | {"kv_bits": 8}}}
    page = view.go("#/models")
    page.get_by_role("button", name="Load demo", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("Memory of the context").click()
    with page.expect_request(lambda request: "preview" in request.url) as preview:
        dialog.get_by_label("Attention caches").select_option("8")
    assert "kv_bits=8" in preview.value.url
    expect(dialog.locator("dd").last).to_have_text("4,096 tokens, in caches of 8 bits")
    assert view.violations() == []
    with page.expect_request(lambda request: request.method == "POST") as request:
        dialog.get_by_role("button", name="Load", exact=True).click()
    assert request.value.post_data_json == {"model": "demo", "kv_bits": 8}


def test_a_dead_node_shows_no_stages_and_the_next_best_choice_is_loaded_as_shown(
    view: Visit, cluster: Cluster
) -> None:
    ran = {"model": "demo", "layers": [0, 16], "weight_bytes": 9, "status": "ready"}
    cluster.nodes = [member(1), member(2, status="dead", stages=[ran])]
    page = view.go("#/cluster")
    dead = page.locator(".topology .card.dead")
    expect(dead.locator(".name")).to_have_text("mac-2")
    expect(dead.locator(".what")).to_have_text("64 GB")
    one, two = (stage(number, at, at + 8, 10**9) for number, at in ((1, 0), (2, 8)))
    alone = {"best": planned(stage(1, 0, 16, 10**9))}
    cluster.previews = {
        "": {**alone, "runner_up": planned(two, one)},
        one["node"]: alone,
        two["node"]: alone,
    }
    page.get_by_role("navigation").get_by_role("link", name="Models").click()
    page.get_by_role("button", name="Load demo", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("Next best").click()
    with page.expect_request(lambda request: request.method == "POST") as request:
        dialog.get_by_role("button", name="Load", exact=True).click()
    layers = [{"node": each["node"], "layers": 8} for each in (two, one)]
    assert request.value.post_data_json == {"model": "demo", "layers": layers}


def test_events_reach_the_page_without_polling(
    view: Visit, events: EventLog, cluster: Cluster
) -> None:
    page = view.go("#/cluster")
    expect(page.locator(".topology .name")).to_have_count(1)
    cluster.nodes = [member(1), member(2)]
    assert cluster.loop is not None
    cluster.loop.call_soon_threadsafe(lambda: events.add("joined", "mac-2 joined"))
    expect(page.locator(".timeline")).to_contain_text("mac-2 joined")
    expect(page.locator(".topology .name")).to_have_count(2)


def test_with_a_key_the_page_asks_for_it_and_refuses_a_wrong_one(browser: Browser) -> None:
    with serving_fakes(static=asset, events=EventLog(), api_key="right") as node:
        Cluster(node)
        with visit(browser, f"http://127.0.0.1:{node.port}") as view:
            page = view.go()
            expect(page.get_by_role("main")).to_contain_text("exo-node dashboard")
            page.get_by_label("API key").fill("wrong")
            page.get_by_role("button", name="Continue").click()
            expect(page.get_by_role("alert")).to_contain_text("refused the key")
            assert view.violations() == []
            page.get_by_label("API key").fill("right")
            page.get_by_role("button", name="Continue").click()
            expect(page.get_by_label("Message")).to_be_enabled()
            send(view, "Hello")
            expect(answers(view)).to_contain_text("héllo")


def test_a_lost_connection_is_shown_until_the_node_returns(view: Visit) -> None:
    page = view.go()
    expect(page.get_by_label("Message")).to_be_enabled()
    page.route("**/v1/**", lambda route: route.abort())
    hide(view, hidden=True)
    hide(view, hidden=False)
    expect(page.locator(".banner")).to_contain_text("Connection lost")
    page.unroute("**/v1/**")
    expect(page.locator(".banner")).to_have_count(0)
