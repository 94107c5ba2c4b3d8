"""Request bodies against strict pydantic models, with faults in the words of the API."""

import asyncio
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.requests import Request

from ...placement.errors import InvalidRequest, UnsupportedParameter
from .strict_json import brief, decode

# Parsing 8 MiB takes tenths of a second: longer bodies are read beside the event loop, and not in
# the threads that the rest of the node has.
_INLINE_BYTES: Final = 64 * 1024
_READERS: Final = ThreadPoolExecutor(2, thread_name_prefix="bodies")
MAX_PARTS: Final = 1024
"""Parts of one message's content."""
MAX_ALL_PARTS: Final = 4096
"""Parts of all messages of a body."""
_SUBJECT: Final = re.compile(r"^(Input|String|List) ")


class StrictBody(BaseModel):
    """Base of every body: no coercion, no unknown field, no NaN."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted and change nothing."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that are dropped and named."""

    @classmethod
    def refused_fields(cls) -> Mapping[str, tuple[Any, ...]]:
        """Fields that are refused unless they have one of these values, or null."""
        return {}

    @classmethod
    def known_fields(cls) -> list[str]:
        """Every name that is not refused as unknown."""
        return list(cls.model_fields)


Body = TypeVar("Body", bound=StrictBody)
Value = TypeVar("Value")


async def read_with(request: Request, read: Callable[[bytes], Value]) -> Value:
    """What `read` makes of the request's body, beside the event loop if that takes long."""
    raw = await request.body()
    if len(raw) <= _INLINE_BYTES:
        return read(raw)
    return await asyncio.get_running_loop().run_in_executor(_READERS, read, raw)


async def read_body(request: Request, schema: type[Body]) -> Body:
    """The request's body. Raises InvalidRequest naming the field at fault."""
    return await read_with(request, lambda raw: parse_body(raw, schema))


def check_parts(sizes: Iterable[int], at: str) -> None:
    """Raises for more than MAX_ALL_PARTS in all; `at` is the field that has the messages."""
    if sum(sizes) > MAX_ALL_PARTS:
        raise PydanticCustomError(
            "too_many_parts",
            "should have at most {most} parts in all messages",
            {"most": MAX_ALL_PARTS, "at": at},
        )


def parse_body(raw: bytes, schema: type[Body]) -> Body:
    """`raw` as an instance of `schema`. Raises InvalidRequest naming the first field at fault."""
    value = decode(raw)
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", param="body")
    return validated(value, schema)


def validated(value: object, schema: type[Body]) -> Body:
    """Raises InvalidRequest naming the first field at fault."""
    try:
        return schema.model_validate(value)
    except ValidationError as fault:
        raise _as_request_error(_first(fault), schema) from None


def _first(fault: ValidationError) -> ErrorDetails:
    """The likeliest cause: a misspelt name, or a list that is too long where a text may stand."""
    details = fault.errors(include_url=False, include_input=False)
    for cause in ("extra_forbidden", "too_long"):
        for each in details:
            if each["type"] == cause:
                return each
    return details[0]


def _as_request_error(detail: ErrorDetails, schema: type[StrictBody]) -> InvalidRequest:
    context: dict[str, Any] = detail.get("ctx", {})
    param = path_of(detail["loc"]) + context.get("at", "") or "body"
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_field(detail["loc"], param, schema)
        case "unsupported_parameter":
            return UnsupportedParameter(f"'{param}' {detail['msg']}", param=param)
        case "missing":
            return InvalidRequest(f"'{param}' is required", param=param)
        case "model_type" | "dict_type":
            return InvalidRequest(f"'{param}' should be an object", param=param)
        case _:
            # pydantic's sentences begin with "Input should be …", "String should have …".
            sentence = _SUBJECT.sub("", detail["msg"])
            return InvalidRequest(f"'{param}' {sentence}", param=param)


def _unknown_field(
    location: tuple[int | str, ...], param: str, schema: type[StrictBody]
) -> InvalidRequest:
    message = f"this node does not know the field '{param}'"
    if len(location) == 1:
        near = difflib.get_close_matches(param, schema.known_fields(), 1)
        message += f"; the nearest that it knows is '{near[0]}'" if near else ""
    return UnsupportedParameter(message, param=param)


def path_of(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` of ("messages", 0, "content"), without pydantic's names of types."""
    path = ""
    for step in location:
        if isinstance(step, str) and step.startswith("list["):
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{brief(step)}"
    return path.lstrip(".")
