"""Measures the page in a browser: time until a message can be typed, first load, memory.

python bench/page.py http://127.0.0.1:52415 [--repeats 9] [--tokens 2000]

Needs a running node with a model on its disk, and Chromium or Chrome; headless, each repeat with
a profile of its own, so that nothing is cached. Memory is the JavaScript heap after a garbage
collection while an answer of TOKENS tokens streams: a regular expression keeps the model from
ending it before.
"""

import argparse
import json
import shutil
import statistics
import time

from playwright.sync_api import Browser, Page, Request, Route, sync_playwright

BROWSERS = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser", "chrome")
WITHIN_MS = 600_000
LINE = "[a-z]{1,9}( [a-z]{1,9}){11}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What the page costs in a browser")
    _ = parser.add_argument("node", metavar="URL", help="of a running node")
    _ = parser.add_argument("--repeats", type=int, default=9)
    _ = parser.add_argument("--tokens", type=int, default=2000)
    options = parser.parse_args()
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        parser.error(f"none of {', '.join(BROWSERS)} is on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        loads = [first_load(browser, options.node) for _ in range(options.repeats)]
        seconds = [load[0] for load in loads]
        print(
            f"a message can be typed after {statistics.median(seconds):.2f} s in the median of "
            f"{len(seconds)}, {min(seconds):.2f} to {max(seconds):.2f}; "
            f"{loads[-1][1]} requests, {loads[-1][2] / 1e3:.0f} kB"
        )
        for characters, heap_bytes in memory(browser, options.node, options.tokens):
            print(f"behind {characters} characters the heap holds {heap_bytes / 1e6:.1f} MB")
        browser.close()


def first_load(browser: Browser, node: str) -> tuple[float, int, int]:
    """Seconds until the field takes a message, requests, and their bytes on the wire."""
    page = browser.new_page()
    requests: list[Request] = []
    page.on("request", lambda request: requests.append(request))
    start = time.perf_counter()
    _ = page.goto(node)
    _ = page.wait_for_selector("textarea:not([disabled])", timeout=WITHIN_MS)
    took = time.perf_counter() - start
    page.wait_for_timeout(500)
    ended = [request for request in requests if "/v1/events" not in request.url]
    size = sum(request.sizes()["responseBodySize"] for request in ended)
    page.context.close()
    return took, len(requests), size


def memory(browser: Browser, node: str, tokens: int) -> list[tuple[int, float]]:
    """Characters on the page and bytes of the heap, every three seconds and at the end."""
    page = browser.new_page()
    page.set_default_timeout(WITHIN_MS)

    def longer(route: Route) -> None:
        body = json.loads(route.request.post_data or "{}")
        body |= {"max_tokens": tokens, "regex": f"({LINE})+", "temperature": 1, "seed": 1}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", longer)
    _ = page.goto(node)
    _ = page.wait_for_selector("textarea:not([disabled])")
    page.get_by_label("Message").fill("Write.")
    page.keyboard.press("Enter")
    samples: list[tuple[int, float]] = []
    while page.locator("article.said[aria-busy=true]").count() or not samples:
        _ = page.wait_for_selector("article.said .prose")
        samples.append((character_count(page), heap(page)))
        page.wait_for_timeout(3000)
    samples.append((character_count(page), heap(page)))
    page.locator("article.said .brief").click()
    print(" ".join(page.locator(".stats").inner_text().split()))
    page.context.close()
    return samples


def character_count(page: Page) -> int:
    return len(page.locator("article.said .prose").inner_text())


def heap(page: Page) -> float:
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    return float(session.send("Runtime.getHeapUsage")["usedSize"])


if __name__ == "__main__":
    main()
