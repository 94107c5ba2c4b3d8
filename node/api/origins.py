"""Pages of other origins that may use the node: which ones, and what their browsers are told."""

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
        """A browser names the page's origin in each request that the page makes to elsewhere."""
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
        """The answer to a browser that asks whether a page may ask; None where it is no such.

        It has neither key nor token, and tells nothing but that the origin is allowed.
        """
        wanted = headers.get("access-control-request-method")
        if scope["method"] != "OPTIONS" or wanted is None or self._of(headers) is None:
            return None
        response = Response(status_code=204)
        response.headers["Access-Control-Allow-Methods"] = _METHODS
        names = headers.get("access-control-request-headers", "content-type")
        response.headers["Access-Control-Allow-Headers"] = names[:1024]
        response.headers["Access-Control-Max-Age"] = _PREFLIGHT_S
        return response

    def mark(self, asked: Headers, answer: MutableHeaders) -> None:
        """Lets an allowed page read the answer."""
        if (origin := self._of(asked)) is not None:
            answer["Access-Control-Allow-Origin"] = origin
            answer["Access-Control-Expose-Headers"] = _EXPOSED
            answer["Cross-Origin-Resource-Policy"] = "cross-origin"
            answer.add_vary_header("Origin")

    def _of(self, headers: Headers) -> str | None:
        named = headers.getlist("origin")
        return named[0] if len(named) == 1 and named[0].lower() in self.allowed else None


def _from_elsewhere(method: str, headers: Headers) -> bool:
    """Whether the browser says that another site's page asks, as images and no-cors GETs do.

    A link that a person follows to this node is none of that.
    """
    sites = headers.getlist("sec-fetch-site")
    followed = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
    link = method == "GET" and followed == ("navigate", "document")
    return not link and not all(site in ("same-origin", "none") for site in sites)
