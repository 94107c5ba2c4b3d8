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
)

_Kind = tuple[int, bool | None, int | None]
KINDS: Mapping[type[ExoNodeError], _Kind] = {
    InvalidRequest: (400, None, None),
    DigitsDiffer: (400, None, None),
    ModelNotFound: (404, None, None),
    PlacementNotFound: (404, None, None),
    JoinRequestNotFound: (404, None, None),
    JoinRefused: (409, False, 5),
    RemovalRefused: (409, None, None),
    PlacementSuperseded: (409, False, None),
    QueueFull: (429, True, 1),
    InsufficientMemory: (503, False, None),
    PeerLost: (503, True, 2),
    LoadFailed: (503, False, 30),
    InvalidCheckpoint: (503, False, None),
    InvalidCard: (503, False, None),
    DownloadFailed: (503, False, 30),
}
"""The status; whether a client should retry by itself, None where all clients know (the openai
package does from 500 up, unless the header says no); the seconds after which the same request may
succeed, None where waiting does not help."""


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
    known = (KINDS[kind] for kind in type(error).__mro__ if kind in KINDS)
    status, should_retry, seconds = next(known, (500, False, None))
    headers = () if seconds is None else (("Retry-After", str(seconds)),)
    if should_retry is not None:
        headers += (("x-should-retry", str(should_retry).lower()),)
    return HttpFault(status, error.code, error.message, error.param, headers)


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
