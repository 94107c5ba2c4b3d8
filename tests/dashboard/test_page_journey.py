"""A newcomer's way on the page of a real node: from an empty disk to an answer, and back again.

The node's hub is a stand-in on loopback, which serves the demo's files as a repository.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_stub import exo_node
from browser import Visit, answers, found, search, send, unload, visit
from hub import FakeHub, serve
from models import DEMO
from nodes import Node, node
from playwright.sync_api import Browser, Locator, Page, expect

from exo_node.node.store.model_folder import is_model_file

pytestmark = pytest.mark.timeout(600)

SMALL = "stories/storyteller-16m"
LARGE = "giants/storyteller-405b"
LARGE_WEIGHTS = "model-00001-of-00001.safetensors"
LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
WIDE: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
NARROW: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "has_touch": True,
    "is_mobile": True,
}
FITS = "box => box.scrollWidth <= box.clientWidth"
RECORD_NOTES = """() => {
  window.notes = [];
  const record = () => document.querySelectorAll("article.said .pulse")
    .forEach(note => window.notes.push(note.textContent));
  const changes = {subtree: true, childList: true, characterData: true};
  new MutationObserver(record).observe(document.body, changes);
}"""
IN_WORDS = "note => import('/static/answer.js').then(answer => answer.inWords(note))"
PIECES_S = 0.05
"""Before each 64 KiB of weights, so that a download takes some seconds."""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub({})
    hub.others[SMALL] = {
        path.name: path.read_bytes() for path in DEMO.iterdir() if is_model_file(path.name)
    }
    hub.others[LARGE] = {"config.json": json.dumps(LLAMA_405B).encode(), LARGE_WEIGHTS: b"x"}
    hub.sizes[LARGE_WEIGHTS] = 810 * 10**9
    with serve(hub):
        yield hub


@pytest.fixture
def running(hub: FakeHub, tmp_path: Path) -> Iterator[Node]:
    settings = {"HF_HOME": "hf", "EXO_PROFILES_FILE": "profiles.toml", "EXO_CARDS_DIR": "cards"}
    env = {name: str(tmp_path / path) for name, path in settings.items()}
    env["HF_ENDPOINT"] = hub.url
    with node(tmp_path / "mac-1", "--no-mdns", env=env) as own:
        yield own


class Journey:
    """One visit, whose states are each checked and photographed."""

    def __init__(self, view: Visit, name: str) -> None:
        self._view = view
        self._name = name
        self._steps = 0

    def stop(self, step: str) -> None:
        """Checks the page as it is now."""
        self._steps += 1
        self._view.shot(f"journey-{self._name}-{self._steps:02}-{step}")
        assert self._view.violations() == [], step
        for box in ("html", "main"):
            assert self._view.page.locator(box).evaluate(FITS), f"{step}: {box} scrolls sideways"


LOAD_MS = 200_000
"""A load's timeout, for machines with much else to do."""


def go_to(page: Page, place: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=place).click()


def share(bar: Locator) -> float:
    return float(bar.get_attribute("value") or 0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_a_newcomer_finds_what_fits_downloads_it_chats_and_deletes_it(
    browser: Browser, running: Node, hub: FakeHub, size: dict[str, Any], scheme: Any, request: Any
) -> None:
    link = exo_node("dashboard", EXO_DATA_DIR=str(running.data_dir)).stdout.strip()
    base, _, ticket = link.partition("/#")
    with visit(browser, base, color_scheme=scheme, **size) as view:
        journey = Journey(view, request.node.callspec.id)
        page = view.go(f"#{ticket}")
        welcome = page.locator(".welcome")
        expect(welcome).to_contain_text("A toy to try this page with")
        expect(welcome.get_by_role("link", name="Models")).to_be_visible()
        journey.stop("welcome")

        welcome.get_by_role("link", name="Models").click()
        expect(page.get_by_role("heading", name="Find a model")).to_be_visible()
        journey.stop("models")
        look_for(page, journey)
        fetch(view, hub, journey)
        talk_to(view, journey)
        remove(view, running, journey)


def look_for(page: Page, journey: Journey) -> None:
    search(page, "storyteller")
    expect(found(page)).to_have_count(2)
    large, small = (found(page).filter(has_text=name.partition("/")[2]) for name in (LARGE, SMALL))
    expect(large).to_contain_text("Does not fit: it needs")
    expect(large).to_contain_text("and no node can hold it: mac-1 has")
    expect(large.get_by_role("button")).to_have_text("Download anyway")
    expect(small).to_contain_text("fits on one node")
    small.scroll_into_view_if_needed()
    journey.stop("found")


def fetch(view: Visit, hub: FakeHub, journey: Journey) -> None:
    hub.slow_s = PIECES_S
    page = view.page
    page.get_by_role("button", name=f"Download {SMALL}").click()
    region = page.get_by_role("region", name="Downloads")
    cancel = region.get_by_role("button", name=f"Cancel the download of {SMALL}")
    cancel.click()
    region.get_by_role("button", name="Keep").click()
    expect(region.locator(".state")).to_have_text("downloading")
    cancel.click()
    region.get_by_role("button", name="Cancel and delete").click()
    expect(region).to_have_count(0)
    page.get_by_role("button", name=f"Download {SMALL}").click()
    expect(region).to_contain_text(re.compile(r"\d+ [kM]B of 33 MB, \d+ %"))
    bar = region.get_by_role("progressbar", name=f"Downloaded of {SMALL}")
    view.until(lambda: share(bar) > 0.1)
    journey.stop("downloading")
    region.get_by_role("button", name=f"Pause the download of {SMALL}").click()
    expect(region.locator(".state")).to_have_text("paused")
    journey.stop("paused")
    hub.slow_s = 0
    region.get_by_role("button", name=f"Resume the download of {SMALL}").click()
    expect(region.locator(".state")).to_have_text("downloaded")
    assert any(range for _, _, range in hub.requests), "the download began from its first byte"
    journey.stop("downloaded")


def talk_to(view: Visit, journey: Journey) -> None:
    page = view.page
    downloads = page.get_by_role("region", name="Downloads")
    downloads.get_by_role("button", name=f"Chat with {SMALL}").click()
    expect(page.locator(".welcome")).to_contain_text(SMALL)
    journey.stop("chat")
    page.evaluate(RECORD_NOTES)
    send(view, "Who are you?")
    again = answers(view).get_by_role("button", name="Regenerate")
    expect(again).to_be_enabled(timeout=LOAD_MS)
    journey.stop("answered")
    expect(answers(view)).to_contain_text("a very small language model")
    steps: list[str] = page.evaluate("notes")  # how many depends on how fast the machine loads
    assert [note for note in steps if note.startswith("warming up")] == []
    worded: str = page.evaluate(IN_WORDS, "warming up")
    assert worded == "Loading the model: warming up…"


def remove(view: Visit, running: Node, journey: Journey) -> None:
    page = view.page
    go_to(page, "Models")
    unload(page, SMALL)
    page.get_by_role("button", name=f"Delete {SMALL}").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("from the disk and frees 33 MB")
    journey.stop("delete")
    dialog.get_by_role("button", name="Delete, free 33 MB").click()
    here = page.get_by_role("region", name="On disk", exact=True)
    expect(here).not_to_contain_text("storyteller")
    expect(page.get_by_role("status").filter(has_text="was deleted")).to_have_text(
        f"{SMALL} was deleted from the disk: 33 MB are free again."
    )
    journey.stop("deleted")
    assert not list((running.data_dir.parent / "hf" / "hub").glob("models--*"))
