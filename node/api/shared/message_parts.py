"""The parts of a message in every dialect that has parts, and their content for chat templates.

Nothing here decodes an image, which is in a data URL or base64.
"""

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator, Field

from ....placement.errors import InvalidRequest, UnsupportedParameter
from ...chat.images import IMAGE_NOTE, MAX_IMAGE_BYTES, Content, content_of
from ...chat.requests import Image
from .history import History, HistoryBody, as_text

_KINDS: Final = {
    "text": "text",
    "thinking": "thinking",
    "tool_use_id": "tool_result",
    "input": "tool_use",
    "tool_name": "tool_reference",
    "image_url": "image_url",
    "source": "image",
    "content": "",
}
_IMAGES: Final = ("image", "image_url", "input_image")
_UNREADABLE: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(("document", "file", "input_file"), ("read files", "a file")),
    **dict.fromkeys(("audio", "input_audio"), ("hear sound", "sound")),
    **dict.fromkeys(("video", "video_url", "input_video"), ("see films", "a film")),
}
"""The verb of a refusal and the noun of a note by a part's type, in any dialect.

They are refused in the user's latest turn, or the model would answer as if it knew them. In
earlier turns and results of tools a note takes their place.
"""


_DATA_URL: Final = re.compile(
    r"data:(?P<type>[\w.+-]{1,64}/[\w.+-]{1,64})?(?:;[\w-]+=[\w-]+)*;base64,", re.IGNORECASE
)
_SPACE: Final = re.compile(r"[ \t\r\n]+")


class ImageUrl(HistoryBody):
    unused_fields: ClassVar[frozenset[str]] = frozenset(("detail", "format", "media_type"))

    url: str | None = None
    """`data:image/…;base64,…`; `https://…` where the node's owner allows it."""


class PartSource(HistoryBody):
    """The place of an image or a document: `data` of type `base64` or `text`, `url`, `content`."""

    type: str | None = None
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: "Parts | None" = None


class Part(HistoryBody):
    """A part of a message; which fields it has follows from its type and the dialect."""

    text_field: ClassVar[str] = "text"
    unused_fields: ClassVar[frozenset[str]] = frozenset(
        (
            *("annotations", "cache_control", "citations", "detail", "logprobs", "signature"),
            *("audio", "file", "file_data", "file_id", "file_url", "filename", "input_audio"),
            *("caller", "video", "video_url"),
        )
    )
    """Fields about a text, or of a part whose type is named. They are not named as ignored, since
    every turn is cached anyway."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: str | ImageUrl | None = None
    source: str | PartSource | None = None
    title: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    """The tool that a `tool_reference` in the result of a client's search names."""
    content: "Parts | None" = None
    is_error: bool | None = None

    @property
    def kind(self) -> str:
        return self.kind_of(self.type, _KINDS)


PartList = Annotated[list[Part], Field(fail_fast=True)]
Parts = Annotated[str | PartList, BeforeValidator(as_text)]


def thoughts_of(content: str | list[Part] | None) -> str:
    """The reasoning among the parts of an assistant's message."""
    parts = content if isinstance(content, list) else []
    return "".join(part.thinking or "" for part in parts)


def content_for_template(
    content: str | list[Part] | None,
    at: str,
    history: History,
    *,
    separator: str = "",
    asks: bool = False,
) -> Content:
    """The text of a message or a result, or its parts if some are images.

    `asks`: it is the user's latest turn: what the model cannot read is then refused, and else a
    note. Raises InvalidRequest, UnsupportedParameter.
    """
    return content_of(read_parts(content, at, history, asks=asks), separator)


def read_parts(
    content: str | list[Part] | None, at: str, history: History, *, asks: bool = False
) -> list[str | Image]:
    """The texts and images of `content_for_template`, none of them empty."""
    if content is None or isinstance(content, str):
        return [content] if content else []
    parts: list[str | Image] = []
    for number, part in enumerate(content):
        parts += _read(part, f"{at}[{number}]", history, asks=asks)
    return [part for part in parts if part]


def plain_text(content: str | list[Part] | None, at: str, history: History) -> str:
    """The text of an assistant's message, which has no images."""
    read = content_for_template(content, at, history)
    if isinstance(read, str):
        return read
    history.ignored.append("a part of type image")
    return "".join(part.get("text", IMAGE_NOTE) for part in read)


def _read(part: Part, at: str, history: History, *, asks: bool) -> list[str | Image]:
    kind = part.kind
    source = part.source if isinstance(part.source, PartSource) else PartSource()
    if kind in _IMAGES:
        refusal = history.refusals.get("image", "")
        return [read_image(partial(_image_of, part, at, refusal), history, asks)]
    if kind == "document" and (source.type == "text" or source.content is not None):
        inner = content_for_template(source.content or source.data, at, history, separator="\n")
        return _joined(part.title, inner)
    if kind == "search_result":
        inner = content_for_template(part.content, at, history, separator="\n")
        return _joined(part.title, part.source if isinstance(part.source, str) else None, inner)
    if kind in _UNREADABLE:
        verb, noun = _UNREADABLE[kind]
        if asks:
            raise UnsupportedParameter(
                f"{history.refusals.get(kind, '')}'{at}' asks the model to {verb}, which it "
                "cannot; send text, or leave that part out",
                param=at,
            )
        history.ignored.append(f"a part of type {kind}")
        return [f"[{noun} was here; this node reads text only]"]
    text = part.refusal if part.text is None else part.text
    if text is None and part.thinking is None and not part.is_empty:
        history.ignored.append(f"a part of type {kind}")
    return [text or ""]


def _joined(*texts: str | Content | None) -> list[str | Image]:
    parts: list[str | Image] = []
    for text in texts:
        if isinstance(text, list):
            parts += [part.get("image") or part.get("text", "") for part in text]
        elif text:
            parts.append(text)
    return [each for part in parts for each in (part, "\n")][:-1]


def read_image(read: Callable[[], Image], history: History, asks: bool) -> str | Image:
    """The image, or a note where it is none and the past."""
    try:
        return read()
    except InvalidRequest:
        if asks:
            raise
        history.ignored.append("a part of type image (it cannot be read)")
        return IMAGE_NOTE


def _image_of(part: Part, at: str, refusal: str) -> Image:
    """The image of a part. Raises InvalidRequest."""
    if part.kind == "image":
        match part.source:
            case PartSource(type="base64", data=str(data), media_type=media_type):
                return image_of_base64(data, media_type or "", f"{at}.source.data", refusal)
            case PartSource(type="url", url=str(url)):
                return image_of_url(url, f"{at}.source.url", refusal)
            case _:
                raise InvalidRequest(
                    f"'{at}.source' should have the type 'base64' with 'data', or 'url' with 'url'",
                    param=f"{at}.source",
                )
    if isinstance(part.image_url, ImageUrl):
        return image_of_url(part.image_url.url, f"{at}.image_url.url", refusal)
    return image_of_url(part.image_url, f"{at}.image_url", refusal)


def image_of_url(url: object, at: str, refusal: str = "") -> Image:
    """The image of a `data:` URL, or one that is still to be fetched. `at`: the field.

    `refusal` begins the error where the model reads no images. Raises InvalidRequest.
    """
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"'{at}' should be a data URL of an image", param=at)
    if url[:8].lower().startswith(("http://", "https://")):
        return Image(b"", "", at, url=url, refusal=refusal)
    match = _DATA_URL.match(url[:300])
    if match is None:
        raise InvalidRequest(
            f"'{at}' should be a URL that begins with data:image/…;base64,", param=at
        )
    return image_of_base64(url[match.end() :], match["type"] or "", at, refusal)


def image_of_base64(data: object, media_type: str, at: str, refusal: str = "") -> Image:
    """The image in a base64 text. Raises InvalidRequest."""
    if not isinstance(data, str):
        raise InvalidRequest(f"'{at}' should be an image in base64", param=at)
    media_type = media_type.lower()
    if media_type and not media_type.startswith(("image/", "application/octet-stream")):
        raise InvalidRequest(
            f"'{at}' is of type {media_type}; send a PNG, JPEG, GIF or WebP image", param=at
        )
    if len(data) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise InvalidRequest(
            f"'{at}' is longer than {MAX_IMAGE_BYTES // 10**6} MB; send a smaller image", param=at
        )
    try:
        decoded = base64.b64decode(_SPACE.sub("", data), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"'{at}' is no valid base64", param=at) from None
    if not decoded:
        raise InvalidRequest(f"'{at}' is empty; send an image", param=at)
    return Image(decoded, media_type, at, refusal=refusal)
