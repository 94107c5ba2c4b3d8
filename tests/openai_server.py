"""A server with OpenAI's chat API that streams with fixed gaps and can be spoiled."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TOKENS: Final = 5
"""Of each answer."""
ENDLESS: Final = 2000
"""Events of an answer that does not heed max_tokens."""


@dataclass
class OpenAiServer:
    """Streams `TOKENS` words, `gap_s` before each; every nth request is spoiled by `fault`."""

    gap_s: float = 0.01
    usage: bool = True
    fault: str = ""
    every: int = 3
    models: Any = field(default_factory=lambda: {"data": [{"id": "m"}]})
    replies: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further paths with their JSON, such as those of exo-node."""
    stats: Mapping[str, Any] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    keys: list[str | None] = field(default_factory=list[str | None])
    active: int = 0
    most: int = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/{path:path}", self._other),
            ]
        )

    async def _models(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        return JSONResponse(self.models)

    async def _other(self, request: Request) -> Response:
        path = request.url.path
        known = path in self.replies
        return JSONResponse(self.replies.get(path, {"error": "no"}), 200 if known else 404)

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        words = sum(len(message["content"].split()) for message in body["messages"])
        usage = {"prompt_tokens": 10 + 2 * words, "completion_tokens": TOKENS}
        if not body.get("stream"):
            return JSONResponse({"usage": usage if self.usage else None})
        self.bodies.append(body)
        spoiled = bool(self.fault) and len(self.bodies) % self.every == 0
        if spoiled and self.fault.isdecimal():
            return JSONResponse({"error": "in /srv/somebody: 10.1.2.3"}, int(self.fault))
        events = self._events(usage, self.fault if spoiled else "")
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(self, usage: dict[str, int], fault: str) -> AsyncIterator[str]:
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            yield 'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
            for number in range(TOKENS):
                await asyncio.sleep(self.gap_s)
                yield f'data: {{"choices": [{{"delta": {{"content": "w{number} "}}}}]}}\n\n'
                if fault == "cut":
                    return
                if fault == "hang":
                    await asyncio.Event().wait()
                if fault == "garbage":
                    yield "data: {'no': json}\n\n"
                for _ in range(ENDLESS if fault == "endless" else 0):
                    await asyncio.sleep(0)
                    yield 'data: {"choices": [{"delta": {"content": "and "}}]}\n\n'
            yield 'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n'
            if self.usage:
                last: dict[str, Any] = {
                    "choices": [],
                    "usage": usage,
                    "generation_stats": self.stats,
                }
                yield f"data: {json.dumps(last)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.active -= 1
