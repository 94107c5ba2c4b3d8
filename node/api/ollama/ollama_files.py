"""Ollama's `/api/pull`, `/api/delete` and `/api/copy`, over the same downloads and deletions."""

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....placement.errors import DownloadFailed, ExoNodeError
from ..http.bodies import NoEffect, TolerantBody, ignored_header, read_body, unknown_fields
from ..http.dialects import NDJSON, OLLAMA, OLLAMA_FILES
from ..http.errors import fault_of
from ..http.long_bodies import json_response
from ..http.routes import ApiRoute
from ..http.sse import EventStream, Silence, attended
from ..http.strict_json import encode
from ..operations.models_api import Json, ModelFiles, PullBody
from .ollama_schema import NamingBody, OllamaName, without_hub


class OllamaPullBody(NamingBody):
    """`model` is `owner/name` on the Hugging Face hub, as `hf.co/owner/name` too."""

    stream: bool | None = None
    insecure: NoEffect[bool] = None


class OllamaCopyBody(TolerantBody):
    source: OllamaName
    destination: OllamaName


class OllamaFiles:
    """The endpoints. A download is paused when its last client has left, as in Ollama."""

    def __init__(self, files: ModelFiles, keep_alive_s: float) -> None:
        self._files = files
        self._keep_alive_s = keep_alive_s

    def routes(self) -> list[ApiRoute]:
        pull, delete, copy = OLLAMA_FILES
        return [
            ApiRoute("POST", pull, self.pull, body=OllamaPullBody),
            ApiRoute("DELETE", delete, self.delete, body=NamingBody),
            ApiRoute("POST", copy, self.copy, body=OllamaCopyBody),
        ]

    async def pull(self, request: Request) -> Response:
        body = await read_body(request, OllamaPullBody)
        model = body.named_model
        states = await self._files.pull(PullBody(model=model), stays=False)
        lines = self._lines(states, request)
        if body.stream is not False:
            return EventStream(_with_fault(lines), NDJSON)
        async with aclosing(lines):
            async for _ in lines:
                pass
        return json_response({"status": "success"}, headers=_ignored(body, request))

    async def delete(self, request: Request) -> Response:
        body = await read_body(request, NamingBody)
        model = body.named_model
        if not await self._files.remove_name(model):
            _ = await self._files.remove(model, dry_run=False)
        return Response(headers=_ignored(body, request))

    async def copy(self, request: Request) -> Response:
        body = await read_body(request, OllamaCopyBody)
        await self._files.add_name(without_hub(body.source), body.destination)
        return Response(headers=_ignored(body, request))

    async def _lines(self, states: AsyncGenerator[Json], request: Request) -> AsyncGenerator[bytes]:
        silence = Silence(self._keep_alive_s)
        last = line = encode({"status": "pulling manifest"})
        yield line + b"\n"
        status = ""
        async with aclosing(attended(states, request.receive, silence)) as news:
            async for state in news:
                line = last if state is None else encode(_line(state))
                if state is not None:
                    status = str(state["status"])
                if state is None or line != last:
                    silence.end()
                    last = line
                    yield line + b"\n"
        if status != "done":
            raise DownloadFailed(
                f"the download was {status} by somebody else; pull again to resume it",
                param="model",
            )
        yield encode({"status": "success"}) + b"\n"


async def _with_fault(lines: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The lines of a stream, which an error ends as a line of its own."""
    async with aclosing(lines):
        try:
            async for line in lines:
                yield line
        except ExoNodeError as fault:
            yield OLLAMA.frame(fault_of(fault))


def _line(state: Json) -> dict[str, Any]:
    """A line of progress; its digest names the model, since clients draw one bar for each."""
    model, total = str(state["model"]), state["total_bytes"]
    if total is None:
        return {"status": "pulling manifest"}
    digest = f"sha256:{hashlib.sha256(model.encode()).hexdigest()}"
    progress = {"digest": digest, "total": total, "completed": state["done_bytes"]}
    return {"status": f"pulling {model}", **progress}


def _ignored(body: TolerantBody, request: Request) -> dict[str, str]:
    return ignored_header(unknown_fields(body), request.url.path)
