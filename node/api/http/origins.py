"""Pages of other origins that may use the node, and the CORS headers for their browsers."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Scope

from .errors import HttpFault

_METHODS: Final = "GET, POST, PATCH, DELETE"
_EXPOSED: Final = "x-request-id, x-should-retry, retry-after, x-exo-node-ignored"
_PREFLIGHT_S: Final = "600"


@dataclass(frozen=True, slots=True)
class Origins:
    """The origins of EXO_ALLOWED_ORIGINS, beside the one that the request itself is made to."""

    allowed: Collection[str] = ()

    def refusal(self, scope: Scope, headers: Headers) -> HttpFault | None:
        """The error for a page of another origin, which browsers name in cross-origin requests."""
        own = f"{scope['scheme']}://{headers.get('host', '')}".lower()
        named = [origin.lower() for origin in headers.getlist("origin")]
        if named and all(origin in self.allowed for origin in named):
            return None
        if all(origin == own for origin in named) and not _from_elsewhere(scope["method"], headers):
            return None
        message = (
            "pages of other origins may not use this node; name the page's origin in "
            "EXO_ALLOWED_ORIGINS, or call the node from a program"
        )
        return HttpFault(403, "origin_not_allowed", message, "Origin")

    def preflight(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer to a browser's preflight request; None for other requests.

        Preflights have neither key nor token; the answer reveals only that the origin is allowed.
        """
        method = headers.get("access-control-request-method")
        if scope["method"] != "OPTIONS" or method is None or self._allowed_origin(headers) is None:
            return None
        response = Response(status_code=204)
        response.headers["Access-Control-Allow-Methods"] = _METHODS
        names = headers.get("access-control-request-headers", "content-type")
        response.headers["Access-Control-Allow-Headers"] = names[:1024]
        response.headers["Access-Control-Max-Age"] = _PREFLIGHT_S
        return response

    def mark(self, request: Headers, answer: MutableHeaders) -> None:
        """Adds the headers that let an allowed page read the answer."""
        if (origin := self._allowed_origin(request)) is not None:
            answer["Access-Control-Allow-Origin"] = origin
            answer["Access-Control-Expose-Headers"] = _EXPOSED
            answer["Cross-Origin-Resource-Policy"] = "cross-origin"
            answer.add_vary_header("Origin")

    def _allowed_origin(self, headers: Headers) -> str | None:
        named = headers.getlist("origin")
        return named[0] if len(named) == 1 and named[0].lower() in self.allowed else None


def _from_elsewhere(method: str, headers: Headers) -> bool:
    """Whether another site's page sent it, such as an image or a no-cors GET.

    A link that a person follows to this node does not count.
    """
    sites = headers.getlist("sec-fetch-site")
    followed = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
    link = method == "GET" and followed == ("navigate", "document")
    return not link and not all(site in ("same-origin", "none") for site in sites)
