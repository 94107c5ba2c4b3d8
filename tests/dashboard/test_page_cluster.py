"""The page of a real cluster: two nodes with the demo, and a third that joins."""

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from browser import Visit, browsers, unload, visit
from nodes import Node, eventually, free_ports, node
from playwright.sync_api import Browser, Locator, expect

WITHIN_S = 300.0
WITHIN_MS = 1000 * WITHIN_S
"""Long, so that a loaded machine fails no test."""

pytestmark = pytest.mark.timeout(600)


@dataclass
class Pair:
    browser: Browser
    one: Node
    two: Node
    ports: list[int]
    """Ports for node-to-node traffic: those of the two nodes, and a free one."""
    root: Path
    start_two: Callable[[], Node]

    def load(self, **options: int) -> None:
        """Brings both nodes and the demo into the state that a test begins with."""
        if self.two.process.poll() is not None:
            self.two = self.start_two()
        eventually(lambda: {"mac-1", "mac-2"} <= set(alive(self.one)), WITHIN_S)
        body = {"model": "demo", "replicas": 1, **options}
        reply = self.one.call("POST", "/v1/placements", body, timeout_s=WITHIN_S)
        assert reply.status == 200, reply
        eventually(lambda: self._states() == ["ready"], WITHIN_S)

    def _states(self) -> list[str]:
        return [each["status"] for each in self.one.call("GET", "/v1/placements").body["data"]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two nodes that all tests share, in whatever order."""
    root = tmp_path_factory.mktemp("page")
    ports = free_ports(3)
    key = {"EXO_CLUSTER_KEY": "a" * 32}

    def flags(own: int, other: int) -> list[str]:
        return ["--no-mdns", "--grpc-port", str(own), "--peer", f"127.0.0.1:{other}"]

    with (
        browsers() as browser,
        node(root / "mac-1", *flags(ports[0], ports[1]), env=key) as one,
        ExitStack() as stack,
    ):

        def start_two() -> Node:
            (root / "mac-2" / "node.json").unlink(missing_ok=True)
            two = node(root / "mac-2", *flags(ports[1], ports[0]), env=key)
            return stack.enter_context(two)

        yield Pair(browser, one, start_two(), ports, root, start_two)


def alive(running: Node) -> list[str]:
    nodes = running.call("GET", "/v1/cluster").body["nodes"]
    return [each["name"] for each in nodes if each["status"] == "alive"]


@contextmanager
def owners(pair: Pair, on: Node | None = None) -> Generator[Visit]:
    """The page of a node, by default the first, opened by the link of `exo-node dashboard`."""
    running = on or pair.one
    ticket = running.call("POST", "/v1/session/ticket", {}).body["ticket"]
    with visit(pair.browser, f"http://127.0.0.1:{running.port}") as view:
        _ = view.go(f"#login={ticket}")
        expect(view.page.get_by_label("Message")).to_be_enabled(timeout=WITHIN_MS)
        yield view


def go(view: Visit, place: str) -> None:
    view.page.get_by_role("navigation").get_by_role("link", name=place, exact=True).click()


def loaded_model(view: Visit) -> Locator:
    """The one model in memory, on the Models page."""
    return view.page.get_by_role("region", name="Loaded").locator(".model")


def test_a_fresh_cluster_answers_the_first_message(pair: Pair) -> None:
    """Fresh where this test is the first one."""
    with owners(pair) as view:
        page = view.page
        page.get_by_label("Message").fill("Tell me a story.")
        page.keyboard.press("Enter")
        answer = page.locator("article.said")
        again = answer.get_by_role("button", name="Regenerate")
        expect(again).to_be_enabled(timeout=WITHIN_MS)
        expect(answer.locator(".prose")).not_to_be_empty()
        expect(answer.locator(".brief")).to_contain_text("tok/s")
        assert view.violations() == []
        view.shot("chat")
        for place in ("Cluster", "Models", "Insight", "Connect", "Settings"):
            go(view, place)
            expect(page.get_by_role("heading", level=1)).to_have_text(place)
            expect(page.get_by_text("One moment")).to_have_count(0)
            assert view.violations() == [], place
            view.shot(place.lower())


def test_the_link_of_every_node_gives_the_rights_of_its_user(pair: Pair) -> None:
    for running in (pair.one, pair.two):  # one of them is the head, and either may be
        with owners(pair, running) as view:
            go(view, "Settings")
            switch = view.page.get_by_role("switch", name="Native multi-token prediction")
            expect(switch).to_be_enabled(timeout=WITHIN_MS)
            expect(view.page.get_by_text("Looking only")).to_have_count(0)


def test_mtp_is_turned_off_with_the_reason_shown(pair: Pair) -> None:
    pair.load()
    with owners(pair) as view:
        go(view, "Models")
        drafts = "MTP on, drafts up to 7 a round (K = "
        expect(loaded_model(view)).to_contain_text(drafts, timeout=WITHIN_MS)
        expect(loaded_model(view)).to_contain_text("Prompt lookup on", timeout=WITHIN_MS)
        go(view, "Settings")
        switch = view.page.get_by_role("switch", name="Native multi-token prediction")
        switch.uncheck()
        go(view, "Models")
        expect(loaded_model(view)).to_contain_text("MTP off:", timeout=WITHIN_MS)
        go(view, "Settings")
        switch.check()
        expect(switch).to_be_enabled()


def test_two_copies_answer_and_a_third_has_no_room(pair: Pair) -> None:
    pair.load()
    with owners(pair) as view:
        page = view.page
        go(view, "Cluster")
        control = page.get_by_role("group", name="Copies of demo")
        number = control.get_by_role("status")
        expect(number).to_have_text("1")
        control.get_by_role("button", name="One copy more").click()
        expect(number).to_have_text("1 of 2")
        expect(number).to_have_text("2", timeout=WITHIN_MS)
        copies = page.get_by_role("list", name="The copies of demo").locator(".copy")
        expect(copies.locator(".state")).to_have_text(["ready", "ready"])
        expect(copies.locator(".seg-name")).to_have_text(["mac-1", "mac-2"])
        control.get_by_role("button", name="One copy more").click()
        reason = control.get_by_text("Not 3 yet: for a third no node is left")
        expect(reason).to_be_visible(timeout=WITHIN_MS)
        expect(number).to_have_text("2 of 3")
        assert view.violations() == []
        view.shot("copies")
        control.get_by_role("button", name="One copy less").click()
        expect(number).to_have_text("2")
        expect(reason).to_have_count(0)


def test_a_model_is_previewed_spread_and_loaded(pair: Pair) -> None:
    pair.load()
    with owners(pair) as view:
        page = view.page
        go(view, "Models")
        unload(page, "demo", WITHIN_MS)
        page.get_by_role("button", name="Load demo", exact=True).click()
        expect(page.get_by_role("button", name="Delete demo")).to_have_count(0)  # on either disk
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Best: mac-")
        expect(dialog).to_contain_text("Next best")
        expect(dialog).to_contain_text("if it leaves: it moves to")
        dialog.get_by_text("Spread it yourself").click()
        dialog.get_by_label("At least").select_option("2")
        expect(dialog).to_contain_text("Best: 2 nodes")
        assert view.violations() == []
        view.shot("preview")
        dialog.get_by_role("button", name="Load", exact=True).click()
        expect(loaded_model(view).locator(".state")).to_have_text("ready", timeout=WITHIN_MS)
        expect(loaded_model(view)).to_contain_text(
            "MTP off: native MTP needs the whole model on one node"
        )
        expect(loaded_model(view)).to_contain_text("Prompt lookup on")
        go(view, "Cluster")
        expect(page.locator(".topology .hop")).to_have_count(1)
        expect(page.get_by_label("Layers of demo by node").locator("li")).to_have_count(2)
        view.shot("spread")


def test_a_joining_node_is_approved_by_its_digits(pair: Pair) -> None:
    peer = f"127.0.0.1:{pair.ports[0]}"
    flags = ["--no-mdns", "--grpc-port", str(pair.ports[2]), "--peer", peer]
    with owners(pair) as view, node(pair.root / "mac-3", *flags) as three:
        page = view.page
        go(view, "Cluster")
        form = page.get_by_role("form", name="mac-3 asks to join")
        field = form.get_by_label("The six digits")
        expect(field).to_be_visible(timeout=WITHIN_MS)
        assert view.violations() == []
        view.shot("joining")
        digits = three.call("GET", "/v1/join/requests").body["digits"]
        field.fill(digits)
        form.get_by_role("button", name="Approve mac-3").click()
        expect(page.locator(".topology .name")).to_have_text(
            ["mac-1", "mac-2", "mac-3"], timeout=WITHIN_MS
        )
        expect(page.locator(".timeline")).to_contain_text("mac-3")


def test_an_answer_resumes_when_a_node_is_killed_and_the_page_shows_the_loss(pair: Pair) -> None:
    pair.load(min_nodes=2, max_nodes=2)
    with owners(pair) as view:
        page = view.page
        page.get_by_label("Message").fill("Tell me a story.")
        page.keyboard.press("Enter")
        answer = page.locator("article.said")
        expect(answer.locator(".prose")).not_to_be_empty(timeout=WITHIN_MS)
        pair.two.process.kill()
        expect(answer.locator(".brief")).to_contain_text("resumed", timeout=WITHIN_MS)
        go(view, "Cluster")
        expect(page.locator(".timeline .bad").first).to_be_visible(timeout=WITHIN_MS)
        lost = page.locator(".topology .card", has_text="mac-2")
        expect(lost).to_have_class(re.compile("dead"), timeout=WITHIN_MS)
        expect(lost).not_to_contain_text("layers")
        expect(page.get_by_label("Stages on mac-2").locator("li")).to_have_count(0)
        view.shot("killed")
