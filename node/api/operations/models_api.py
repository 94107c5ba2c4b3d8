"""Models found on the hub, downloaded to a node's disk, and deleted there."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ....placement.errors import ExoNodeError, InvalidRequest
from ..http.bodies import StrictBody, read_body
from ..http.dialects import EVENT_STREAM, OPENAI, SEARCH_PATH
from ..http.errors import fault_of
from ..http.long_bodies import json_response
from ..http.routes import ApiRoute, post_json, query_values
from ..http.sse import DONE, EventStream, Silence, attended, comment, data, while_attended
from .plan_request import Name

Json = Mapping[str, Any]
Source = Literal["hub", "cards"]
"""The places of a search: models with a card are found at once, and offline."""

MODELS_PREFIX: Final = "/v1/models/"
_PULL: Final = "/v1/models/pull"
PULL_PATHS: Final = (_PULL, f"{_PULL}/pause", f"{_PULL}/cancel")
"""Paths about one node's downloads; `node` in the query names another one."""
MOST_HITS: Final = 20
_HITS: Final = 10

_NODE_QUERY: Final[Mapping[str, Json]] = {
    "node": {"type": "string", "minLength": 1, "maxLength": 256}
}
_SEARCH_QUERY: Final[Mapping[str, Json]] = {
    "q": {"type": "string", "minLength": 1, "maxLength": 200},
    "limit": {"type": "integer", "minimum": 1, "maximum": MOST_HITS},
    "source": {"enum": ["hub", "cards"]},
}
_DELETE_QUERY: Final[Mapping[str, Json]] = {**_NODE_QUERY, "dry_run": {"enum": ["0", "1"]}}


class PullBody(StrictBody):
    """A download. `quant`: bits of the published quantisation to take instead."""

    model: Name
    revision: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    quant: Annotated[int | None, Field(ge=2, le=8)] = None
    stream: bool = True
    """False: answers with the state at once. The download continues either way."""


class PulledModel(StrictBody):
    """The download of a model, as the list of downloads names it."""

    model: Name


class ModelFiles(Protocol):
    """The models' files on this node's disk, and those on the hub. Methods raise ExoNodeError."""

    async def search(self, query: str, limit: int, source: Source) -> Json: ...

    async def pull(self, body: PullBody) -> AsyncGenerator[Json]:
        """Begins or joins a download. Its states, each once, to its end; raises its error."""
        ...

    async def pulls(self, *, own: bool) -> Json:
        """The unfinished downloads of this node; without `own`, of every live node."""
        ...

    async def pause(self, model: str) -> Json: ...

    async def cancel(self, model: str) -> Json:
        """Deletes what arrived; the state has `freed_bytes`."""
        ...

    async def remove(self, model: str, *, dry_run: bool) -> Json:
        """Deletes a model's files; `dry_run`: only counts their bytes. Raises RemovalRefused."""
        ...


class ModelsApi:
    """The endpoints over a `ModelFiles`. `keep_alive_s`: the longest silence on a stream."""

    def __init__(self, files: ModelFiles, keep_alive_s: float) -> None:
        self._files = files
        self._keep_alive_s = keep_alive_s

    def routes(self) -> list[ApiRoute]:
        start, pause, cancel = PULL_PATHS
        return [
            ApiRoute("GET", SEARCH_PATH, self.search, query=_SEARCH_QUERY),
            ApiRoute("GET", start, self.pulls, query=_NODE_QUERY),
            ApiRoute("POST", start, self.pull, body=PullBody, query=_NODE_QUERY),
            post_json(pause, self.pause, PulledModel, query=_NODE_QUERY),
            post_json(cancel, self.cancel, PulledModel, query=_NODE_QUERY),
            ApiRoute("DELETE", "/v1/models/{id:path}", self.remove, query=_DELETE_QUERY),
        ]

    async def search(self, request: Request) -> Response:
        query = query_values(request, _SEARCH_QUERY)
        if "q" not in query:
            raise InvalidRequest("'q' is required", param="q")
        source: Source = "cards" if query.get("source") == "cards" else "hub"
        limit = int(query.get("limit", _HITS))
        search = self._files.search(query["q"].strip(), limit, source)
        return json_response(await while_attended(search, request.receive))

    async def pulls(self, request: Request) -> Response:
        own = "node" in query_values(request, _NODE_QUERY)
        return json_response(await self._files.pulls(own=own))

    async def pull(self, request: Request) -> Response:
        _ = query_values(request, _NODE_QUERY)
        body = await read_body(request, PullBody)
        states = await self._files.pull(body)
        if not body.stream:
            async with aclosing(states):
                return json_response(await anext(states))
        return EventStream(self._frames(states, request), EVENT_STREAM)

    async def _frames(
        self, states: AsyncGenerator[Json], request: Request
    ) -> AsyncGenerator[bytes]:
        silence = Silence(self._keep_alive_s)
        last = DONE
        async with aclosing(attended(states, request.receive, silence)) as news:
            try:
                async for state in news:
                    silence.end()
                    yield comment("no news") if state is None else data(state)
            except ExoNodeError as fault:
                last = OPENAI.frame(fault_of(fault))
        yield last

    async def pause(self, request: Request, body: PulledModel) -> Json:
        _ = query_values(request, _NODE_QUERY)
        return await self._files.pause(body.model)

    async def cancel(self, request: Request, body: PulledModel) -> Json:
        _ = query_values(request, _NODE_QUERY)
        return await self._files.cancel(body.model)

    async def remove(self, request: Request) -> Response:
        dry_run = query_values(request, _DELETE_QUERY).get("dry_run") == "1"
        model: str = request.path_params["id"]
        return json_response(await self._files.remove(model, dry_run=dry_run))
