"""Stored responses by id: read, followed, listed, cancelled, deleted."""

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from starlette.requests import Request
from starlette.responses import Response

from ....placement.errors import InvalidRequest, ResponseNotFound
from ...responses.store import StoredResponse
from ...responses.tables import Json
from ..http.dialects import RESPONSES_PATH
from ..http.long_bodies import JSON_TYPE, json_response, off_the_loop
from ..http.routes import ApiRoute, Schema, query_values
from ..http.sse import EventStream
from ..shared.answering import Answering
from .response_renderer import last_event
from .response_run import FrameLog, ResponseRun
from .response_runs import NO_RUNS, ResponseRuns, owner_of, read_run

_RETRIEVE_QUERY: Final[Mapping[str, Schema]] = {
    "stream": {"enum": ["true", "false", "True", "False"]},
    "starting_after": {"type": "integer", "minimum": 0},
}
_MAX_LIMIT: Final = 100
_DEFAULT_LIMIT: Final = 20
_PAGE_QUERY: Final[Mapping[str, Schema]] = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": _MAX_LIMIT},
    "order": {"enum": ["asc", "desc"]},
}
Order = Literal["asc", "desc"]
_WITHOUT_EFFECT: Final = ("include", "include[]", "include_obfuscation")
"""Parameters that clients may send, of what no answer has."""


@dataclass(frozen=True, slots=True)
class Page:
    """The part of a list that a request asks for. `after`: the id of the item before it."""

    after: str | None
    limit: int
    order: Order

    @classmethod
    def of_query(cls, values: Mapping[str, str]) -> "Page":
        order: Order = "asc" if values.get("order") == "asc" else "desc"
        return cls(values.get("after"), int(values.get("limit", _DEFAULT_LIMIT)), order)

    def of(self, items: list[Json]) -> Json:
        """The list object of the items, which are in the order of the conversation."""
        ordered = items if self.order == "asc" else items[::-1]
        begin = 0
        if self.after is not None:
            # Clients may send an id twice: the last of them, or a client would never get past it.
            places = [n for n, item in enumerate(ordered) if item["id"] == self.after]
            if not places:
                raise InvalidRequest(
                    "'after' should be the id of an input item of this response", param="after"
                )
            begin = places[-1] + 1
        data = [_public_item(item) for item in ordered[begin : begin + self.limit]]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": begin + self.limit < len(ordered),
        }


class StoredResponsesApi:
    """The endpoints. `runs` is None if this node stores no responses."""

    def __init__(self, answering: Answering, runs: ResponseRuns | None) -> None:
        self._answering = answering
        self._runs = runs

    def routes(self) -> list[ApiRoute]:
        one = f"{RESPONSES_PATH}/{{id}}"
        return [
            ApiRoute("GET", one, self.retrieve, query=_RETRIEVE_QUERY),
            ApiRoute("DELETE", one, self.delete),
            ApiRoute("GET", f"{one}/input_items", self.input_items, query=_PAGE_QUERY),
            ApiRoute("POST", f"{one}/cancel", self.cancel),
        ]

    async def retrieve(self, request: Request) -> Response:
        id, owner, runs = self._target(request)
        after = _starting_after(query_values(request, _RETRIEVE_QUERY, _WITHOUT_EFFECT))
        run = runs.get(id, owner)
        if run is not None:
            if after is None:
                return json_response(run.response)
            return self._followed(request, run, after)
        stored = await runs.store.get(id, owner)
        if after is None:
            return Response(stored.body, media_type=JSON_TYPE)
        return EventStream(await off_the_loop(lambda: _past_events(stored, after)))

    async def input_items(self, request: Request) -> Response:
        id, owner, runs = self._target(request)
        page = Page.of_query(query_values(request, _PAGE_QUERY, _WITHOUT_EFFECT))
        items = await runs.store.input_items(id, owner)
        return json_response(page.of(items))

    async def delete(self, request: Request) -> Response:
        id, owner, runs = self._target(request)
        await runs.delete(id, owner)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Cancels an answer in the background; one that has ended stays as it is."""
        id, owner, runs = self._target(request)
        run = runs.get(id, owner)
        if run is not None:
            _check_background(is_background=run.request.is_background, action="cancelled")
            run.cancel()
            await run.ended()
            return json_response(run.response)
        stored = await runs.store.get(id, owner)
        _check_background(is_background=stored.background, action="cancelled")
        return Response(stored.body, media_type=JSON_TYPE)

    def _followed(self, request: Request, run: ResponseRun, after: int) -> Response:
        _check_background(is_background=run.request.is_background, action="followed")
        _check_number(after, run.log.last)
        return EventStream(read_run(run, request.receive, self._answering.silence(), after))

    def _target(self, request: Request) -> tuple[str, str, ResponseRuns]:
        """The id, the client that may have it, and the responses of this node."""
        id: str = request.path_params["id"]
        if self._runs is None:
            raise ResponseNotFound(f"there is no response '{id[:64]}': {NO_RUNS}")
        return id, owner_of(request), self._runs


def _starting_after(values: Mapping[str, str]) -> int | None:
    """The number of the event to continue after, -1 for all, or None without a stream."""
    is_stream = values.get("stream", "").lower() == "true"
    text = values.get("starting_after")
    if text is None:
        return -1 if is_stream else None
    if not is_stream:
        message = "'starting_after' continues a stream; add stream=true"
        raise InvalidRequest(message, param="starting_after")
    return int(text)


def _past_events(stored: StoredResponse, after: int) -> AsyncGenerator[bytes]:
    """The events of an answer that has ended. One that was interrupted has only its end."""
    _check_background(is_background=stored.background, action="followed")
    if not stored.events:
        last = FrameLog(last_event(json.loads(stored.body), after + 1))
        last.complete()
        return last.follow(-1)
    log = FrameLog(stored.events)
    log.complete()
    _check_number(after, log.last)
    return log.follow(after)


def _check_number(after: int, last: int) -> None:
    if after > last:
        raise InvalidRequest(
            f"'starting_after' is {after}, and the last event so far has the number {last}",
            param="starting_after",
        )


def _check_background(*, is_background: bool, action: str) -> None:
    if not is_background:
        raise InvalidRequest(
            f'this response was not made with "background": true, so it cannot be {action}; it '
            "ends when its client closes the connection",
            param="id",
        )


def _public_item(item: Json) -> Json:
    """An item with the fields that clients expect, which a request may leave out."""
    item = {"type": "message", **item}
    if item["type"] != "message" or not isinstance(item.get("content"), str):
        return item
    text: Json = {"type": "input_text", "text": item["content"]}
    if item.get("role") == "assistant":
        text = {"type": "output_text", "text": item["content"], "annotations": []}
    return {"status": "completed", **item, "content": [text]}
