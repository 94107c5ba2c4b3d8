"""The flags of a bench as values. Raises InvalidSettings with the flag and the remedy."""

import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

from exo_node.placement.errors import InvalidSettings

from ..prompts import bundled_prompts, read_prompts
from .workloads import AGENT, QUESTIONS, Role

_MOST_CLIENTS: Final = 1024
_MOST_TOKENS: Final = 1 << 20
_NAME: Final = re.compile(r"[\w.-]{1,40}")
_FIELD: Final = re.compile(r"[A-Za-z_]\w{0,60}", re.ASCII)
_OWN_FIELDS: Final = frozenset({"model", "messages", "max_tokens", "stream", "stream_options"})


def parse_servers(texts: Sequence[str]) -> dict[str, str]:
    """The address of each NAME=URL, without the `/v1` at its end."""
    servers: dict[str, str] = {}
    for text in texts:
        name, mark, url = text.partition("=")
        if not (mark and _NAME.fullmatch(name)):
            raise fault("--server", f"{text!r} is not NAME=URL, with a short name of letters")
        if name in servers:
            raise fault("--server", f"two servers are named {name!r}; give each its own name")
        if is_host_name(name):
            raise fault(
                "--server",
                f"{name!r} is this machine's name, and the page shows it; give another name",
            )
        servers[name] = _address(text, url)
    return servers


def is_host_name(name: str) -> bool:
    """Whether a server's name would show this machine's name to readers of the page."""
    return name.casefold() in {
        part.casefold() for host in [socket.gethostname()] for part in (host, host.split(".")[0])
    }


def _address(text: str, url: str) -> str:
    wrong = f"{text!r}: {url!r} is no http address; write NAME=http://127.0.0.1:52415"
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError where it is none
    except ValueError:
        raise fault("--server", wrong) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable():
        raise fault("--server", wrong)
    if parts.username or parts.password or parts.query or parts.fragment or " " in url:
        raise fault("--server", f"{wrong}, without user, query or spaces; keys go into --key")
    return url.rstrip("/").removesuffix("/v1")


def parse_pairs(flag: str, texts: Sequence[str], servers: Sequence[str]) -> dict[str, str]:
    """The value of each NAME=VALUE; with one server VALUE alone will do."""
    values: dict[str, str] = {}
    for text in texts:
        name, mark, value = text.partition("=")
        if name not in servers or not mark:
            if len(servers) > 1 or (mark and flag == "--key"):
                names = ", ".join(servers)
                raise fault(flag, f"{text!r} is not NAME=VALUE with NAME one of {names}")
            name, value = servers[0], text
        if not value or not value.isprintable():
            raise fault(flag, f"{text!r} has no value")
        if name in values:
            raise fault(flag, f"{name!r} has two values; give one")
        values[name] = value
    return values


def parse_numbers(flag: str, text: str) -> tuple[int, ...]:
    """Numbers of clients with commas between them, each once."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if _is_number(part)]
    if len(numbers) < len(parts) or not all(1 <= each <= _MOST_CLIENTS for each in numbers):
        what = f"{text!r}; write whole numbers from 1 to {_MOST_CLIENTS}, such as 1,4,16"
        raise fault(flag, what)
    return tuple(sorted(set(numbers)))


def parse_workloads(text: str) -> tuple[str, ...]:
    """`questions`, `agent`, and numbers of tokens, each once."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part in (AGENT, QUESTIONS) or (_is_number(part) and 1 <= int(part) <= _MOST_TOKENS):
            continue
        allowed = f"{QUESTIONS}, {AGENT} and numbers of tokens up to {_MOST_TOKENS}"
        raise fault("--workloads", f"{part!r} is none; write {allowed}, with commas between them")
    return tuple(dict.fromkeys(str(int(part)) if _is_number(part) else part for part in parts))


def parse_role(text: str) -> Role:
    """The role of a tool's result."""
    if text not in ("tool", "user"):
        raise fault("--tool-role", f"{text!r}; write tool or user")
    return text


def read_questions(file: str | None) -> tuple[str, ...]:
    """The prompts of a file, or the bundled ones."""
    prompts = bundled_prompts() if file is None else read_prompts(Path(file).expanduser())
    return tuple(prompt.text for prompt in prompts)


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object, whose fields go into every request."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise fault("--extra-body", f"it is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise fault("--extra-body", 'it is no JSON object; write such as {"ignore_eos": true}')
    body = cast(dict[str, Any], value)
    for name in body:
        if name in _OWN_FIELDS or not _FIELD.fullmatch(name):
            raise fault("--extra-body", f"{name!r} may not be set here; leave it out")
    return body


def fault(flag: str, what: str) -> InvalidSettings:
    return InvalidSettings(f"{flag}: {what}", param=flag)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 8
