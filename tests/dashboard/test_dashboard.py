"""The dashboard's files: served paths, imports, and the rules of the strict CSP."""

import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import PurePosixPath

import pytest

from exo_node.dashboard import asset

STATIC = files("exo_node.dashboard") / "static"
OWN = sorted(entry.name for entry in STATIC.iterdir() if entry.is_file())
MODULES = [name for name in OWN if name.endswith(".js")]
VENDORED = sorted(
    entry.name
    for entry in (STATIC / "vendor").iterdir()
    if PurePosixPath(entry.name).suffix in {".js", ".mjs"}
)
LOAD = re.compile(r"""\b(?:from|import|importScripts|new URL)\s*\(?\s*["']([^"']+)["']""")


def text(path: str) -> str:
    file = asset(path)
    assert file is not None, f"{path} is not served"
    return file[0].decode()


def imports(path: str) -> list[str]:
    return LOAD.findall(text(path))


class Page(HTMLParser):
    """Collects the tags and script text that a content security policy restricts."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.script_text = ""
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.script_text += data.strip()


@pytest.fixture
def page() -> Page:
    return Page(text("index.html"))


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("index.html", "text/html; charset=utf-8"),
        ("app.js", "text/javascript; charset=utf-8"),
        ("style.css", "text/css; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
        ("vendor/markdown-it.min.mjs", "text/javascript; charset=utf-8"),
        ("vendor/LICENSE-htm.txt", "text/plain; charset=utf-8"),
        ("vendor/THIRD-PARTY.md", "text/plain; charset=utf-8"),
    ],
)
def test_a_shipped_file_comes_with_its_bytes_and_type(path: str, content_type: str) -> None:
    on_disk = STATIC.joinpath(*path.split("/")).read_bytes()
    assert asset(path) == (on_disk, content_type)


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "vendor",
        "vendor/",
        "missing.js",
        "/index.html",
        "./index.html",
        "../__init__.py",
        "../static/index.html",
        "vendor/../index.html",
        "vendor//purify.es.mjs",
        "vendor\\purify.es.mjs",
        "..\\__init__.py",
        "%2e%2e/__init__.py",
        "vendor/../../__init__.py",
        "/etc/passwd",
        "index.html\0.js",
        "INDEX.HTML",
    ],
)
def test_any_other_path_is_not_served(path: str) -> None:
    assert asset(path) is None


def test_the_page_refers_only_to_files_that_are_served(page: Page) -> None:
    links = [attrs.get("src") or attrs.get("href") for _, attrs in page.tags]
    paths = [link for link in links if link]
    assert {"/static/app.js", "/static/style.css"} <= set(paths)
    for path in paths:
        assert path.startswith("/static/"), path
        assert asset(path.removeprefix("/static/")) is not None, path


def test_the_page_has_no_inline_script_or_style(page: Page) -> None:
    assert page.script_text == ""
    for tag, attrs in page.tags:
        assert tag != "style"
        assert tag != "script" or attrs.get("src")
        assert not [name for name in attrs if name == "style" or name.startswith("on")], (
            tag,
            attrs,
        )


@pytest.mark.parametrize("module", MODULES)
def test_every_import_of_a_module_is_served(module: str) -> None:
    for target in imports(module):
        assert target.startswith("./"), f"{module} imports {target!r}: not a relative path"
        assert asset(target.removeprefix("./")) is not None, f"{module} imports {target}"


def test_every_module_is_reached_from_the_page() -> None:
    reached = {"app.js"}
    queue = ["app.js"]
    while queue:
        modules = {target.removeprefix("./") for target in imports(queue.pop())} - reached
        reached |= modules
        queue += [path for path in modules if "/" not in path]
    assert reached == {*MODULES, *(f"vendor/{name}" for name in VENDORED)}


@pytest.mark.parametrize("name", VENDORED)
def test_a_vendored_module_stands_alone(name: str) -> None:
    source = text(f"vendor/{name}")
    assert re.findall(r"""^\s*import\b[^;]*["'][^"']+["']""", source, re.MULTILINE) == []
    assert "eval(" not in source
    assert "new Function(" not in source


@pytest.mark.parametrize("name", [*OWN, *(f"vendor/{name}" for name in VENDORED)])
def test_nothing_is_loaded_from_another_host(name: str) -> None:
    loads = r"""(?:\bfrom\s*|\bimport\s*\(?\s*|\burl\(\s*|\b(?:src|href)=)["']?(?:https?:)?//"""
    assert re.findall(loads, text(name)) == []


def test_the_styles_fetch_nothing_and_every_module_is_short() -> None:
    assert "@import" not in text("style.css")
    assert "url(" not in text("style.css")
    assert {name for name in MODULES if text(name).count("\n") > 250} == set()


@pytest.mark.parametrize("module", MODULES)
def test_an_inline_tag_at_the_end_of_a_line_has_its_space(module: str) -> None:
    """htm drops the end of a line beside a tag: a space there is written ${" "}."""
    inline = "(?:code|strong|em|a)"
    before = rf"[\w,.:;]\n\s*<{inline}\b"
    behind = rf"</{inline}>\n\s*[\w(]"
    assert re.findall(f"{before}|{behind}", text(module)) == []


@pytest.mark.parametrize("name", VENDORED)
def test_a_vendored_file_is_the_published_one_and_has_its_licence(name: str) -> None:
    rows = [row for row in text("vendor/THIRD-PARTY.md").splitlines() if f"| `{name}` |" in row]
    assert len(rows) == 1, f"vendor/THIRD-PARTY.md needs one row for {name}"
    content = text(f"vendor/{name}").encode()
    assert f"`{hashlib.sha256(content).hexdigest()}`" in rows[0]
    licences = re.findall(r"\]\((LICENSE-[^)]+)\)", rows[0])
    assert licences
    for licence in licences:
        assert re.search(r"copyright|licen[cs]e", text(f"vendor/{licence}"), re.IGNORECASE), licence
