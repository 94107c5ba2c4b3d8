"""Errors as the HTTP API shows them: one status, one JSON object and its headers per kind."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from ....placement.errors import (
    DigitsDiffer,
    DownloadFailed,
    ExoNodeError,
    InsufficientMemory,
    InvalidCard,
    InvalidCheckpoint,
    InvalidRequest,
    JoinRefused,
    JoinRequestNotFound,
    LoadFailed,
    ModelNotFound,
    PeerLost,
    PlacementNotFound,
    PlacementSuperseded,
    QueueFull,
    RemovalRefused,
    ResponseNotFound,
    ResponsesUnavailable,
)

STATUS: Mapping[type[ExoNodeError], int] = {
    InvalidRequest: 400,
    DigitsDiffer: 400,
    ModelNotFound: 404,
    PlacementNotFound: 404,
    JoinRequestNotFound: 404,
    ResponseNotFound: 404,
    JoinRefused: 409,
    RemovalRefused: 409,
    PlacementSuperseded: 409,
    QueueFull: 429,
    InsufficientMemory: 503,
    PeerLost: 503,
    LoadFailed: 503,
    InvalidCheckpoint: 503,
    InvalidCard: 503,
    DownloadFailed: 503,
    ResponsesUnavailable: 503,
}

# Seconds after which the same request may succeed (None: waiting does not help), and whether a
# client should retry by itself (the openai package does from 500 up, unless the header says no).
_RETRY_AFTER: Mapping[type[ExoNodeError], tuple[int | None, bool]] = {
    QueueFull: (1, True),
    PeerLost: (2, True),
    InsufficientMemory: (None, False),
    LoadFailed: (30, False),
    InvalidCheckpoint: (None, False),
    InvalidCard: (None, False),
    DownloadFailed: (30, False),
    ResponsesUnavailable: (30, False),
    JoinRefused: (5, False),
    PlacementSuperseded: (None, False),
}


@dataclass(frozen=True, slots=True)
class HttpFault:
    """An error in HTTP's terms; `code` is one of the API's, `param` the field at fault."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


def fault_of(error: ExoNodeError) -> HttpFault:
    """The HTTP form of `error`; kinds that concern no client become a 500 with their code."""
    for kind in type(error).__mro__:
        if kind in STATUS:
            headers = _retry_headers(kind)
            return HttpFault(STATUS[kind], error.code, error.message, error.param, headers)
    return HttpFault(500, error.code, error.message, error.param, (("x-should-retry", "false"),))


def internal_fault(request_id: str) -> HttpFault:
    """The error for a defect: it names the log entry and reveals nothing of the cause."""
    message = f"the node failed unexpectedly; its log has the cause under {request_id}"
    return HttpFault(500, "internal_error", message, None, (("x-should-retry", "false"),))


def error_object(fault: HttpFault) -> dict[str, Any]:
    """`{"error": …}`, as OpenAI's clients parse it."""
    return {
        "error": {
            "message": fault.message,
            "type": _type_of(fault.status),
            "param": fault.param,
            "code": fault.code,
        }
    }


def unnamed_fault(status: int, path: str, paths: Iterable[str] = ()) -> HttpFault:
    """The error for a bare status from the router. `paths` are the served ones."""
    match status:
        case 404:
            message = f"this node does not serve {path}{_nearest(path, paths)}"
            return HttpFault(404, "not_found", message)
        case 405:
            return HttpFault(405, "method_not_allowed", f"{path} has no such method; see Allow")
        case _:
            phrase = HTTPStatus(status).phrase
            return HttpFault(status, phrase.lower().replace(" ", "_"), phrase)


def _nearest(path: str, paths: Iterable[str]) -> str:
    """A clause that names the likely intended path; "" if none is close."""
    served = [each for each in paths if "{" not in each]
    # A base URL that lacks /v1, or has it twice, is the commonest mistake.
    path = path[:256].rstrip("/")
    ends = [each for each in served if path and each.endswith(path)]
    doubled = [each for each in served if each != "/" and path.endswith(each)]
    near = ends or doubled or difflib.get_close_matches(path, served, 1, cutoff=0.8)
    return f"; the nearest that it serves is {near[0]}" if near else ""


def _type_of(status: int) -> str:
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"


def _retry_headers(kind: type[Any]) -> tuple[tuple[str, str], ...]:
    if kind not in _RETRY_AFTER:
        return ()
    seconds, should_retry = _RETRY_AFTER[kind]
    advice = ("x-should-retry", str(should_retry).lower())
    return (advice,) if seconds is None else (("Retry-After", str(seconds)), advice)
