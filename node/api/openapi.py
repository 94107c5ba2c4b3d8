"""The OpenAPI document, made of the route table and the schemas of the bodies.

`docs/generate.py` writes it; the node serves it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal, cast

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from .http.bodies import EmptyBody, StrictBody, TolerantBody
from .http.dialects import HEALTH_PATHS, wire_format
from .http.long_bodies import JSON_TYPE, json_response
from .http.routes import ApiRoute

OPENAPI_PATH: Final = "/openapi.json"
_STATUSES: Final = (400, 401, 403, 404, 408, 409, 411, 413, 415, 421, 429, 503)

Effect = Literal["honoured", "no-op", "refused", "ignored"]


def effects(body: type[StrictBody]) -> dict[str, Effect]:
    """The effect of every field that the body's schema names."""
    kinds: tuple[tuple[Effect, Iterable[str]], ...] = (
        ("honoured", body.model_fields),
        ("no-op", body.without_effect),
        ("ignored", body.ignored_fields),
        ("refused", body.refused_fields),
    )
    return {name: effect for effect, names in kinds for name in names}


def bodies(routes: Iterable[ApiRoute]) -> dict[tuple[str, str], type[StrictBody]]:
    """The bodies that have fields, by method and path."""
    return {
        (method, plain_path(route)): route.body
        for route in routes
        for method in route.methods or ()
        if route.body not in (None, EmptyBody)
    }


def document(routes: Sequence[ApiRoute], version: str = "") -> dict[str, Any]:
    """The OpenAPI 3.1 document of the routes."""
    classes = sorted(set(bodies(routes).values()), key=lambda body: body.__name__)
    references, schemas = models_json_schema(
        [(body, "validation") for body in classes], ref_template="#/components/schemas/{model}"
    )
    schema_of: dict[type[StrictBody], Mapping[str, Any]] = {
        body: references[body, "validation"] for body in classes
    }
    schema_of[EmptyBody] = {"type": "object", "additionalProperties": False}
    for body in classes:
        _mark_effects(body, schemas["$defs"][schema_of[body]["$ref"].rpartition("/")[2]])
    paths: dict[str, dict[str, Any]] = {}
    for route in sorted(routes, key=lambda each: each.path):
        operations = paths.setdefault(plain_path(route), {})
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operations[method.lower()] = _operation(route, method, schema_of)
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


def openapi_route(routes: Sequence[ApiRoute], version: str = "") -> ApiRoute:
    """Serves the document of `routes`, which is made at the first request."""
    cached_document = cache(lambda: document(routes, version))

    async def serve(_: Request) -> Response:
        return json_response(cached_document())

    return ApiRoute("GET", OPENAPI_PATH, serve)


def plain_path(route: ApiRoute) -> str:
    """The path without starlette's converters: `/v1/models/{id}`."""
    return re.sub(r":[a-z]+}", "}", route.path)


def _operation(
    route: ApiRoute, method: str, schema_of: Mapping[type[StrictBody], Mapping[str, Any]]
) -> dict[str, Any]:
    path = plain_path(route)
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()} {path}",
        "parameters": [*_path_parameters(path), *_query_parameters(route)],
        "responses": _responses(route, path),
    }
    if route.body is not None:
        content = {JSON_TYPE: {"schema": schema_of[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _path_parameters(path: str) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{([a-z_]+)}", path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameters(route: ApiRoute) -> Iterator[dict[str, Any]]:
    for name, schema in route.query.items():
        yield {"name": name, "in": "query", "required": name in ("model", "q"), "schema": schema}


def _responses(route: ApiRoute, path: str) -> dict[str, Any]:
    wire = wire_format(path)
    kinds = [route.media_type]
    if route.body is not None and "stream" in route.body.model_fields:
        kinds.append(wire.stream_type)
    content = {kind: {"schema": _whole(kind)} for kind in kinds}
    fault = {"$ref": f"#/components/schemas/{wire.name}_error"}
    if path in ("/health/ready", *HEALTH_PATHS):
        fault = {"type": "object"}
    refusals = {JSON_TYPE: {"schema": fault}}
    return {
        "200": {"description": "The answer", "content": content},
        **{str(status): {"description": "Refused", "content": refusals} for status in _STATUSES},
    }


def _whole(kind: str) -> dict[str, Any]:
    return {"type": "object"} if kind == JSON_TYPE else {}


def _settled(schema: Any) -> Any:
    """The schema with sorted choices: equal Literals share the order of the first one created."""
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
    """The schemas of errors, by wire format."""
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


def _mark_effects(body: type[StrictBody], schema: dict[str, Any]) -> None:
    """Marks fields without effect, and adds refused ones with the values that they may have."""
    properties: dict[str, Any] = schema.setdefault("properties", {})
    for name, effect in effects(body).items():
        if effect == "refused":
            values = [*body.refused_fields[name], None]
            properties[name] = {"enum": values, "x-exo-node": "refused"}
        elif effect != "honoured":
            properties[name]["x-exo-node"] = effect
    if issubclass(body, TolerantBody):
        schema["additionalProperties"] = True
