"""The dialects of the API: how each puts a request, renders an answer and shows an error.

A `Dialect` is one endpoint that answers prompts; a `WireFormat` is what all endpoints of one
vendor's API share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, Protocol, TypeVar

from starlette.responses import Response

from ....placement.ids import RequestId
from ...chat.requests import CallPart, Finished, GenerationRequest, Part, TokenLogprob
from .bodies import StrictBody
from .errors import HttpFault, error_object
from .long_bodies import json_response
from .sse import data, named_event
from .strict_json import encode

RESPONSES_PATH: Final = "/v1/responses"
INPUT_TOKENS_PATH: Final = f"{RESPONSES_PATH}/input_tokens"
ANSWERING: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    RESPONSES_PATH,
    INPUT_TOKENS_PATH,
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/tokenize",
    "/v1/detokenize",
)
"""Paths under /v1 that answer a client's prompt: the entry node serves them itself, and without an
API key every user of the machine may use them."""
OLLAMA_PREFIX: Final = "/api/"
OLLAMA_MODELS: Final = ("/api/tags", "/api/ps", "/api/show")
"""Paths that the head answers, like `/v1/models`."""
SEARCH_PATH: Final = "/v1/models/search"
"""It makes the node send requests to the hub, with its user's token there."""
HEALTH_PATHS: Final = ("/health", "/ping")
"""Paths of readiness under vLLM's names."""
ANTHROPIC_HEADER: Final = "anthropic-version"
"""Every client of Anthropic's API sends it."""

EVENT_STREAM: Final = "text/event-stream"
NDJSON: Final = "application/x-ndjson"

_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(slots=True)
class WholeAnswer:
    """The collected parts of an answer that is not streamed."""

    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[CallPart] = field(default_factory=list[CallPart])
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    vectors: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Embeddings by the index of their input."""
    prompt_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)


class Renderer(Protocol):
    """Renders one answer in a dialect; holds the state of that answer's stream."""

    def whole(self, answer: WholeAnswer, end: Finished) -> Mapping[str, Any]:
        """The body of an answer that is not streamed. Long lists are iterators."""
        ...

    def render(self, event: Part) -> bytes:
        """The frames of an event; b"" if the dialect has none. `Finished` ends the stream."""
        ...

    def heartbeat(self) -> bytes:
        """A frame of data that changes nothing, valid at any point of the stream."""
        ...


@dataclass(frozen=True, slots=True)
class Exchange:
    """A parsed request and the renderers of its choices, one each; most dialects have one choice.

    `ignored`: names of the body's fields and parts that have no effect. `more_prompts`: the same
    request with its other prompts, of which each has as many choices. `fault`: the frames that end
    its stream with an error, where they are more than the wire format's. `close`: called when the
    stream has ended in any way.
    """

    request: GenerationRequest
    renderers: Sequence[Renderer]
    stream: bool
    ignored: Sequence[str] = ()
    more_prompts: Sequence[GenerationRequest] = ()
    fault: Callable[[HttpFault], bytes] | None = None
    close: Callable[[], None] = lambda: None


Body = TypeVar("Body", bound=StrictBody)


@dataclass(frozen=True, slots=True)
class Dialect(Generic[Body]):
    """An endpoint that answers prompts. `parse` raises InvalidRequest."""

    path: str
    body: type[Body]
    parse: Callable[[Body, RequestId], Exchange]


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The errors and streams of one vendor's API."""

    name: str
    stream_type: str
    fault: Callable[[HttpFault], dict[str, Any]]
    """The body of an error."""
    frame: Callable[[HttpFault], bytes]
    """The last frame of a stream that ends with an error."""


def _anthropic_fault(fault: HttpFault) -> dict[str, Any]:
    default = "api_error" if fault.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(fault.status, default)
    error = {"type": kind, "message": fault.message, "code": fault.code, "param": fault.param}
    return {"type": "error", "error": error}


def _ollama_fault(fault: HttpFault) -> dict[str, Any]:
    at = f"'{fault.param}': " if fault.param and fault.param not in fault.message else ""
    return {"error": at + fault.message}  # clients show this text alone


def _responses_frame(fault: HttpFault) -> bytes:
    error = error_object(fault)["error"]
    event = {"type": "error", "code": error["code"], "message": error["message"]}
    return named_event("error", event | {"param": error["param"], "sequence_number": 0})


OPENAI: Final = WireFormat(
    "openai", EVENT_STREAM, error_object, lambda fault: data(error_object(fault))
)
_OPENAI_RESPONSES: Final = replace(OPENAI, frame=_responses_frame)
ANTHROPIC: Final = WireFormat(
    "anthropic",
    EVENT_STREAM,
    _anthropic_fault,
    lambda fault: named_event("error", _anthropic_fault(fault)),
)
OLLAMA: Final = WireFormat(
    "ollama", NDJSON, _ollama_fault, lambda fault: encode(_ollama_fault(fault)) + b"\n"
)


def wire_format(path: str, headers: Mapping[str, str] | None = None) -> WireFormat:
    """The format of a request's answer. `headers` distinguish the clients of `/v1/models`."""
    if path.startswith(OLLAMA_PREFIX):
        return OLLAMA
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    if f"{path}/".startswith("/v1/models/") and ANTHROPIC_HEADER in (headers or {}):
        return ANTHROPIC
    return _OPENAI_RESPONSES if f"{path}/".startswith(f"{RESPONSES_PATH}/") else OPENAI


def fault_response(
    fault: HttpFault, path: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer to a refused request. `path` and `headers` are the request's."""
    body = wire_format(path, headers).fault(fault)
    return json_response(body, fault.status, headers=dict(fault.headers))
