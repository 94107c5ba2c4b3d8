"""Readers of settings: each turns the text of a flag or variable into a value.

Each reader raises ValueError with what is wrong and the remedy; its caller knows the origin.
"""

import ipaddress
import math
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, get_args

from ...placement.card import MAX_K
from ...placement.kv_bits import CHOICES as KV_CHOICES

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
MAX_SECONDS: Final = 86_400
_BYTES: Final = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)},
}
_LABEL: Final = "[A-Za-z0-9_-]{1,63}"
_HOST_NAME: Final = re.compile(rf"(?=[^-].{{0,252}}\Z){_LABEL}(\.{_LABEL})*\.?")
"""Labels of at most 63 characters: Python refuses to look up any other name."""
_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9_.\[\]:-]{1,253}")
_MIN_MEMORY: Final = 1_000_000
LONGEST: Final = 10 * 365 * 86_400.0
"""The longest duration in seconds; a longer one has no end."""
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(ms|s|m|h|d)")
_NUMBER: Final = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,9})?")
MAX_NAME_BYTES: Final = 63  # one DNS label, which is what mDNS announces


def as_name(value: str) -> str:
    """The name of a node: 1 to 63 printable bytes."""
    text = value.strip()
    if not text.isprintable() or not 0 < len(text.encode()) <= MAX_NAME_BYTES:
        raise ValueError(f"{value!r} is no name; give 1 to {MAX_NAME_BYTES} printable bytes")
    return text


def as_host(value: str) -> str:
    text = value.strip().removeprefix("[").removesuffix("]")
    if parse_address(text) is None and not _HOST_NAME.fullmatch(text):
        raise ValueError(f"{value!r} is no address; give an IP address such as 127.0.0.1")
    return text


def parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that `text` is, or None."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def as_interface(value: str) -> str:
    text = value.strip()
    address = parse_address(text)
    if address is None or address.is_unspecified or address.is_multicast:
        raise ValueError(
            f"{value!r} is no interface's address; give one IP address of this machine, "
            "or leave it out for all private ones"
        )
    return text


def _whole(value: str | int, least: int, most: int, refusal: str) -> int:
    """A whole number within bounds. Raises ValueError that begins with the value."""
    text = str(value).strip()
    if not re.fullmatch(r"[0-9]{1,5}", text) or not least <= int(text) <= most:
        raise ValueError(f"{value!r} {refusal}")
    return int(text)


def as_port(value: str | int) -> int:
    return _whole(value, 0, 65535, "is no port; give 1 to 65535, or 0 for a free one")


def _peer(text: str) -> str:
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host == f"[{bare}]"
    valid = bool(colon) and re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) <= 65535
    if ":" in bare:  # IPv6 needs its brackets, or its last group would be taken for a port
        valid = valid and bracketed and parse_address(bare) is not None
    else:
        valid = valid and not bracketed and _HOST_NAME.fullmatch(bare)
    if not valid:
        raise ValueError(f"{text!r} is no peer; give HOST:PORT, such as 192.168.1.20:52416")
    return f"{host}:{int(port)}"


def as_peers(value: str | Collection[str]) -> tuple[str, ...]:
    """A comma separated variable, or the repeated flag (each of which may hold commas too)."""
    return _listed(value if isinstance(value, str) else ",".join(value), _peer)


def as_host_names(value: str) -> tuple[str, ...]:
    """Comma separated names under which clients may reach the node, each with a port or without."""
    return _listed(value, _host_name)


def _host_name(text: str) -> str:
    host, colon, port = text.rpartition(":")
    name = host if colon and re.fullmatch(r"[0-9]{1,5}", port) else text
    literal = parse_address(name.removeprefix("[").removesuffix("]"))
    if not _HOST_NAME.fullmatch(name) and (literal is None or not name.startswith("[")):
        raise ValueError(
            f"{text!r} is no host name; give names such as host.docker.internal, with or without "
            "a port"
        )
    return text.lower()


def as_origins(value: str) -> tuple[str, ...]:
    """Comma separated origins of pages, as a browser sends them: scheme, host and port."""
    return _listed(value, _origin)


def _origin(text: str) -> str:
    if not _ORIGIN.fullmatch(text):
        raise ValueError(
            f"{text!r} is no origin; give each as a browser sends it, such as "
            "http://localhost:3000 or app://obsidian.md, without a path"
        )
    return text.lower()


def _listed(value: str, read: Callable[[str], str]) -> tuple[str, ...]:
    """The parts of a comma separated text, each once."""
    return tuple(dict.fromkeys(read(text) for part in value.split(",") if (text := part.strip())))


def as_path(value: str | Path) -> Path:
    """An absolute path, `~` expanded (a service file has no shell to do it)."""
    if not str(value):
        raise ValueError("the path is empty; give one, or leave it out for the default")
    return Path(value).expanduser().absolute()


def as_folder(value: str | Path) -> Path:
    path = as_path(value)
    if not path.is_dir():
        raise ValueError(f"{str(path)!r} is no folder; create it or give another")
    return path


def as_folders(value: str | Collection[str | Path]) -> tuple[Path, ...]:
    """Folders that exist: a variable like PATH, or the repeated flag."""
    parts = value.split(os.pathsep) if isinstance(value, str) else value
    return tuple(dict.fromkeys(as_folder(part) for part in parts if str(part)))


def as_file(value: str | Path) -> Path:
    path = as_path(value)
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is no file; create it or give another")
    return path


def as_draft_tokens(value: str | int) -> int:
    refusal = (
        f"is no number of drafts; give 1 to {MAX_K} drafts a round, or set "
        "EXO_NATIVE_MTP_ENABLED=0 for none"
    )
    return _whole(value, 1, MAX_K, refusal)


def as_kv_bits(value: str | int) -> int:
    """4 or 8; 0, no and off are 0."""
    text = str(value).strip().lower()
    if text in _FALSE:
        return 0
    if text not in {str(bits) for bits in KV_CHOICES}:
        raise ValueError(f"{value!r} is no number of bits; give 4 or 8, or 0 for whole caches")
    return int(text)


def as_seconds(value: str | int) -> int:
    return _whole(value, 1, MAX_SECONDS, f"is no time; give seconds, 1 to {MAX_SECONDS}")


def duration_s(value: str | int | float) -> float:
    """Seconds of 300, "300", "5m" or "1h30m"; infinity for a negative one or beyond ten years.

    Raises ValueError with the remedy.
    """
    text = str(value).strip().lower()
    if text in ("never", "forever"):
        return math.inf
    if _NUMBER.fullmatch(text):
        return _bounded(float(text))
    sign, parts = text.startswith("-"), text.removeprefix("-")
    if not parts or _PART.sub("", parts):
        raise ValueError(
            f"{str(value)[:40]!r} is no duration; give seconds, a duration such as 5m or 1h30m, "
            "0, or -1 for ever"
        )
    total = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(parts))
    return math.inf if sign else _bounded(total)


def _bounded(seconds: float) -> float:
    return seconds if 0 <= seconds <= LONGEST else math.inf


def as_switch(value: str | bool) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise ValueError(f"{value!r} is neither on nor off; give 1 or 0")
    return text in _TRUE


def as_memory(value: str | int) -> int:
    """Bytes from 12884901888, 12GB (decimal) or 12GiB (binary)."""
    size = _as_bytes(value)
    if size < _MIN_MEMORY:
        raise ValueError(f"{value!r} is {size} bytes, too little for any model; give e.g. 12GB")
    return size


def as_gigabytes(value: str | float) -> float:
    """A number of GB; 0 is none."""
    text = str(value).strip()
    if not re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", text):
        raise ValueError(f"{value!r} is no number of GB; give one such as 20 or 0.5, or 0 for none")
    return float(text)


def _as_bytes(value: str | int) -> int:
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)", str(value).strip())
    unit = _BYTES.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{value!r} is no size; give bytes, or a size such as 12GB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def as_choice(literal: object) -> Callable[[str], str]:
    """A reader of one of the values of a Literal, in any case."""
    choices: tuple[str, ...] = get_args(literal)

    def check(value: str) -> str:
        if (text := value.strip().lower()) not in choices:
            raise ValueError(f"{value!r} is no choice; give one of {', '.join(choices)}")
        return text

    return check


def as_secret(value: str) -> str:
    """A key, which must fit into a header line; the error does not show it."""
    text = value.strip()
    if not text.isascii() or not text.isprintable() or " " in text or not text:
        raise ValueError("is no key; give printable ASCII characters without spaces")
    return text


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    address = parse_address(host)
    return host == "localhost" if address is None else address.is_loopback
