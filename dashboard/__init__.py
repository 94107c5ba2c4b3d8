"""The page that a node serves: static files that travel inside the package."""

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import Final

_CONTENT_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@cache
def _table() -> dict[str, Traversable]:
    """Every servable file by its path under `static/`; the folders are flat."""
    static = files(__name__) / "static"
    folders = (("", static), ("vendor/", static / "vendor"))
    return {
        prefix + entry.name: entry
        for prefix, folder in folders
        for entry in folder.iterdir()
        if entry.is_file() and PurePosixPath(entry.name).suffix in _CONTENT_TYPES
    }


def asset(path: str) -> tuple[bytes, str] | None:
    """Content and content type of `path` under `static/`, such as `vendor/purify.es.mjs`.

    The path is only ever a key of a table of shipped files, so it cannot leave the folder.
    None where there is no such file.
    """
    entry = _table().get(path)
    if entry is None:
        return None
    return entry.read_bytes(), _CONTENT_TYPES[PurePosixPath(path).suffix]
