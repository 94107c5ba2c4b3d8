"""Request bodies as strict pydantic models, and errors that name the field at fault.

Dialects whose clients send new fields with every release have tolerant bodies: unknown fields are
dropped and named, in a header of the answer and once in the log.
"""

import difflib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.requests import Request

from ....placement.errors import InvalidRequest, UnsupportedParameter
from ...machine.setting_values import duration_s
from .long_bodies import INLINE_BYTES, off_the_loop
from .strict_json import brief, decode

_LOG: Final = logging.getLogger(__name__)

MAX_HISTORY: Final = 1 << 15
"""The limit of messages, parts, calls and other objects of the past in one body."""
IGNORED_HEADER: Final = "x-exo-node-ignored"
_MAX_NAMES: Final = 64
_MAX_NAME: Final = 100
_MAX_LOGGED: Final = 512
_logged: set[str] = set()
"""Ignored fields that this process has logged; bounded, because clients choose the names."""
_SUBJECT: Final = re.compile(r"^(Input|String|List) ")


Value = TypeVar("Value")
NoEffect = Annotated[Value | None, Field(json_schema_extra={"x-exo-node": "no-op"})]
"""A field that is accepted and has no effect."""
Ignored = Annotated[Value, Field(json_schema_extra={"x-exo-node": "ignored"})]
"""A field that is dropped and named in the answer's header, if it asks for something."""


def as_whole(value: Any) -> Any:
    """5 for 5.0: they are the same JSON number, and some languages write only the latter."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class StrictBody(BaseModel):
    """The base of every body: no coercion, no unknown fields, no NaN."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    refused_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are refused, each with the values beside null that it may have."""

    _dropped: tuple[str, ...] = PrivateAttr(())

    @property
    def dropped(self) -> tuple[str, ...]:
        """Names of fields that it was given and cannot use; "" for the whole."""
        values = ((name, getattr(self, name)) for name in marked_fields(type(self), "ignored"))
        ignored = (name for name, value in values if value not in (None, False))
        return (*self._dropped, *ignored, *(self.model_extra or ()))

    _whole = field_validator("*", mode="before")(as_whole)

    @classmethod
    def known_fields(cls) -> list[str]:
        """Every name that is not refused as unknown."""
        return list(dict.fromkeys((*cls.model_fields, *cls.refused_fields)))


@cache
def marked_fields(body: type[StrictBody], effect: Literal["no-op", "ignored"]) -> tuple[str, ...]:
    """The names of the body's fields that are `NoEffect` or `Ignored`."""
    mark, fields = {"x-exo-node": effect}, body.model_fields.items()
    return tuple(name for name, field in fields if field.json_schema_extra == mark)


class EmptyBody(StrictBody):
    """The body of an endpoint without options: `{}`."""


@dataclass(frozen=True, slots=True)
class _Unusable:
    """The place of a value that a body cannot use, until it is dropped. `word`: the value, if it is
    a new one of a known field."""

    word: str = ""


class TolerantBody(StrictBody):
    """A body whose unknown fields are dropped and named, and so are words that an optional field
    does not have yet. Everything else is as strict as in other bodies."""

    model_config = ConfigDict(extra="allow")

    @field_validator("*", mode="wrap")
    @classmethod
    def _drop(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            return handler(value)
        except ValidationError as fault:
            kinds = {each["type"] for each in fault.errors(include_url=False, include_input=False)}
            field = cls.model_fields[info.field_name or ""]
            if not cls._is_droppable(value, kinds) or field.is_required():
                raise
            return _Unusable(value if isinstance(value, str) else "")

    @classmethod
    def _is_droppable(cls, value: object, kinds: set[str]) -> bool:
        """Whether the value of an optional field may be dropped. `kinds`: of pydantic's faults."""
        return isinstance(value, str) and kinds == {"literal_error"}

    @model_validator(mode="after")
    def _name_dropped(self) -> Self:
        names, values = list[str](), vars(self)
        for name in type(self).model_fields:
            if isinstance(value := values.get(name), _Unusable):
                values[name] = None
                names.append(f"{name} ({value.word[:32]})" if value.word else name)
        self._dropped = tuple(names)
        return self


Body = TypeVar("Body", bound=StrictBody)


async def read_with(request: Request, read: Callable[[bytes], Value]) -> Value:
    """Applies `read` to the request's body, off the event loop if the body is long."""
    raw = await request.body()
    return read(raw) if len(raw) <= INLINE_BYTES else await off_the_loop(lambda: read(raw))


async def read_body(request: Request, schema: type[Body]) -> Body:
    """The request's body. Raises InvalidRequest that names the field at fault."""
    return await read_with(request, lambda raw: parse_body(raw, schema))


def unsupported(at: str, sentence: str) -> PydanticCustomError:
    """The error for a field that asks for what no model of this node does."""
    return PydanticCustomError(
        "unsupported_parameter", "{sentence}", {"sentence": sentence, "at": at}
    )


def parse_body(raw: bytes, schema: type[Body]) -> Body:
    """`raw` as an instance of `schema`; no body counts as an object without fields.

    Raises InvalidRequest that names the field at fault.
    """
    value = decode(raw) if raw else {}
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", param="body")
    return validated(value, schema)


def validated(value: object, schema: type[Body]) -> Body:
    """`value` as an instance of `schema`. Raises InvalidRequest that names the field at fault."""
    try:
        return schema.model_validate(value, context={"history": MAX_HISTORY})
    except ValidationError as fault:
        raise _as_request_error(_causes(fault, value), schema) from None


@dataclass(frozen=True, slots=True)
class _Cause:
    """A fault of a body: pydantic's kind and sentence, and the steps to the field."""

    kind: str
    sentence: str
    steps: tuple[int | str, ...]
    at: str
    """The rest of the path, of a fault that a validator of ours found."""


def _causes(fault: ValidationError, value: object) -> list[_Cause]:
    """The likeliest cause, a misspelt name or a list that is too long before all others; or the
    alternatives of one value, none of which it is."""
    causes = [
        _Cause(
            detail["type"],
            # pydantic's sentences begin with "Input should be …", "String should have …".
            _SUBJECT.sub("", detail["msg"]),
            _own_steps(detail, value),
            detail.get("ctx", {}).get("at", ""),
        )
        for detail in fault.errors(include_url=False, include_input=False)
    ]
    for kind in ("extra_forbidden", "too_long"):
        if likeliest := [cause for cause in causes if cause.kind == kind]:
            return likeliest[:1]
    first = causes[0].steps
    same = [cause for cause in causes if cause.steps[: len(first)] == first]
    deepest = max(same, key=lambda cause: len(cause.steps))
    return [cause for cause in same if cause.steps == deepest.steps]


def _own_steps(detail: ErrorDetails, value: object) -> tuple[int | str, ...]:
    """The steps to a field of the client's, without pydantic's names of alternatives."""
    steps = list[int | str]()
    for number, step in enumerate(detail["loc"], 1 - len(detail["loc"])):
        if isinstance(step, int):
            items = cast(list[object], value) if isinstance(value, list) else []
            value = items[step] if step < len(items) else None
        elif isinstance(value, dict) and step in value:
            value = cast(dict[str, object], value)[step]
        elif number < 0 or detail["type"] != "missing":
            continue
        steps.append(step)
    return tuple(steps)


def _as_request_error(causes: Sequence[_Cause], schema: type[StrictBody]) -> InvalidRequest:
    cause = causes[0]
    param = path_of(cause.steps) + cause.at or "body"
    match cause.kind:
        case "extra_forbidden":
            return _unknown_field(cause.steps, param, schema)
        case "unsupported_parameter":
            return UnsupportedParameter(f"'{param}' {cause.sentence}", param=param)
        case "missing":
            return InvalidRequest(f"'{param}' is required", param=param)
        case _:
            sentences = dict.fromkeys(_sentence(cause) for cause in causes)
            message = f"'{param}' {' or '.join(sentences)}".replace(" or should be ", " or ")
            return InvalidRequest(message, param=param)


def _sentence(cause: _Cause) -> str:
    is_object = cause.kind in ("model_type", "dict_type")
    return "should be an object" if is_object else cause.sentence


def _unknown_field(
    location: tuple[int | str, ...], param: str, schema: type[StrictBody]
) -> InvalidRequest:
    message = f"this node does not know the field '{param}'"
    if len(location) == 1:
        near = difflib.get_close_matches(param, schema.known_fields(), 1)
        message += f"; the nearest that it knows is '{near[0]}'" if near else ""
    return UnsupportedParameter(message, param=param)


def path_of(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` of ("messages", 0, "content")."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{brief(step)}"
    return path.lstrip(".")


def unknown_fields(body: StrictBody) -> list[str]:
    """Names of fields that were dropped, such as `messages[].x`; each once, 64 at most."""
    names: dict[str, None] = {}
    values: list[tuple[str, object]] = [("", body)]
    while values and len(names) < _MAX_NAMES:
        at, value = values.pop()
        match value:
            case StrictBody():
                for name in value.dropped:
                    names[f"{at}{name}".removesuffix(".")[:_MAX_NAME]] = None
                fields = reversed(type(value).model_fields)
                values += [(f"{at}{name}.", getattr(value, name)) for name in fields]
            case list() | tuple():
                below = f"{at.removesuffix('.')}[]."
                items = cast(list[object], value)
                values += [
                    (below, item) for item in reversed(items) if isinstance(item, StrictBody)
                ]
            case _:
                pass
    return list(names)[:_MAX_NAMES]


def ignored_header(names: Sequence[str], path: str) -> dict[str, str]:
    """The header that names ignored fields; {} for none. Logs each name once for a `path`."""
    names = [name[:_MAX_NAME] for name in names[:_MAX_NAMES]]
    new = [name for name in names if f"{path} {name}" not in _logged]
    if new and len(_logged) < _MAX_LOGGED:
        _logged.update(f"{path} {name}" for name in new)
        _LOG.info("%s: no use for the fields %s of a request", path, _header_value(new))
    return {IGNORED_HEADER: _header_value(names)} if names else {}


def _header_value(names: list[str]) -> str:
    """Clients choose the names: they are escaped, and spaces removed from the value's ends."""
    text = ", ".join(json.dumps(name)[1:-1] for name in names)
    return text.replace('\\"', "'")[:1024].strip()


def _as_duration(value: Any) -> Any:
    if value is None or value == "":
        return None
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise PydanticCustomError("duration", "should be a duration such as 5m, 0 or -1")
    try:
        return duration_s(value)
    except ValueError as fault:
        raise PydanticCustomError("duration", "{why}", {"why": str(fault)}) from None


def _as_json(seconds: float | None) -> float | None:
    """JSON has no infinity; to Ollama -1 is for ever."""
    return -1 if seconds is not None and math.isinf(seconds) else seconds


KeepAlive = Annotated[
    Annotated[float, Field(allow_inf_nan=True)] | None,
    BeforeValidator(_as_duration, json_schema_input_type=str | float | None),
    PlainSerializer(_as_json, return_type=float | None),
]
"""Seconds that a model stays loaded; infinity: for ever; None: the node's setting applies."""
