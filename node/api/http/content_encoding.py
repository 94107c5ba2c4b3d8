"""Compressed bodies, decompressed within the limit of every body."""

import zlib
from typing import Final

from starlette.datastructures import Headers

from ....placement.errors import InvalidRequest
from .errors import HttpFault

_UNPACKED: Final = ("gzip", "x-gzip", "deflate")
_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
"""zlib detects the format by its header; `deflate` is zlib's format in HTTP."""


class BodyTooLarge(Exception):
    """The body is longer than the limit, as it was sent or decompressed."""


def encoding_of(headers: Headers) -> str:
    """The content coding; "" for a plain body."""
    coding = ", ".join(headers.getlist("content-encoding")).strip().lower()
    return "" if coding == "identity" else coding


def refused_encoding(headers: Headers) -> HttpFault | None:
    coding = encoding_of(headers)
    if not coding or coding in _UNPACKED:
        return None
    message = (
        f"bodies of Content-Encoding {coding[:40]!r} are not read here; send the body as gzip, or "
        "as it is without that header"
    )
    offer = (("Accept-Encoding", "gzip, deflate"),)
    return HttpFault(415, "unsupported_media_type", message, "Content-Encoding", offer)


def unpacked(body: bytes, limit: int) -> bytes:
    """The decompressed body, at most `limit` bytes; no more is ever decompressed.

    Raises BodyTooLarge, and InvalidRequest for anything but one stream: further ones could be
    empty, and millions of them would only take time.
    """
    stream = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        text = stream.decompress(body, limit + 1)
    except zlib.error as fault:
        raise _broken(f"cannot be unpacked ({fault})") from None
    if len(text) > limit:
        raise BodyTooLarge
    if not stream.eof:
        raise _broken("is cut off before its end")
    if stream.unused_data:
        raise _broken("goes on after its end; compress it as one stream")
    return text


def _broken(how: str) -> InvalidRequest:
    return InvalidRequest(
        f"the body is compressed, by its Content-Encoding, and {how}", param="body"
    )
