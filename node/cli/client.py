"""The commands' side of the local node's HTTP API: find it, ask it, read its event stream."""

import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from ...placement.errors import ExoNodeError
from ..machine.data_dir_lock import find_running
from ..machine.log import escape_controls
from ..trust.local_token import TOKEN_HEADER, read_token

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from ..machine.settings import ClientSettings

EXIT_FAILED: Final = 1
EXIT_NO_NODE: Final = 69
EXIT_TEMPORARY: Final = 75

_CONNECT_TIMEOUT_S: Final = 5.0
_READ_TIMEOUT_S: Final = 10.0
_TEMPORARY: Final = frozenset({429, 503})
_TEMPORARY_CODES: Final = frozenset({"queue_full", "peer_lost", "load_failed"})
_LASTING_CODES: Final = frozenset({"insufficient_memory"})  # 503, and waiting does not help
# A server bound to every address answers on loopback.
_REACHABLE: Final[Mapping[str, str]] = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class CallFailed(ExoNodeError):
    """The node was not reached or answered with an error; `exit_code` is the command's."""

    def __init__(
        self,
        what: str,
        *,
        exit_code: int = EXIT_FAILED,
        code: str = "call_failed",
        remedy: str | None = None,
    ) -> None:
        """`what` becomes one line: what another process said cannot draw on the terminal."""
        self.what = escape_controls(" ".join(what.split()))
        super().__init__(self.what if remedy is None else f"{self.what}; {remedy}")
        self.exit_code = exit_code
        self.code = code
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the node's API answers, and the key and token to show there."""

    host: str
    port: int
    api_key: str | None = None
    token: str | None = None

    def __str__(self) -> str:
        """`host:port`, brackets around IPv6."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Comment:
    """An SSE comment, which the node sends as progress: `prefill 512/4096`."""

    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """The data of one SSE event, lines joined."""

    data: str


def locate(settings: "ClientSettings") -> Endpoint:
    """The node at the given port, else the one that holds the data folder.

    Raises CallFailed (exit 69) when none runs there, (exit 75) while it is still starting.
    """
    key = settings.api_key.get_secret_value() if settings.api_key else None
    token = read_token(settings.data_dir)
    if settings.port is not None:
        return Endpoint(_REACHABLE.get(settings.host, settings.host), settings.port, key, token)
    running = find_running(settings.data_dir)
    if running is None:
        raise no_node(f"no node runs with the data folder {settings.data_dir}")
    if running.http_host is None or running.http_port is None:
        raise CallFailed(
            f"the node (pid {running.pid}) is still starting",
            exit_code=EXIT_TEMPORARY,
            code="node_starting",
            remedy="try again in a moment",
        )
    host = _REACHABLE.get(running.http_host, running.http_host)
    return Endpoint(host, running.http_port, key, token)


def no_node(what: str) -> CallFailed:
    """The error of every command that needs a running node."""
    remedy = "start one with `exo-node start`"
    return CallFailed(what, exit_code=EXIT_NO_NODE, code="no_node", remedy=remedy)


def call(
    endpoint: Endpoint,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    timeout_s: float | None = _READ_TIMEOUT_S,
) -> dict[str, Any]:
    """GET `path`, or POST `body` to it; the JSON object that came back. Raises CallFailed."""
    with _answer(endpoint, path, body, timeout_s) as answer:
        return _as_object(answer.read(), endpoint)


def delete(endpoint: Endpoint, path: str, *, timeout_s: float | None = None) -> None:
    """DELETE `path`; without a limit by default, as running answers are waited for."""
    with _answer(endpoint, path, None, timeout_s, "DELETE") as answer:
        _ = answer.read()


def read_text(endpoint: Endpoint, path: str) -> str:
    """GET `path`; the text that came back. Raises CallFailed."""
    with _answer(endpoint, path, None, _READ_TIMEOUT_S) as answer:
        return answer.read().decode(errors="replace")


def stream(
    endpoint: Endpoint, path: str, body: Mapping[str, Any]
) -> Iterator[dict[str, Any] | Comment]:
    """POST `body` and yield the stream's objects and comments up to `[DONE]`.

    No time limit: a model may load for minutes, and loopback reports a dead node at once.
    Raises CallFailed for an error event and for an end without `[DONE]`.
    """
    with _answer(endpoint, path, body, None) as answer:
        for event in parse_sse(answer):
            if isinstance(event, Comment):
                yield event
                continue
            if event.data == "[DONE]":
                return
            data = _as_object(event.data, endpoint)
            if "error" in data:
                raise _failure(data, None, None)
            yield data
    raise CallFailed("the node ended the connection before the answer was complete")


def follow(endpoint: Endpoint, path: str) -> Iterator[Message | Comment]:
    """GET `path` and yield its events until the node ends the stream; no time limit.

    Raises CallFailed, also for an error event.
    """
    with _answer(endpoint, path, None, None) as answer:
        for event in parse_sse(answer):
            if isinstance(event, Message) and "error" in (body := _as_object(event.data, endpoint)):
                raise _failure(body, None, None)
            yield event


def parse_sse(lines: Iterable[bytes]) -> Iterator[Comment | Message]:
    """The events of a `text/event-stream`; fields other than data are not used by this API."""
    data: list[str] = []
    for raw in lines:
        line = raw.decode(errors="replace").rstrip("\r\n")
        if not line:
            if data:
                yield Message("\n".join(data))
            data.clear()
        elif line.startswith(":"):
            yield Comment(line[1:].strip())
        else:
            field, _, value = line.partition(":")
            if field == "data":
                data.append(value.removeprefix(" "))


@contextmanager
def _answer(
    endpoint: Endpoint,
    path: str,
    body: Mapping[str, Any] | None,
    timeout_s: float | None,
    method: str = "",
) -> Generator["HTTPResponse"]:
    from http.client import HTTPConnection, HTTPException

    connection = HTTPConnection(endpoint.host, endpoint.port, timeout=_CONNECT_TIMEOUT_S)
    try:
        try:
            connection.connect()
        except OSError as error:
            raise no_node(f"no node answers at {endpoint}") from error
        connection.sock.settimeout(timeout_s)
        method = method or ("GET" if body is None else "POST")
        content = None if body is None else json.dumps(body).encode()
        connection.request(method, path, content, _headers(endpoint))
        answer = connection.getresponse()
        if answer.status >= 400:
            raise _failure_of(answer, endpoint)
        yield answer
    except TimeoutError as error:
        raise CallFailed(f"the node at {endpoint} did not answer in time") from error
    except (OSError, HTTPException) as error:
        raise CallFailed(f"the node at {endpoint} ended the connection: {error!r}") from error
    finally:
        connection.close()


def _headers(endpoint: Endpoint) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    if endpoint.api_key is not None:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    if endpoint.token is not None:
        headers[TOKEN_HEADER] = endpoint.token
    return headers


def _as_object(text: str | bytes, endpoint: Endpoint) -> dict[str, Any]:
    if (value := _parse_object(text)) is None:
        raise CallFailed(f"the server at {endpoint} does not answer like an exo-node")
    return value


def _parse_object(text: str | bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def _failure_of(answer: "HTTPResponse", endpoint: Endpoint) -> CallFailed:
    body = _parse_object(answer.read())
    if body is None or "error" not in body:
        return CallFailed(f"the server at {endpoint} answered {answer.status} {answer.reason}")
    return _failure(body, answer.status, answer.getheader("Retry-After"))


def _failure(body: Mapping[str, Any], status: int | None, retry_after: str | None) -> CallFailed:
    """The API's error object as an exception; `status` is None for an error within a stream."""
    match body["error"]:
        case {"message": str(message), **rest}:
            code = rest.get("code")
        case other:
            message, code = str(other), None
    temporary = status in _TEMPORARY if status is not None else code in _TEMPORARY_CODES
    temporary = temporary and code not in _LASTING_CODES
    remedy = None
    if status == 401:
        remedy = "set EXO_API_KEY to the node's key, or to a token of it"
    elif temporary and retry_after and retry_after.isdecimal():
        remedy = f"try again in {retry_after} s"
    return CallFailed(
        message,
        exit_code=EXIT_TEMPORARY if temporary else EXIT_FAILED,
        code=code if isinstance(code, str) else "call_failed",
        remedy=remedy,
    )
