"""The dashboard's files over HTTP: compressed once, and sent again only after a change."""

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

StaticFiles = Callable[[str], tuple[bytes, str] | None]
"""Content and content type of a path below the dashboard's folder; None without such a file."""

_LEAST_BYTES: Final = 512
"""A smaller file fits into one packet either way."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """A file; `compressed` is None if compression saves nothing."""

    plain: bytes
    compressed: bytes | None
    content_type: str
    tag: str


def static_routes(static: StaticFiles) -> list[Route]:
    @lru_cache(maxsize=256)
    def packed(path: str) -> _Packed:
        content = static(path)
        if content is None:  # an error is not cached: there are endless paths without a file
            raise HTTPException(404)
        return _packed(*content)

    async def index(request: Request) -> Response:
        return _response(packed("index.html"), request)

    async def file(request: Request) -> Response:
        return _response(packed(request.path_params["path"]), request)

    return [Route("/", index, methods=["GET"]), Route("/static/{path:path}", file, methods=["GET"])]


def _packed(content: bytes, content_type: str) -> _Packed:
    compressed = gzip.compress(content, mtime=0) if len(content) >= _LEAST_BYTES else content
    smaller = compressed if len(compressed) < len(content) else None
    return _Packed(content, smaller, content_type, hashlib.sha256(content).hexdigest()[:32])


def _response(file: _Packed, request: Request) -> Response:
    compressed = file.compressed if _takes_gzip(request) else None
    tag = f'"{file.tag}{"-gzip" if compressed else ""}"'
    headers = {
        "Content-Type": file.content_type,
        # The files of a newer version have the same names: a browser asks whether its own are old.
        "Cache-Control": "no-cache",
        "ETag": tag,
        "Vary": "Accept-Encoding",
    }
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if compressed is None:
        return Response(file.plain, headers=headers)
    return Response(compressed, headers={**headers, "Content-Encoding": "gzip"})


def _takes_gzip(request: Request) -> bool:
    """Whether the client names gzip and does not refuse it (`gzip;q=0`)."""
    for offer in request.headers.get("accept-encoding", "").lower().split(","):
        name, _, weight = offer.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "").rstrip("0.") != "q="
    return False
