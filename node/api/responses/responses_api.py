"""`POST /v1/responses`: OpenAI's newer dialect, which may continue an earlier response.

A response is kept on the disk where `store` is true, in memory for a while where the request does
not name it, so that clients which leave it out can continue and no text stays behind, and not at
all where it is false.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ....placement.errors import InvalidRequest, ResponseNotFound, UnsupportedParameter
from ....placement.ids import RequestId
from ....proto import peer_pb2 as pb
from ....proto.fields import changed
from ...responses.store import NewResponse
from ...responses.tables import ItemPlace, Json
from ..http.bodies import (
    MAX_HISTORY,
    StrictBody,
    ignored_header,
    parse_body,
    read_with,
    unknown_fields,
    validated,
)
from ..http.dialects import RESPONSES_PATH, RESPONSES_PREFIX, Exchange
from ..http.long_bodies import json_response
from ..http.routes import ApiRoute
from ..http.sse import EventStream
from ..http.strict_json import encode
from ..shared.answering import Answering, of_client
from ..shared.sampling_schema import generation
from ..shared.structured_schema import one_grammar
from .response_renderer import ResponseRenderer
from .response_run import ResponseRun
from .response_runs import NO_RUNS, ResponseRuns, owner_of, read_run
from .responses_schema import PREVIOUS, InputItem, ResponsesBody


class _Conversation(StrictBody):
    items: Annotated[list[InputItem], Field(fail_fast=True)]


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    body: ResponsesBody
    exchange: Exchange
    renderer: ResponseRenderer
    items: list[Json]
    """The input as it is stored, if it is."""


def parsed_response(
    body: ResponsesBody, request_id: RequestId, earlier: Sequence[InputItem] = ()
) -> ParsedResponse:
    """`earlier`: the conversation that the response continues. Raises InvalidRequest."""
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
    exchange = Exchange(request, [renderer], bool(body.stream), names, fault=renderer.fault)
    inputs = () if body.store is False else body.items
    items = stored_items([item.model_dump(exclude_unset=True) for item in inputs], renderer.id)
    return ParsedResponse(body, exchange, renderer, items)


class ResponsesApi:
    """The endpoint. `runs` is None if this node stores no responses."""

    def __init__(self, answering: Answering, runs: ResponseRuns | None) -> None:
        self._answering = answering
        self._runs = runs

    def routes(self) -> list[ApiRoute]:
        count, compact = f"{RESPONSES_PREFIX}input_tokens", f"{RESPONSES_PREFIX}compact"
        return [
            ApiRoute("POST", RESPONSES_PATH, self.create, body=ResponsesBody),
            ApiRoute("POST", count, self.count, body=ResponsesBody),
            ApiRoute("POST", compact, self.compact),
        ]

    async def count(self, request: Request) -> Response:
        parsed = await self._parsed(request)
        prompt = await self._answering.encode(parsed.exchange.request)
        counted = {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}
        return json_response(
            counted, headers=ignored_header(parsed.exchange.ignored, RESPONSES_PATH)
        )

    async def compact(self, _: Request) -> Response:
        """Refuses with ResponseNotFound: no model here reads what OpenAI's would answer."""
        raise ResponseNotFound(
            "this node compacts no conversations; ask a model for a summary, and send that as "
            "'input'"
        )

    async def create(self, request: Request) -> Response:
        parsed = await self._parsed(request)
        body, exchange = parsed.body, parsed.exchange
        if body.store is not False and self._runs is not None:
            parsed.renderer.is_kept = True
            return await self._answer(request, parsed, self._runs)
        if body.background:
            message = f"'background' is not supported: {NO_RUNS}; leave it out"
            raise UnsupportedParameter(message, param="background")
        if body.store:
            parsed.renderer.not_stored = NO_RUNS
            exchange = replace(exchange, ignored=(*exchange.ignored, "store"))
        return await self._answering.respond(request, exchange)

    async def _parsed(self, request: Request) -> ParsedResponse:
        request_id = RequestId(request.state.request_id)

        def read(raw: bytes) -> ResponsesBody | ParsedResponse:
            body = parse_body(raw, ResponsesBody)
            needs_store = body.previous_response_id is not None or body.references
            return body if needs_store else parsed_response(body, request_id)

        body = await read_with(request, read)
        if isinstance(body, ParsedResponse):
            return body
        if self._runs is None:
            name = PREVIOUS if body.previous_response_id else f"input[{min(body.references)}].id"
            message = f"'{name}' is not supported: {NO_RUNS}; send the whole conversation"
            raise UnsupportedParameter(message, param=name)
        store, owner = self._runs.store, owner_of(request)
        previous, items, own = body.previous_response_id, list[Json](), list[Json]()
        if previous is not None:
            items = await store.conversation(previous, owner)
        if references := body.references.values():
            places = {place for id in references if (place := place_of(id)) is not None}
            own = await store.own_items(places, owner)

        def parse() -> ParsedResponse:
            earlier = _stored_items(items)
            return parsed_response(_resolved(body, own), request_id, earlier)

        return await asyncio.to_thread(parse)

    async def _answer(
        self, request: Request, parsed: ParsedResponse, runs: ResponseRuns
    ) -> Response:
        """Starts an answer that is stored, and follows it unless it is in the background."""
        exchange = parsed.exchange
        is_followed = exchange.stream or parsed.body.background is True
        output = changed(exchange.request.output, call_parts=is_followed)
        generation = of_client(request, replace(exchange.request, output=output))
        profiled = await self._answering.profiled(generation)
        run = await runs.start(
            NewResponse(
                parsed.renderer.id,
                owner_of(request),
                is_background=parsed.body.background is True,
                items=parsed.items,
                previous=parsed.body.previous_response_id,
                is_stored=parsed.body.store is True,
            ),
            parsed.renderer,
            lambda: self._answering.chat.stream(profiled),
        )
        is_background = run.request.is_background
        if is_background and not exchange.stream:
            return json_response(run.response, headers=_headers(exchange, run))
        silence = self._answering.silence()
        frames = read_run(run, request.receive, silence, -1, holds=not is_background)
        if exchange.stream:
            first = await anext(frames)
            response = EventStream(_with_first(first, frames))
            response.headers.update(_headers(exchange, run))
            return response
        async with aclosing(frames):
            async for _ in frames:
                pass
        if run.fault is not None:
            raise run.fault
        return json_response(run.response, headers=_headers(exchange, run))


def _resolved(body: ResponsesBody, own: list[Json]) -> ResponsesBody:
    """The body with items in the place of references. `own`: those of the responses that gave the
    items their ids. Raises InvalidRequest that names one which is not among them."""
    by_id = {item["id"]: item for item in own}
    for number, id in body.references.items():
        if id not in by_id:
            raise InvalidRequest(
                f"'input[{number}].id': this node has no item '{id[:64]}': its response was made "
                'with "store": false, with another key or on another node, or it was deleted or '
                "has expired; send the item itself (in the AI SDK with the option store: false)",
                param=f"input[{number}].id",
            )
    items = _stored_items([by_id[id] for id in body.references.values()])
    return body.with_items(dict(zip(body.references, items, strict=True)))


def _stored_items(items: list[Json]) -> list[InputItem]:
    """Items of stored responses. Raises InvalidRequest."""
    try:
        return validated({"items": items}, _Conversation).items
    except InvalidRequest:
        raise InvalidRequest(
            f"the conversation of '{PREVIOUS}' has more than {MAX_HISTORY} items and parts; "
            "begin another one with what matters of it",
            param=PREVIOUS,
        ) from None


def _headers(exchange: Exchange, run: ResponseRun) -> Mapping[str, str]:
    """The header that names what had no effect, as far as that is known."""
    store = ("store",) if run.renderer.not_stored else ()
    return ignored_header([*exchange.ignored, *run.notes, *store], RESPONSES_PATH)


async def _with_first(first: bytes, frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(frames):
        yield first
        async for frame in frames:
            yield frame


def stored_items(items: list[Json], response: str) -> list[Json]:
    """Items as they are stored: each has an id, by which lists continue, and arguments are text,
    whose lists and objects no continuation has to parse."""
    prefix = response.replace("resp_", "msg_", 1)
    stored = list[Json]()
    for number, item in enumerate(items):
        own = {"id": item.get("id") or f"{prefix}_{number}"}
        if not isinstance(arguments := item.get("arguments"), str | None):
            own["arguments"] = encode(arguments).decode()
        stored.append({**item, **own})
    return stored


def place_of(item: str) -> ItemPlace | None:
    """The response that gave an item this id, and the part of it, or None."""
    match = re.fullmatch(r"(item|msg)_([0-9a-f]+)_[0-9]+", item)
    if match is None:
        return None
    return ItemPlace(f"resp_{match[2]}", "output" if match[1] == "item" else "input")
