"""Bodies that a client has compressed, unpacked within the limit of any body."""

import zlib
from typing import Final

from starlette.datastructures import Headers

from ...placement.errors import InvalidRequest
from .errors import HttpFault

_UNPACKED: Final = ("gzip", "x-gzip", "deflate")
_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
"""The wrapper says which of the two it is; `deflate` is zlib's in HTTP."""


class UnpackedTooLarge(Exception):
    """The body is longer than the limit once it is unpacked."""


def encoding_of(headers: Headers) -> str:
    """The content coding; "" for a body as it stands."""
    named = ", ".join(headers.getlist("content-encoding")).strip().lower()
    return "" if named == "identity" else named


def refused_encoding(headers: Headers) -> HttpFault | None:
    named = encoding_of(headers)
    if not named or named in _UNPACKED:
        return None
    message = (
        f"bodies of Content-Encoding {named[:40]!r} are not read here; send the body as gzip, or "
        "as it is without that header"
    )
    offer = (("Accept-Encoding", "gzip, deflate"),)
    return HttpFault(415, "unsupported_media_type", message, "Content-Encoding", offer)


def unpacked(body: bytes, limit: int) -> bytes:
    """At most `limit` bytes, whatever the body would become: no more is ever unpacked.

    Raises UnpackedTooLarge, and InvalidRequest for what is not exactly one stream: each further one
    could be empty, and millions of them would take time for nothing.
    """
    stream = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        text = stream.decompress(body, limit + 1)
    except zlib.error as fault:
        raise _broken(f"cannot be unpacked ({fault})") from None
    if len(text) > limit:
        raise UnpackedTooLarge
    if not stream.eof:
        raise _broken("is cut off before its end")
    if stream.unused_data:
        raise _broken("goes on behind its end; compress it as one stream")
    return text


def _broken(how: str) -> InvalidRequest:
    return InvalidRequest(
        f"the body is compressed, by its Content-Encoding, and {how}", param="body"
    )
