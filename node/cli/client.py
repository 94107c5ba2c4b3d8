"""The local node's HTTP API for the commands: find the node, call it, read its event streams."""

import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from ...placement.errors import InvalidSettings
from ..machine.data_dir_lock import find_running, reachable
from ..trust.local_token import TOKEN_HEADER, read_token
from .failures import EXIT_FAILED, CommandFailed
from .times import TIMES

if TYPE_CHECKING:
    import httpx2

EXIT_NO_NODE: Final = 69
EXIT_TEMPORARY: Final = 75

_TEMPORARY: Final = frozenset({429, 503})
_TEMPORARY_CODES: Final = frozenset({"queue_full", "peer_lost", "load_failed"})
_LASTING_CODES: Final = frozenset({"insufficient_memory"})  # 503, and waiting does not help


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    """The node's API, by the host that it is bound to, with the key and the token to send there."""

    host: str
    port: int
    api_key: str | None = None
    token: str | None = None

    def __str__(self) -> str:
        return reachable(self.host, self.port)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How a command finds the running node; with `port` None by the run file."""

    data_dir: Path
    host: str = "127.0.0.1"
    port: int | None = None
    api_key: str | None = field(default=None, repr=False)


def client_settings(
    port: str | None, data_dir: str | None, environ: Mapping[str, str] | None = None
) -> ClientSettings:
    """The settings of a command by its flags; --data-dir names a node, so it wins over EXO_PORT.

    They are read apart from the others, so that commands start at once. Raises InvalidSettings.
    """
    from ..machine import setting_sources as sources
    from ..machine.setting_values import as_host, as_path, as_port, as_secret

    readers = {"host": as_host, "port": as_port, "data_dir": as_path, "api_key": as_secret}
    flags = {"port": port, "data_dir": data_dir}
    inputs = sources.collect(readers, flags, sources.environment() if environ is None else environ)
    if data_dir is not None and port is None:
        _ = inputs.values.pop("port", None)
    values: dict[str, Any] = {"data_dir": sources.default_data_dir()}
    for name, value in inputs.values.items():
        origin = inputs.origins[name]
        try:
            values[name] = readers[name](value)
        except ValueError as error:
            raise InvalidSettings(f"{origin}: {error}", param=origin) from None
    values["port"] = values.get("port") or None  # 0 names no port
    return ClientSettings(**values)


@dataclass(frozen=True, slots=True)
class Comment:
    """An SSE comment, which the node sends as progress: `prefill 512/4096`."""

    text: str


def connect(port: str | None, data_dir: str | None) -> ApiEndpoint:
    """The node that the flags --port and --data-dir name. Raises what `locate` raises."""
    return locate(client_settings(port, data_dir))


def locate(settings: ClientSettings) -> ApiEndpoint:
    """The node at the given port, else the one that holds the data folder.

    Raises CommandFailed (exit 69) when none runs there, (exit 75) while it is still starting.
    """
    token = read_token(settings.data_dir)
    if settings.port is not None:
        return ApiEndpoint(settings.host, settings.port, settings.api_key, token)
    running = find_running(settings.data_dir)
    if running is None:
        raise no_node(f"no node runs with the data folder {settings.data_dir}")
    if running.http_host is None or running.http_port is None:
        raise CommandFailed(
            f"the node (pid {running.pid}) is still starting",
            exit_code=EXIT_TEMPORARY,
            code="node_starting",
            remedy="try again in a moment",
        )
    return ApiEndpoint(running.http_host, running.http_port, settings.api_key, token)


def find_node(settings: ClientSettings) -> ApiEndpoint | None:
    """The node that `locate` finds, None where none runs. Raises for one that starts."""
    try:
        return locate(settings)
    except CommandFailed as error:
        if error.exit_code != EXIT_NO_NODE:
            raise
        return None


def no_node(what: str) -> CommandFailed:
    """The error of every command that needs a running node."""
    remedy = "start one with `exo-node start`"
    return CommandFailed(what, exit_code=EXIT_NO_NODE, code="no_node", remedy=remedy)


def call(
    endpoint: ApiEndpoint,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    timeout_s: float | None = TIMES.reply_s,
) -> dict[str, Any]:
    """GET `path`, or POST `body` to it; the JSON object of the response. Raises CommandFailed."""
    with _response(endpoint, path, body, timeout_s) as response:
        return _as_object(response.read(), endpoint)


def delete(endpoint: ApiEndpoint, path: str) -> None:
    """DELETE `path`. No time limit: the node may let running answers end first."""
    with _response(endpoint, path, None, None, "DELETE") as response:
        _ = response.read()


def stream(
    endpoint: ApiEndpoint, path: str, body: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any] | Comment]:
    """POST `body` and yield the stream's objects and comments up to `[DONE]`; GET all without it.

    No time limit: a model may load for minutes, and loopback reports a dead node at once.
    Raises CommandFailed for an error event, and for the end of a POST without `[DONE]`.
    """
    with _response(endpoint, path, body, None) as response:
        for event in parse_sse(response.iter_text()):
            if event == "[DONE]":
                return
            yield event if isinstance(event, Comment) else _as_event(event, endpoint)
    if body is not None:
        raise CommandFailed("the node ended the connection before the answer was complete")


def parse_sse(chunks: Iterable[str]) -> Iterator[Comment | str]:
    """The comments of a `text/event-stream`, and the data of its events, lines joined.

    `httpx2.EventSource` drops comments, which carry the progress of an answer, and its `iter_lines`
    also splits at characters that end no line of a stream, such as U+2028.
    """
    data: list[str] = []
    for line in _lines(chunks):
        if not line:
            if data:
                yield "\n".join(data)
            data.clear()
        elif line.startswith(":"):
            yield Comment(line[1:].strip())
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))


def _lines(chunks: Iterable[str]) -> Iterator[str]:
    rest = ""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split("\n")
        yield from (line.rstrip("\r") for line in lines)


@contextmanager
def _response(
    endpoint: ApiEndpoint,
    path: str,
    body: Mapping[str, Any] | None,
    timeout_s: float | None,
    method: str = "",
) -> "Generator[httpx2.Response]":
    """The response, its body not read yet; `timeout_s` limits each read. Raises CommandFailed."""
    import httpx2

    client = httpx2.Client(
        base_url=f"http://{endpoint}",
        headers=headers_of(endpoint),
        timeout=httpx2.Timeout(timeout_s, connect=TIMES.connect_s),
        trust_env=False,  # a proxy does not lead to this machine
        verify=False,  # plain HTTP; loading certificates takes longer than most calls
    )
    method = method or ("GET" if body is None else "POST")
    content = None if body is None else json.dumps(body).encode()
    try:
        with client, client.stream(method, path, content=content) as response:
            if response.status_code >= 400:
                raise _failure_of(response, endpoint)
            yield response
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise no_node(f"no node answers at {endpoint}") from error
    except httpx2.TimeoutException as error:
        raise CommandFailed(f"the node at {endpoint} did not answer in time") from error
    except httpx2.HTTPError as error:
        raise CommandFailed(
            f"the node at {endpoint} ended the connection before it had answered",
            remedy="it may be restarting: `exo-node status` shows when it is back",
        ) from error


def headers_of(endpoint: ApiEndpoint) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    if endpoint.api_key is not None:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    if endpoint.token is not None:
        headers[TOKEN_HEADER] = endpoint.token
    return headers


def _as_event(text: str, endpoint: ApiEndpoint) -> dict[str, Any]:
    data = _as_object(text, endpoint)
    if "error" in data:
        raise _failure(data, None, None)
    return data


def _as_object(text: str | bytes, endpoint: ApiEndpoint) -> dict[str, Any]:
    if (value := _parse_object(text)) is None:
        raise CommandFailed(f"the server at {endpoint} does not answer like an exo-node")
    return value


def _parse_object(text: str | bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def _failure_of(response: "httpx2.Response", endpoint: ApiEndpoint) -> CommandFailed:
    body = _parse_object(response.read())
    if body is None or "error" not in body:
        status = f"{response.status_code} {response.reason_phrase}"
        return CommandFailed(f"the server at {endpoint} answered {status}")
    return _failure(body, response.status_code, response.headers.get("Retry-After"))


def _failure(body: Mapping[str, Any], status: int | None, retry_after: str | None) -> CommandFailed:
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
    return CommandFailed(
        message,
        exit_code=EXIT_TEMPORARY if temporary else EXIT_FAILED,
        code=code if isinstance(code, str) else "call_failed",
        remedy=remedy,
    )
