"""Images in a conversation: contents of text and images, and what a model gets that reads none.

In the user's latest turn an image is then refused, or the model would answer as if it had seen it.
In results of tools and in earlier turns a note replaces it: the user did not ask for the former,
and clients repeat a refused turn with each one that follows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from ...placement.errors import InvalidRequest, UnsupportedParameter
from .requests import GenerationRequest, Image

MAX_IMAGES: Final = 64
"""In all turns of a request."""
MAX_IMAGE_BYTES: Final = 20_000_000
"""The limit of one image as it is encoded."""
READ: Final = "read"
"""`LoadReady.images` of a model that reads images; else it is the reason why it does not."""
IMAGE_NOTE: Final = "[an image was here; this node reads text only]"
_IGNORED: Final = "messages[].content (an image)"

Content = str | list[dict[str, Any]]
"""A message's content: text, or parts `{"type": "text", "text": …}` and `{"type": "image"}`."""


def latest_user_turn(roles: Sequence[str]) -> int:
    """The index of the user's latest turn, or -1. `roles` are those of all messages, in order."""
    return max((number for number, role in enumerate(roles) if role == "user"), default=-1)


def content_of(parts: Sequence[str | Image], separator: str = "") -> Content:
    """The parts as one text with `separator` between them, or as parts if some are images."""
    if not any(isinstance(part, Image) for part in parts):
        return separator.join(cast("Sequence[str]", parts))
    content, text = list[dict[str, Any]](), ""
    for number, part in enumerate(parts):
        text += separator if number else ""
        if isinstance(part, str):
            text += part
            continue
        content += [{"type": "text", "text": text}] if text else []
        content.append({"type": "image", "image": part})
        text = ""
    return [*content, *([{"type": "text", "text": text}] if text else [])]


def gathered(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[tuple[Mapping[str, Any], ...], tuple[Image, ...]]:
    """The messages of a dialect without their images, and those in their order.

    Raises InvalidRequest for too many.
    """
    images, result = list[Image](), list[Mapping[str, Any]]()
    latest = latest_user_turn([each["role"] for each in messages])
    for number, message in enumerate(messages):
        if not isinstance(message["content"], list):
            result.append(message)
            continue
        content = list[dict[str, Any]]()
        for part in cast("list[dict[str, Any]]", message["content"]):
            if "image" not in part:
                content.append(part)
                continue
            image = cast("Image", part["image"])
            if image.field.startswith("["):
                image = replace(image, field=f"messages[{number}].content{image.field}")
            must_be_seen = number == latest or message["role"] == "system"
            images.append(replace(image, must_be_seen=must_be_seen))
            content.append({"type": "image"})
        result.append({**message, "content": content})
    if len(images) > MAX_IMAGES:
        raise InvalidRequest(
            f"the messages have {len(images)} images, more than {MAX_IMAGES}; leave earlier ones "
            "out",
            param=images[MAX_IMAGES].field,
        )
    return tuple(result), tuple(images)


def as_read(request: GenerationRequest, images: str) -> tuple[GenerationRequest, tuple[str, ...]]:
    """The request as the model reads it, and the names of the parts without effect.

    `images`: the model's `LoadReady.images`. Raises UnsupportedParameter if it would miss an image
    of the user's latest turn, or an address that it could read.
    """
    if images == READ:
        for image in request.images:
            if image.url:
                raise UnsupportedParameter(
                    f"'{image.field}' is an address, and nodes fetch no images: a client could "
                    "make them ask hosts that only they can reach; send a data URL",
                    param=image.field,
                )
    if not request.images or images == READ:
        return request, ()
    for image in request.images:
        if image.must_be_seen:
            why = f": {images}" if images else ""
            raise UnsupportedParameter(
                f"{image.refusal}'{image.field}' asks the model to see pictures, which it cannot"
                f"{why}; send text, or leave that part out",
                param=image.field,
            )
    messages = tuple(map(_as_text, request.messages))
    return replace(request, messages=messages, images=()), (_IGNORED,)


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    if not isinstance(content, list):
        return message
    parts = cast("list[dict[str, Any]]", content)
    return {**message, "content": "".join(part.get("text", IMAGE_NOTE) for part in parts)}
