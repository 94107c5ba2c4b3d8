"""A message of an OpenAI chat request, and its form for chat templates."""

from typing import Annotated, Any, Final, Literal, cast

from pydantic import BeforeValidator, Field, SkipValidation, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ...placement.errors import InvalidRequest
from ..chat.images import Content, content_of
from ..chat.requests import Image
from .bodies import MAX_PARTS, StrictBody, unsupported
from .image_parts import image_of_url
from .strict_json import brief, decode
from .unreadable_parts import refusal_of

Role = Literal["system", "developer", "user", "assistant", "tool"]

_DETAIL: Final = frozenset({"detail", "format", "media_type"})
"""Hints beside an image's URL: its own processor decides on its size."""
_PART_HINTS: Final = frozenset({"cache_control"})
"""Requests to begin a cached prefix there; this node caches every turn."""


def _joined(value: Any) -> Any:
    """Text parts as one string, without a separator, as mlx-lm's server joins them; with images,
    parts as `content_of` gives them."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "should be text or a list of parts")
    parts = cast(list[object], value)
    if len(parts) > MAX_PARTS:
        raise PydanticCustomError("too_long", "should have at most {n} parts", {"n": MAX_PARTS})
    return content_of([_part_of(part, f"[{index}]") for index, part in enumerate(parts)])


def _part_of(part: Any, at: str) -> str | Image:
    match part:
        case {"type": "image_url", "image_url": {"url": url, **extra}} if (
            not extra.keys() - _DETAIL
        ):
            return _image(url, f"{at}.image_url.url")
        case {"type": "image_url", "image_url": str(url)}:
            return _image(url, f"{at}.image_url")
        case {"type": "image_url"}:
            raise PydanticCustomError(
                "invalid_part", "should be an object with a 'url'", {"at": f"{at}.image_url"}
            )
        case {"type": "text", "text": str(text), **extra} if not extra.keys() - _PART_HINTS:
            return text
        case {"type": "text", "text": str(), **extra}:
            unknown = next(name for name in extra if name not in _PART_HINTS)
            raise unsupported(f"{at}.{brief(unknown)}", "is not supported; remove it")
        case {"type": str(kind)} if kind != "text":
            other = (
                f"is a part of type '{brief(kind)}'; this node reads parts of type 'text' and "
                "'image_url'"
            )
            sentence = refusal_of(kind) or other
            raise unsupported(f"{at}.type", sentence)
        case _:
            raise PydanticCustomError(
                "invalid_part", "should be a part of type 'text' with its 'text'", {"at": at}
            )


def _image(url: object, at: str) -> Image:
    try:
        return image_of_url(url, at)
    except InvalidRequest as fault:
        sentence = fault.message.removeprefix(f"'{at}' ")
        raise PydanticCustomError("image", "{sentence}", {"sentence": sentence, "at": at}) from None


def _decoded(value: Any) -> Any:
    """Chat templates take arguments as an object, OpenAI's clients send them as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return decode(value.encode())
    except InvalidRequest as fault:
        raise PydanticCustomError("arguments", "{why}", {"why": fault.message}) from None


class TextPart(StrictBody):
    """A part of a message as the document describes it; `_joined` reads it."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None


class ImageUrl(StrictBody):
    url: str
    """`data:image/…;base64,…`; `https://…` where the node's owner allows it."""
    detail: str | None = None


class ImagePart(StrictBody):
    """An image in a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl | str


Parts = Annotated[list[TextPart | ImagePart], Field(max_length=MAX_PARTS)]


class FunctionCall(StrictBody):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[
        dict[str, Any], BeforeValidator(_decoded, json_schema_input_type=str | dict[str, Any])
    ]


class ToolCall(StrictBody):
    """A call that the assistant made earlier in the conversation."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(StrictBody):
    """One turn. `refusal`, `audio`, `annotations` and `function_call` come back from OpenAI's
    clients as null when they repeat an answer; other values are refused.
    """

    role: Role
    id: Annotated[str | None, Field(max_length=256)] = None
    """Some clients number their messages; no answer depends on it."""
    content: Annotated[
        SkipValidation[Content | None],
        BeforeValidator(
            _joined,
            json_schema_input_type=str | Parts | None,
        ),
    ] = None
    name: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=128)] = None
    tool_call_id: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None

    @field_validator("refusal", "audio", "annotations", "function_call", mode="before")
    @classmethod
    def _nothing_only(cls, value: Any) -> None:
        if value is not None and value != []:
            raise PydanticCustomError("unsupported_parameter", "is not supported; remove it")

    @model_validator(mode="after")
    def _fits_role(self) -> "ChatMessage":
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError(
                "missing_content", "should be text or text parts", {"at": ".content"}
            )
        for name in ("tool_calls", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise PydanticCustomError(
                    "wrong_role", "belongs to the assistant's messages only", {"at": f".{name}"}
                )
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise PydanticCustomError(
                "wrong_role",
                "is required in a message of role 'tool' and has no place in another",
                {"at": ".tool_call_id"},
            )
        return self

    def for_template(self) -> dict[str, Any]:
        """The message for a chat template; `developer` is OpenAI's newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message
