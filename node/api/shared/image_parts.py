"""Images as clients send them, in data URLs or base64. Nothing here decodes a picture."""

import base64
import binascii
import re
from typing import Final

from ....placement.errors import InvalidRequest
from ...chat.images import MAX_IMAGE_BYTES
from ...chat.requests import Image

_DATA_URL: Final = re.compile(
    r"data:(?P<type>[\w.+-]{1,64}/[\w.+-]{1,64})?(?:;[\w-]+=[\w-]+)*;base64,",
    re.IGNORECASE,
)
_SPACE: Final = re.compile(r"[ \t\r\n]+")


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
            f"'{at}' should be a URL that begins with data:image/…;base64, or https://", param=at
        )
    return image_of_base64(url[match.end() :], (match["type"] or "").lower(), at, refusal)


def image_of_base64(data: object, media_type: str, at: str, refusal: str = "") -> Image:
    """The image in a base64 text. Raises InvalidRequest."""
    if not isinstance(data, str):
        raise InvalidRequest(f"'{at}' should be an image in base64", param=at)
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
