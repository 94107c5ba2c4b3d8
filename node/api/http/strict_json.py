"""JSON as the HTTP API reads and writes it: UTF-8, one value per name, 64-bit finite numbers."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

from pydantic import JsonValue

from ....placement.errors import InvalidRequest
from ...machine.json_size import MAX_CONTAINERS, MAX_ELEMENTS, Room, fits

MAX_FIELDS: Final = 1024
"""The limit of fields in one object: validation reports on each of them."""
# 2^64 - 1 has 20 digits. Python itself refuses to convert integers of more than 4300.
_MAX_DIGITS: Final = 20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def encode(value: Any) -> bytes:
    """Compact UTF-8; an iterator becomes a list. A lone surrogate is written as its escape;
    ValueError for NaN and infinity."""
    text = json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_listed
    )
    return text.encode("utf-8", "backslashreplace")


def encode_in_parts(value: object) -> Iterator[bytes]:
    """The pieces of what `encode` gives: of objects each field, of lists of objects each item, of
    iterators each item as a whole. So a thread that draws them lets the event loop run in between.
    """
    opening = b""
    if isinstance(value, dict):
        for name, inner in cast("dict[object, object]", value).items():
            yield (opening or b"{") + encode(str(name)) + b":"
            yield from encode_in_parts(inner)
            opening = b","
        yield b"}" if opening else b"{}"
    elif isinstance(value, Iterator) or _has_objects(value):
        inner_parts = _whole if isinstance(value, Iterator) else encode_in_parts
        for item in cast("Iterable[object]", value):
            yield opening or b"["
            yield from inner_parts(item)
            opening = b","
        yield b"]" if opening else b"[]"
    else:
        yield encode(value)


def _whole(value: object) -> tuple[bytes]:
    return (encode(value),)


def _has_objects(value: object) -> bool:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return bool(items) and isinstance(items[0], dict)


def _listed(value: object) -> list[object]:
    if isinstance(value, Iterator):
        return [*cast("Iterator[object]", value)]
    raise TypeError(f"{type(value).__name__} is no JSON")


def decode(body: bytes, room: Room | None = None) -> JsonValue:
    """The value of `body`. `room`: of several texts of one request, or None if it is the only one.

    Raises InvalidRequest for malformed UTF-8 or JSON, too many elements, duplicate names, lone
    surrogates, NaN, infinity and numbers beyond 64 bits; `param` is the path of the fault if it has
    one.
    """
    if not fits(body, room):
        raise InvalidRequest(
            f"the body has more than {MAX_CONTAINERS} lists and objects, or {MAX_ELEMENTS} "
            "elements; send less in one request",
            param="body",
        )
    try:
        text = body.decode()
    except UnicodeDecodeError as fault:
        message = f"the body is not UTF-8 at byte {fault.start}; encode it as UTF-8"
        raise InvalidRequest(message, param="body") from None
    numbers = _Numbers()
    decoder = json.JSONDecoder(
        object_pairs_hook=_unique,
        parse_int=numbers.integer,
        parse_float=numbers.real,
        parse_constant=numbers.real,
    )
    try:
        value: JsonValue = decoder.decode(text)
    except RecursionError:
        message = "the body is nested too deeply; send the fields that the API documents"
        raise InvalidRequest(message, param="body") from None
    except json.JSONDecodeError as fault:
        message = f"the body is not JSON: {fault.msg} at character {fault.pos}"
        raise InvalidRequest(message, param="body") from None
    if numbers.out_of_range or _SURROGATE.search(text):
        _refuse_unusable(value)
    return value


class _Numbers:
    """Turns numbers out of range into infinity, so that a later search can name the field.

    It is not a subclass of the decoder: a decoder that refers to its own methods is a reference
    cycle, which every body would leave to the garbage collector.
    """

    def __init__(self) -> None:
        self.out_of_range = False

    def integer(self, digits: str) -> int | float:
        if len(digits) <= _MAX_DIGITS:
            return int(digits)
        self.out_of_range = True
        return math.inf

    def real(self, digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            self.out_of_range = True
        return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_FIELDS:
        message = f"an object has {len(pairs)} fields; no object of this API has that many"
        raise InvalidRequest(message, param=brief(pairs[0][0]))
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            message = f"field '{brief(name)}' is given twice; give it once"
            raise InvalidRequest(message, param=brief(name))
        names.add(name)
    raise AssertionError("a dict is shorter than its pairs only where a name repeats")


def brief(name: str) -> str:
    """A client's text, shortened for an error message."""
    return name if len(name) <= 64 else name[:63] + "…"


_Place = tuple["_Place | None", int | str]
"""The last step of a path and the place before it; as texts, paths take quadratic memory."""


def _refuse_unusable(value: JsonValue) -> None:
    """Refuses the first bad value; it does not recurse, because depth is not bounded."""
    open_values: list[tuple[_Place | None, JsonValue]] = [(None, value)]
    while open_values:
        place, current = open_values.pop()
        match current:
            case dict():
                for name, inner in current.items():
                    open_values.append(((place, name), inner))
                    _refuse_surrogate(place, name)
            case list():
                open_values.extend(((place, i), inner) for i, inner in enumerate(current))
            case str():
                _refuse_surrogate(place, current)
            case float() if not math.isfinite(current):
                path = _path(place)
                message = f"'{path}' is no finite number of at most 64 bits"
                raise InvalidRequest(message, param=path or "body")
            case _:
                pass


def _path(place: _Place | None) -> str:
    """A path such as `messages[0].content`, its last 256 characters at most."""
    path = ""
    while place is not None and len(path) < 256:
        place, step = place
        path = (f"[{step}]" if isinstance(step, int) else f".{brief(step)}") + path
    return path.lstrip(".")[-256:]


def _refuse_surrogate(place: _Place | None, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        path = _path(place)
        message = f"'{path}' has half of a surrogate pair at character {fault.start}"
        raise InvalidRequest(message, param=path or "body") from None
