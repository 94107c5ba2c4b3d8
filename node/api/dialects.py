"""The dialects of the API: which one a path speaks, and how each shows an error."""

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from .errors import HttpFault, JsonResponse, error_object
from .sse import data
from .strict_json import encode

Dialect = Literal["openai", "anthropic", "ollama"]

ANSWERING: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/tokenize",
    "/v1/detokenize",
)
"""What answers a client's prompt, under /v1: driven by the node that the client asked, and free to
every user of the machine where there is no API key."""
OLLAMA: Final = "/api/"
MODELS_OF_OLLAMA: Final = ("/api/tags", "/api/ps", "/api/show")
"""What the head answers, as it does `/v1/models`."""
ANTHROPIC_HEADER: Final = "anthropic-version"
"""Every client of Anthropic's API sends it."""
IGNORED_HEADER: Final = "x-exo-node-ignored"

_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def dialect_of(path: str, headers: Mapping[str, str] | None = None) -> Dialect:
    """`headers`: the request's, which tell the clients of `/v1/models` apart."""
    if path.startswith(OLLAMA):
        return "ollama"
    own = f"{path}/".startswith("/v1/models/") and ANTHROPIC_HEADER in (headers or {})
    return "anthropic" if own or path.startswith("/v1/messages") else "openai"


def fault_object(
    fault: HttpFault, path: str, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The error as a client of the request's dialect parses it."""
    match dialect_of(path, headers):
        case "openai":
            return error_object(fault)
        case "ollama":
            return {"error": fault.message}
        case "anthropic":
            otherwise = "api_error" if fault.status >= 500 else "invalid_request_error"
            kind = _ANTHROPIC_TYPES.get(fault.status, otherwise)
            told = {"type": kind, "message": fault.message, "code": fault.code}
            return {"type": "error", "error": told | {"param": fault.param}}


def fault_response(
    fault: HttpFault, path: str, headers: Mapping[str, str] | None = None
) -> JsonResponse:
    """`path` and `headers` are the request's."""
    told = fault_object(fault, path, headers)
    return JsonResponse(told, fault.status, headers=dict(fault.headers))


def fault_frame(fault: HttpFault, path: str) -> bytes:
    """The last frame of a stream that has begun."""
    told = fault_object(fault, path)
    if path == "/v1/responses":
        error = told["error"]
        event = {"type": "error", "code": error["code"], "message": error["message"]}
        return named("error", event | {"param": error["param"], "sequence_number": 0})
    match dialect_of(path):
        case "openai":
            return data(told)
        case "ollama":
            return encode(told) + b"\n"
        case "anthropic":
            return named("error", told)


def named(name: str, value: Any) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + data(value)


def ignored_value(names: list[str]) -> str:
    """The header's value; what a client named its fields is no header by itself, and a value
    neither begins nor ends with a space."""
    text = ", ".join(json.dumps(name)[1:-1] for name in names)
    return text.replace('\\"', "'")[:1024].strip()
