"""A headless browser of this machine, and pages that record their errors and requests."""

import os
import re
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # pyright: ignore[reportMissingTypeStubs]
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Locator,
    Page,
    Playwright,
    Request,
    expect,
    sync_playwright,
)

_NAMES = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser", "chrome")
_MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
DESK: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 360, "height": 740},
    "has_touch": True,
    "is_mobile": True,
}
DARK: dict[str, Any] = {**DESK, "color_scheme": "dark"}
PATIENCE_S = 60.0
SHOTS = os.environ.get("EXO_SCREENSHOTS", "")
"""A folder for screenshots of the tests; none are taken without it."""


NO_BROWSER = (
    "no Chromium or Chrome here: sudo apt install chromium, or brew install --cask google-chrome"
)


def installed_browser() -> str | None:
    """The path of this machine's Chromium or Chrome."""
    on_path = next(filter(None, map(shutil.which, _NAMES)), None)
    return on_path or (_MAC if Path(_MAC).exists() else None)


@contextmanager
def browsers() -> Generator[Browser]:
    """A browser for the tests; they are skipped where there is none."""
    path = installed_browser()
    if path is None:
        pytest.skip(NO_BROWSER)
    with sync_playwright() as playwright:
        browser = _launched(playwright, path)
        try:
            yield browser
        finally:
            browser.close()


def _launched(playwright: Playwright, path: str) -> Browser:
    # Root, as in a container, has no sandbox; the pages are our own.
    flags = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return playwright.chromium.launch(executable_path=path, args=flags)


@dataclass
class Visit:
    """One page, with its requests and the warnings and errors of its console."""

    page: Page
    base: str
    complaints: list[str] = field(default_factory=list[str])
    requests: list[Request] = field(default_factory=list[Request])

    def go(self, place: str = "") -> Page:
        self.page.goto(f"{self.base}/{place}")
        return self.page

    def count_requests(self, path: str) -> int:
        """How many requests for `path` the page has sent."""
        return sum(request.url.startswith(self.base + path) for request in self.requests)

    def until(self, holds: Callable[[], bool]) -> None:
        """Lets the page run until `holds`."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline
            self.page.wait_for_timeout(20)

    def shot(self, name: str) -> None:
        if SHOTS:
            self.page.screenshot(path=Path(SHOTS) / f"{name}.png")

    def violations(self) -> list[str]:
        """The violations that axe reports, each with its rule and elements."""
        axe: Any = Axe()
        violations: list[dict[str, Any]] = axe.run(self.page).response["violations"]
        return [f"{rule['id']}: {rule['nodes']}" for rule in violations]


@contextmanager
def visit(browser: Browser, base: str, **look: Any) -> Generator[Visit]:
    """A page with a profile of its own; at its end the console must be free of complaints."""
    options: dict[str, Any] = {**DESK, "reduced_motion": "reduce", **look}
    context = browser.new_context(**options)
    context.set_default_timeout(20_000)
    view = Visit(context.new_page(), base)

    def record(message: ConsoleMessage) -> None:
        # Chromium logs each refused request; tests assert how the page shows it.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            view.complaints.append(message.text)

    view.page.on("console", record)
    view.page.on("pageerror", lambda error: view.complaints.append(str(error)))
    view.page.on("request", lambda request: view.requests.append(request))
    try:
        yield view
        assert view.complaints == [], view.complaints
    finally:
        context.close()


def model_button(page: Page) -> Locator:
    """The button over a chat that names its model and opens the list of all."""
    return page.get_by_role("button", name=re.compile(r"^Model "))


def send(view: Visit, text: str) -> None:
    view.page.get_by_label("Message").fill(text)
    view.page.keyboard.press("Enter")


def answers(view: Visit) -> Locator:
    return view.page.locator("article.said")


def wait_for_answer(view: Visit) -> None:
    """Waits until the last answer has ended."""
    again = answers(view).last.get_by_role("button", name="Regenerate")
    expect(again).to_be_enabled(timeout=1000 * PATIENCE_S)


def found(page: Page) -> Locator:
    """The hits of a search of the hub."""
    return page.get_by_role("region", name="Find a model").get_by_role("listitem")


def search(page: Page, text: str) -> None:
    page.get_by_label("Name of a model on Hugging Face").fill(text)
    page.get_by_role("button", name="Search", exact=True).click()


def unload(page: Page, model: str, within_ms: float | None = None) -> None:
    """Unloads a model on the page of models. It asks once more where an answer still counts."""
    page.get_by_role("button", name=f"Unload {model}").click()
    anyway = page.get_by_role("button", name="Unload anyway")
    load = page.get_by_role("button", name=f"Load {model}", exact=True)
    expect(anyway.or_(load)).to_be_visible(timeout=within_ms)
    if anyway.is_visible():
        anyway.click()
    expect(load).to_be_visible(timeout=within_ms)
