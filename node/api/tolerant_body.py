"""Bodies of dialects whose clients send new fields with every release.

What is unknown is dropped and named: in a header of the answer, and once in the log.
"""

import logging
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from .body_schema import StrictBody, parse_body, read_with
from .dialects import IGNORED_HEADER, ignored_value

_LOG: Final = logging.getLogger(__name__)
_MOST_NAMES: Final = 64
_LONGEST_NAME: Final = 100
_told: set[str] = set()
"""What the log has named already, in this process; bounded, as clients choose the names."""
_MOST_TOLD: Final = 512


class TolerantBody(StrictBody):
    """As strict about what it knows; unknown fields stay in `model_extra`."""

    model_config = ConfigDict(extra="allow")


Body = TypeVar("Body", bound=TolerantBody)


def parse_tolerant(raw: bytes, schema: type[Body]) -> tuple[Body, list[str]]:
    """The body and the names of what it has beyond the schema. Raises InvalidRequest."""
    body = parse_body(raw, schema)
    return body, unknown_fields(body)


async def read_tolerant(request: Request, schema: type[Body]) -> tuple[Body, list[str]]:
    """As `parse_tolerant`, of the request's body."""
    return await read_with(request, lambda raw: parse_tolerant(raw, schema))


def unknown_fields(body: BaseModel) -> list[str]:
    """`messages[].x` of a field that no schema has, each once; the first few if there are many."""
    names: dict[str, None] = {}
    values: list[tuple[str, object]] = [("", body)]
    while values and len(names) < _MOST_NAMES:
        at, value = values.pop()
        match value:
            case BaseModel():
                for name in value.model_extra or ():
                    names[f"{at}{name}"[:_LONGEST_NAME]] = None
                fields = reversed(type(value).model_fields)
                values += [(f"{at}{name}.", getattr(value, name)) for name in fields]
            case list() | tuple():
                below = f"{at.removesuffix('.')}[]."
                items = cast(list[object], value)
                values += [(below, item) for item in reversed(items) if isinstance(item, BaseModel)]
            case _:
                pass
    return list(names)[:_MOST_NAMES]


def told_of(ignored: list[str], path: str) -> dict[str, str]:
    """The header that names them; the log does, once for each."""
    ignored = [name[:_LONGEST_NAME] for name in ignored[:_MOST_NAMES]]
    new = [name for name in ignored if f"{path} {name}" not in _told]
    if new and len(_told) < _MOST_TOLD:
        _told.update(f"{path} {name}" for name in new)
        _LOG.info("%s: no use for the fields %s of a request", path, ignored_value(new))
    return {IGNORED_HEADER: ignored_value(ignored)} if ignored else {}


def text_or(value: Any, otherwise: str = "") -> str:
    return value if isinstance(value, str) else otherwise
