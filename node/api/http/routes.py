"""Routes that carry their part of the OpenAPI document: body, query and media type."""

import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....placement.errors import InvalidRequest
from .bodies import EmptyBody, StrictBody, read_body
from .long_bodies import JSON_TYPE, json_response

Body = TypeVar("Body", bound=StrictBody)
Schema = Mapping[str, Any]
"""A JSON schema."""


class ApiRoute(Route):
    """A route for one method. `query` has the JSON schemas of query parameters by name."""

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        body: type[StrictBody] | None = None,
        query: Mapping[str, Schema] | None = None,
        media_type: str = JSON_TYPE,
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.body = body
        self.query = query or {}
        self.media_type = media_type


def get_json(path: str, read: Callable[[], Awaitable[Mapping[str, Any]]]) -> ApiRoute:
    """A GET route without parameters, over a function that returns JSON."""

    async def endpoint(_: Request) -> Response:
        return json_response(await read())

    return ApiRoute("GET", path, endpoint)


def post_json(
    path: str,
    handler: Callable[[Request, Body], Awaitable[Mapping[str, Any]]],
    body: type[Body] = EmptyBody,
    *,
    method: str = "POST",
    query: Mapping[str, Schema] | None = None,
) -> ApiRoute:
    """A route whose handler gets the validated body and returns JSON."""

    async def endpoint(request: Request) -> Response:
        return json_response(await handler(request, await read_body(request, body)))

    return ApiRoute(method, path, endpoint, body=body, query=query)


def profiles_of(request: Request) -> Mapping[str, Mapping[str, Any]]:
    """The entry node's profiles, for lists of models; see `ProfileFile.listed`."""
    return getattr(request.state, "profiles", {})


def query_values(
    request: Request, allowed: Mapping[str, Schema], ignored: Collection[str] = ()
) -> dict[str, str]:
    """The query's parameters. Raises InvalidRequest for one that is unknown, repeated or wrong."""
    values: dict[str, str] = {}
    for name, text in request.query_params.multi_items():
        if name in ignored:
            continue
        if name in values:
            raise InvalidRequest(f"'{name}' is given twice; give it once", param=name)
        if name not in allowed:
            raise InvalidRequest(
                f"this endpoint has no parameter '{name[:64]}'; it takes {', '.join(allowed)}",
                param=name[:64],
            )
        if expected := _unless_it_is(allowed[name], text):
            raise InvalidRequest(f"'{name}' should {expected}", param=name)
        values[name] = text
    return values


def _unless_it_is(schema: Schema, text: str) -> str:
    """The words for what a parameter should be, or "" if it is that."""
    if choices := schema.get("enum"):
        return "" if text in choices else f"be {' or '.join(choices)}"
    if schema.get("type") == "integer":
        low, high = schema.get("minimum", 0), schema.get("maximum", 10**15 - 1)
        is_number = len(text) < 16 and text.isascii() and text.isdecimal()
        is_number = is_number and low <= int(text) <= high
        return "" if is_number else f"be a number from {low} to {high}"
    if pattern := schema.get("pattern"):
        return "" if re.fullmatch(pattern, text) else f"be {schema['description']}"
    low, high = schema.get("minLength", 0), schema.get("maxLength", len(text))
    return "" if low <= len(text.strip()) <= high else f"have {low} to {high} characters"
