"""Bodies of dialects whose clients send new fields with every release.

What is unknown is dropped and named: in a header of the answer, and once in the log.
"""

import logging
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from .body_schema import StrictBody, read_body
from .dialects import IGNORED_HEADER, ignored_value

_LOG: Final = logging.getLogger(__name__)
_MOST_NAMES: Final = 64
_told: set[str] = set()
"""What the log has named already, in this process; bounded, as clients choose the names."""
_MOST_TOLD: Final = 512


class TolerantBody(StrictBody):
    """As strict about what it knows; unknown fields stay in `model_extra`."""

    model_config = ConfigDict(extra="allow")


Body = TypeVar("Body", bound=TolerantBody)


async def read_tolerant(request: Request, schema: type[Body]) -> tuple[Body, list[str]]:
    """The body and the names of what it has beyond the schema. Raises InvalidRequest."""
    body = await read_body(request, schema)
    return body, list(dict.fromkeys(unknown_fields(body)))[:_MOST_NAMES]


def unknown_fields(value: object, at: str = "") -> list[str]:
    """`messages[].x` of a field that no schema has."""
    match value:
        case BaseModel():
            names = [f"{at}{name}"[:100] for name in value.model_extra or {}]
            for name in type(value).model_fields:
                names += unknown_fields(getattr(value, name), f"{at}{name}.")
            return names
        case list() | tuple():
            below = f"{at.removesuffix('.')}[]."
            return [
                name for item in cast(list[object], value) for name in unknown_fields(item, below)
            ]
        case _:
            return []


def told_of(ignored: list[str], path: str) -> dict[str, str]:
    """The header that names them; the log does, once for each."""
    new = [name for name in ignored if f"{path} {name}" not in _told]
    if new and len(_told) < _MOST_TOLD:
        _told.update(f"{path} {name}" for name in new)
        _LOG.info("%s: no use for the fields %s of a request", path, ignored_value(new))
    return {IGNORED_HEADER: ignored_value(ignored)} if ignored else {}


def text_or(value: Any, otherwise: str = "") -> str:
    return value if isinstance(value, str) else otherwise
