"""`POST /v1/responses`: OpenAI's newer dialect, which may continue an earlier response.

A response stays in memory for a while unless its request has `"store": false`: many frameworks rely
on OpenAI's default.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ....placement.errors import InvalidRequest
from ....placement.ids import RequestId
from ....proto import peer_pb2 as pb
from ..http.bodies import (
    MAX_HISTORY,
    StrictBody,
    ignored_header,
    parse_body,
    read_with,
    unknown_fields,
    validated,
)
from ..http.dialects import INPUT_TOKENS_PATH, RESPONSES_PATH, Exchange
from ..http.long_bodies import json_response, off_the_loop
from ..http.routes import ApiRoute
from ..shared.answering import Answering
from ..shared.sampling_schema import generation, one_grammar
from .response_memory import PREVIOUS, Json, ResponseMemory, pack
from .response_renderer import ResponseRenderer
from .responses_schema import InputItem, ResponsesBody


class _Conversation(StrictBody):
    items: Annotated[list[InputItem], Field(fail_fast=True)]


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    exchange: Exchange
    renderer: ResponseRenderer
    conversation: tuple[bytes, ...]
    """The packed items that it continues, and its input; () if it is not kept."""


def parsed_response(
    body: ResponsesBody,
    request_id: RequestId,
    earlier: Sequence[InputItem] = (),
    parts: tuple[bytes, ...] = (),
) -> ParsedResponse:
    """`earlier`: the conversation that the response continues; `parts`: the same, packed.

    Raises InvalidRequest.
    """
    ignored = unknown_fields(body)
    body.check()
    tools = body.tool_set(ignored, earlier)
    request = generation(
        body,
        request_id,
        body.for_template(tools, ignored, earlier),
        prompt_field="input",
        limits={"max_tokens": body.max_output_tokens},
        output=pb.Output(
            call_parts=bool(body.stream),
            grammar=one_grammar(body.required_call(tools), body.form, ignored),
        ),
        tools=body.callable_functions(tools),
    )
    renderer = ResponseRenderer(body, request_id, tools)
    names = tuple(dict.fromkeys(ignored))
    exchange = Exchange(
        request,
        [renderer],
        bool(body.stream),
        names,
        fault=renderer.fault,
        close=renderer.break_off,
    )
    if body.store is False:
        return ParsedResponse(exchange, renderer, ())
    own = pack(item.model_dump(exclude_unset=True) for item in body.items)
    return ParsedResponse(exchange, renderer, (*parts, own))


class ResponsesApi:
    """The endpoints."""

    def __init__(self, answering: Answering, memory: ResponseMemory | None = None) -> None:
        self._answering = answering
        self._memory = memory or ResponseMemory()

    def routes(self) -> list[ApiRoute]:
        return [
            ApiRoute("POST", RESPONSES_PATH, self.create, body=ResponsesBody),
            ApiRoute("POST", INPUT_TOKENS_PATH, self.count, body=ResponsesBody),
        ]

    async def count(self, request: Request) -> Response:
        parsed = await self._parsed(request)
        prompt = await self._answering.encode(parsed.exchange.request)
        counted = {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}
        return json_response(
            counted, headers=ignored_header(parsed.exchange.ignored, RESPONSES_PATH)
        )

    async def create(self, request: Request) -> Response:
        parsed = await self._parsed(request)
        renderer, memory, owner = parsed.renderer, self._memory, _owner_of(request)
        if parsed.conversation:
            renderer.keep = partial(memory.add, renderer.id, owner, parsed.conversation)
        return await self._answering.respond(request, parsed.exchange)

    async def _parsed(self, request: Request) -> ParsedResponse:
        request_id = RequestId(request.state.request_id)

        def read(raw: bytes) -> ResponsesBody | ParsedResponse:
            body = parse_body(raw, ResponsesBody)
            continues = body.previous_response_id is not None or body.references
            return body if continues else parsed_response(body, request_id)

        body = await read_with(request, read)
        if isinstance(body, ParsedResponse):
            return body
        memory, owner, previous = self._memory, _owner_of(request), body.previous_response_id
        parts = () if previous is None else memory.conversation(previous, owner)
        outputs = memory.outputs(body.references.values(), owner)

        def parse() -> ParsedResponse:
            own = memory.unpack(outputs, "input")
            earlier = _validated(memory.unpack(parts, PREVIOUS))
            return parsed_response(_resolved(body, own), request_id, earlier, parts)

        return await off_the_loop(parse)


def _owner_of(request: Request) -> str:
    """The owner of what a client leaves here: its API token, or everyone without one.

    The salt identifies the token and reveals neither it nor its digest.
    """
    salt: bytes = request.state.cache_salt
    return salt.hex()


def _resolved(body: ResponsesBody, own: list[Json]) -> ResponsesBody:
    """The body with items in the place of references. `own`: those of the responses that gave the
    items their ids. Raises InvalidRequest that names one which is not among them."""
    by_id = {item["id"]: item for item in own}
    for number, id in body.references.items():
        if id not in by_id:
            raise InvalidRequest(
                f"'input[{number}].id': this node has no item '{id[:64]}': its response was made "
                'with "store": false, with another key, on another node, or too long ago; send '
                "the item itself (in the AI SDK with the option store: false)",
                param=f"input[{number}].id",
            )
    items = _validated([by_id[id] for id in body.references.values()])
    return body.with_items(dict(zip(body.references, items, strict=True)))


def _validated(items: list[Json]) -> list[InputItem]:
    """Items of earlier responses. Raises InvalidRequest."""
    try:
        return validated({"items": items}, _Conversation).items
    except InvalidRequest:
        raise InvalidRequest(
            f"the conversation of '{PREVIOUS}' has more than {MAX_HISTORY} items and parts; "
            "begin another one with what matters of it",
            param=PREVIOUS,
        ) from None
