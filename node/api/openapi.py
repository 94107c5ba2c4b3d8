"""The OpenAPI document, made of the route table and the schemas of the bodies.

`docs/generate.py` writes it and the table of fields of `docs/api.md`; the node serves it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .body_schema import StrictBody
from .completions_api import CompletionBody, DetokenizeBody, TokenizeBody
from .dialects import dialect_of
from .errors import JsonResponse
from .join_api import ApproveBody, KeyBody, RekeyBody
from .messages_schema import MessagesBody
from .ollama_schema import OllamaChatBody, OllamaGenerateBody, ShowBody
from .openai_schema import ChatBody
from .operations_api import SettingsBody
from .plan_request import PlacementBody
from .responses_schema import ResponsesBody
from .session_api import TicketBody
from .tolerant_body import TolerantBody

OPENAPI_PATH: Final = "/openapi.json"
BODIES: Final[Mapping[tuple[str, str], type[StrictBody]]] = {
    ("POST", "/v1/chat/completions"): ChatBody,
    ("POST", "/v1/completions"): CompletionBody,
    ("POST", "/v1/tokenize"): TokenizeBody,
    ("POST", "/v1/detokenize"): DetokenizeBody,
    ("POST", "/v1/messages"): MessagesBody,
    ("POST", "/v1/messages/count_tokens"): MessagesBody,
    ("POST", "/v1/responses"): ResponsesBody,
    ("POST", "/api/chat"): OllamaChatBody,
    ("POST", "/api/generate"): OllamaGenerateBody,
    ("POST", "/api/show"): ShowBody,
    ("POST", "/v1/placements"): PlacementBody,
    ("PATCH", "/v1/settings"): SettingsBody,
    ("POST", "/v1/join/requests/{id}/approve"): ApproveBody,
    ("POST", "/v1/join/key"): KeyBody,
    ("POST", "/v1/join/rekey"): RekeyBody,
    ("POST", "/v1/session"): TicketBody,
}
"""What is read at each endpoint; the others with a method that takes a body read `{}`."""
_QUERIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "/v1/models": {"catalog": {"enum": ["0", "1", "true", "false"]}},
    "/v1/placements/preview": {
        "model": {"type": "string", "minLength": 1, "maxLength": 256},
        "min_nodes": {"type": "integer", "minimum": 1, "maximum": 1024},
        "max_nodes": {"type": "integer", "minimum": 1, "maximum": 1024},
        "context": {"type": "integer", "minimum": 1},
    },
    "/v1/events": {"follow": {"enum": ["0", "1"]}, "scope": {"enum": ["cluster", "node"]}},
}
_STATUSES: Final = (400, 401, 403, 404, 408, 409, 411, 413, 415, 421, 429, 503)
_STREAMED: Final[Mapping[str, str]] = {
    "openai": "text/event-stream",
    "anthropic": "text/event-stream",
    "ollama": "application/x-ndjson",
}
_PLAIN: Final[Mapping[str, str]] = {"/metrics": "text/plain", "/v1/events": "text/event-stream"}

Effect = Literal["honoured", "no-op", "refused", "ignored"]
_COLUMNS: Final[tuple[Effect, ...]] = get_args(Effect)


@dataclass(frozen=True, slots=True)
class FieldEffect:
    """What becomes of one field of a body. `neutral`: what a refused one may say."""

    name: str
    effect: Effect
    neutral: tuple[Any, ...] = ()


def effects(body: type[StrictBody]) -> list[FieldEffect]:
    """Of every field that the body's schema names."""
    refused = body.refused_fields()
    named = list(dict.fromkeys((*body.model_fields, *refused)))
    return [_effect(body, name, refused) for name in named]


def is_tolerant(body: type[StrictBody]) -> bool:
    return issubclass(body, TolerantBody)


def _effect(
    body: type[StrictBody], name: str, refused: Mapping[str, tuple[Any, ...]]
) -> FieldEffect:
    if name in refused:
        return FieldEffect(name, "refused", refused[name])
    if name in body.ignored_fields:
        return FieldEffect(name, "ignored")
    return FieldEffect(name, "no-op" if name in body.without_effect else "honoured")


def document(routes: Sequence[Route], version: str = "") -> dict[str, Any]:
    """OpenAPI 3.1, of the routes of a node's application."""
    used = sorted(set(BODIES.values()), key=lambda body: body.__name__)
    references, schemas = models_json_schema(
        [(body, "validation") for body in used], ref_template="#/components/schemas/{model}"
    )
    found: dict[type[StrictBody], Mapping[str, Any]] = {
        body: references[body, "validation"] for body in used
    }
    for body in used:
        _tell_effects(body, schemas["$defs"][found[body]["$ref"].rpartition("/")[2]])
    paths: dict[str, dict[str, Any]] = {}
    for route in sorted(routes, key=lambda each: each.path):
        of_path = paths.setdefault(_plain(route.path), {})
        for method in sorted((route.methods or set()) - {"HEAD"}):
            of_path[method.lower()] = _operation(route, method, found)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "exo-node",
            "version": version or "0",
            "description": "docs/api.md says what the fields mean.",
        },
        "paths": paths,
        "components": {
            "schemas": {**_settled(schemas["$defs"]), **_errors()},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def openapi_route(routes: Sequence[Route], version: str = "") -> Route:
    """Serves the document of `routes`, made when it is first asked for."""
    kept: list[dict[str, Any]] = []

    async def serve(_: Request) -> Response:
        if not kept:
            kept.append(document(routes, version))
        return JsonResponse(kept[0])

    return Route(OPENAPI_PATH, serve, methods=["GET"], name="OpenApi.document")


def _plain(path: str) -> str:
    return re.sub(r":[a-z]+}", "}", path)


def _operation(
    route: Route, method: str, found: Mapping[type[StrictBody], Mapping[str, Any]]
) -> dict[str, Any]:
    path = _plain(route.path)
    body = BODIES.get((method, path))
    told: dict[str, Any] = {
        "operationId": f"{method.lower()} {path}",
        "parameters": [*_path_parameters(path), *_query_parameters(path, method)],
        "responses": _responses(path, body),
    }
    if method in ("POST", "PATCH"):
        nothing = {"type": "object", "additionalProperties": False}
        schema = nothing if body is None else found[body]
        content = {"application/json": {"schema": schema}}
        told["requestBody"] = {"required": True, "content": content}
    return told


def _path_parameters(path: str) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{([a-z_]+)}", path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameters(path: str, method: str) -> Iterator[dict[str, Any]]:
    if method != "GET":
        return
    for name, schema in _QUERIES.get(path, {}).items():
        yield {"name": name, "in": "query", "required": name == "model", "schema": schema}


def _responses(path: str, body: type[StrictBody] | None) -> dict[str, Any]:
    dialect = dialect_of(path)
    kinds = [_PLAIN.get(path, "application/json")]
    if body is not None and "stream" in body.model_fields:
        kinds.append(_STREAMED[dialect])
    content = {kind: {"schema": _whole(kind)} for kind in kinds}
    fault = {"$ref": f"#/components/schemas/{dialect}_error"}
    refusals = {"application/json": {"schema": fault}}
    if path == "/health/ready":
        refusals = {"application/json": {"schema": {"type": "object"}}}
    return {
        "200": {"description": "The answer", "content": content},
        **{str(status): {"description": "Refused", "content": refusals} for status in _STATUSES},
    }


def _whole(kind: str) -> dict[str, Any]:
    return {"type": "object"} if kind == "application/json" else {}


def _settled(schema: Any) -> Any:
    """Choices in order: the order of a Literal is that of whichever equal one was made first."""
    match schema:
        case {"enum": [*choices], **rest} if all(isinstance(each, str) for each in choices):
            return {**_settled(rest), "enum": sorted(cast(list[str], choices))}
        case dict():
            fields = cast(dict[str, Any], schema)
            return {name: _settled(value) for name, value in fields.items()}
        case list():
            return [_settled(each) for each in cast(list[Any], schema)]
        case _:
            return schema


def _errors() -> dict[str, Any]:
    """By dialect."""
    text = {"type": "string"}
    field = {"type": ["string", "null"]}
    names = ("message", "type", "param", "code")
    openai = _object(message=text, type=text, param=field, code=text)
    anthropic = {**_object(message=text, type=text, param=field, code=text), "required": [*names]}
    return {
        "openai_error": _object(error={**openai, "required": [*names]}),
        "anthropic_error": _object(type={"const": "error"}, error=anthropic),
        "ollama_error": _object(error=text),
    }


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _tell_effects(body: type[StrictBody], schema: dict[str, Any]) -> None:
    """Marks fields without effect, and names those that may say nothing."""
    properties: dict[str, Any] = schema.setdefault("properties", {})
    for field in effects(body):
        if field.effect == "refused":
            values = [*field.neutral, None]
            properties[field.name] = {"enum": values, "x-exo-node": "refused"}
        elif field.effect != "honoured":
            properties[field.name]["x-exo-node"] = field.effect
    if is_tolerant(body):
        schema["additionalProperties"] = True


def fields_table(paths: Iterable[str]) -> str:
    """Markdown: a row for each endpoint, a column for each effect."""
    heads = ("Endpoint", "Honoured", "Without effect", "Refused", "Anything else")
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for path in paths:
        body = BODIES["POST", path]
        by_effect: dict[Effect, list[str]] = {
            effect: [f"`{field.name}`" for field in effects(body) if field.effect == effect]
            for effect in _COLUMNS
        }
        ignored = ", ".join(by_effect.pop("ignored"))
        cells = [", ".join(names) or "none" for names in by_effect.values()]
        rest = "ignored and named" if is_tolerant(body) else "refused"
        rest = f"{ignored}: ignored and named; others {rest}" if ignored else rest
        rows.append(f"| `{path}` | {' | '.join(cells)} | {rest} |")
    return "\n".join(rows) + "\n"
