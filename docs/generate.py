"""Writes what documents take from the code: `python docs/generate.py` (tests say when it is due).

`docs/openapi.json`, the table of fields in `docs/api.md`, the schemas of `bench serve` and of
shared results, the table of `docs/results.md` (a row for each file in `docs/results/`), and the
dashboard's copy of `docs/clients.md`, which the package cannot take from `docs/`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from pydantic import ValidationError
from pydantic.json_schema import models_json_schema

from exo_node.node.api.http.bodies import EmptyBody, StrictBody, TolerantBody, marked_fields
from exo_node.node.api.http.dialects import HEALTH_PATHS, wire_format
from exo_node.node.api.http.long_bodies import JSON_TYPE
from exo_node.node.api.http.routes import ApiRoute
from exo_node.node.api.operations.operations_api import Operations
from exo_node.node.api.server import Services, api_routes
from exo_node.node.api.shared.answering import Answering
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.timing import PROFILES
from exo_node.placement.errors import InvalidSettings
from exo_node.shard.tools.share.result import SharedResult, Spread
from exo_node_bench.serve.result import Result

HERE: Final = Path(__file__).resolve().parent
BEGIN: Final = "<!-- made by docs/generate.py -->\n"
END: Final = "<!-- until here -->\n"
"""Around the table."""
CLIENTS: Final = HERE.parent / "dashboard" / "static" / "clients.md"
"""The dashboard's copy of the clients' recipes."""
ANSWERING: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
    "/api/embed",
)
_STATUSES: Final = (400, 401, 403, 404, 408, 409, 411, 413, 415, 421, 429, 503)

Effect = Literal["honoured", "no-op", "refused", "ignored"]


def routes() -> list[ApiRoute]:
    """All routes of a node; the services behind them are never called."""
    service: Any = cast(Any, object())
    services = Services(
        service,
        cast(Any, Operations),
        EventLog(),
        joining=service,
        files=service,
    )
    return api_routes(Answering(service, 1.0), services, PROFILES["lan"], service)


def openapi() -> str:
    return json.dumps(document(routes()), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def fields_table(routes: Sequence[ApiRoute], paths: Iterable[str]) -> str:
    """Markdown with a row for each path and a column for each effect."""
    body_of = bodies(routes)
    heads = ("Endpoint", "Honoured", "Without effect", "Refused", "Anything else")
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for path in paths:
        body = body_of["POST", path]
        by_effect = {
            effect: [f"`{name}`" for name, own in effects(body).items() if own == effect]
            for effect in get_args(Effect)
        }
        ignored = ", ".join(by_effect.pop("ignored"))
        cells = [", ".join(names) or "none" for names in by_effect.values()]
        rest = "ignored and named" if issubclass(body, TolerantBody) else "refused"
        rest = f"{ignored}: ignored and named; others {rest}" if ignored else rest
        rows.append(f"| `{path}` | {' | '.join(cells)} | {rest} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """The page with the table of fields anew."""
    return _between_marks(page, fields_table(routes(), ANSWERING))


def _between_marks(page: str, table: str) -> str:
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def with_results(page: str) -> str:
    """The page with a row for each shared result. Raises InvalidSettings for other files."""
    results = [
        read_result(file.read_bytes(), f"docs/results/{file.name}")
        for file in (HERE / "results").glob("*.json")
    ]
    results.sort(key=lambda each: (each.machine.chip, each.model.id or "", each.date))
    heads = ("Machine", "Model", "Versions", "Exact", "Plain", "Drafted", "Gain", "First token")
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    rows += [f"| {' | '.join(_cells(each))} |" for each in results]
    return _between_marks(page, "\n".join(rows) + "\n")


def read_result(raw: bytes, name: str) -> SharedResult:
    """A shared result. Raises InvalidSettings, which names file and field."""
    try:
        return SharedResult.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "all of it"
        raise InvalidSettings(
            f"{name}: {field}: {first['msg']}; write the file by `exo-node report --share`"
        ) from error


def _cells(result: SharedResult) -> tuple[str, ...]:
    machine, model, speed = result.machine, result.model, result.speed
    size = [f"{machine.memory_gb} GB"] if machine.memory_gb else []
    cores = [f"{machine.cores} cores"] if machine.cores and machine.backend == "cpu" else []
    numbers = f"{model.bits} bits" if model.bits else model.dtype
    random = ["random weights"] if model.weights == "random" else []
    source = f", [from a bench](../{result.source})" if result.source else ""
    versions = result.versions
    return (
        ", ".join((machine.chip, machine.backend, *size, *cores, machine.system)),
        ", ".join((model.id or f"not named, {model.layers} layers", numbers, *random)),
        f"exo-node {versions.exo_node}, mlx {versions.mlx}, {result.date}{source}",
        _exactness(result),
        _figure(speed.plain_tok_s, "tok/s"),
        _figure(speed.drafted_tok_s, "tok/s"),
        _figure(speed.ratio, "times"),
        f"{_figure(speed.first_token_s, 's')} after {speed.prompt_tokens}"
        if speed.first_token_s
        else "",
    )


def _exactness(result: SharedResult) -> str:
    """The verdict, else the checks that there are; and the sets of rows that agree."""
    identity = result.identity
    parts = ", ".join(f"{name} {finding}" for name, finding in identity.parts.items())
    text = identity.verdict.replace("_", " ") if identity.verdict else parts
    return "; ".join((text, *sorted(set(identity.sets.values()))))


def _figure(spread: Spread | None, unit: str) -> str:
    if spread is None:
        return ""
    wide = f" ({spread.least:g}-{spread.most:g})" if spread.least and spread.most else ""
    return f"{spread.median:g}{wide} {unit}"


# ---------------------------------------------------------------- the OpenAPI document


def effects(body: type[StrictBody]) -> dict[str, Effect]:
    """The effect of every field that the body's schema names."""
    kinds: tuple[tuple[Effect, Iterable[str]], ...] = (
        ("honoured", body.model_fields),
        ("no-op", marked_fields(body, "no-op")),
        ("ignored", marked_fields(body, "ignored")),
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
    """Adds refused fields with the values that they may have."""
    properties: dict[str, Any] = schema.setdefault("properties", {})
    for name, neutral in body.refused_fields.items():
        properties[name] = {"enum": [*neutral, None], "x-exo-node": "refused"}
    if issubclass(body, TolerantBody):
        schema["additionalProperties"] = True


if __name__ == "__main__":
    _ = (HERE / "openapi.json").write_text(openapi())
    schema = json.dumps(Result.model_json_schema(), indent=1)
    _ = (HERE / "bench-serve.schema.json").write_text(f"{schema}\n")
    schema = json.dumps(SharedResult.model_json_schema(), indent=1)
    _ = (HERE / "result.schema.json").write_text(f"{schema}\n")
    for name, written in (("api.md", with_table), ("results.md", with_results)):
        page = HERE / name
        _ = page.write_text(written(page.read_text()))
    _ = CLIENTS.write_text((HERE / "clients.md").read_text())
