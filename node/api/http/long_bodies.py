"""Answers of any length as JSON bodies: encoded piece by piece, long ones off the event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, TypeVar

from starlette.responses import Response

from .sse import EventStream
from .strict_json import encode_in_parts

JSON_TYPE: Final = "application/json"
INLINE_BYTES: Final = 64 * 1024
"""Bytes that are parsed or encoded on the event loop: a few milliseconds of work."""
_BATCH_BYTES: Final = 4 * INLINE_BYTES
_BATCH_PIECES: Final = 2048
_THREADS: Final = ThreadPoolExecutor(2, thread_name_prefix="bodies")
"""Threads of their own, so that long bodies do not fill the node's other thread pools."""

Value = TypeVar("Value")


async def off_the_loop(work: Callable[[], Value]) -> Value:
    """Runs `work` in a thread for long bodies, and returns its result."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """The value as a body. A long one, which has status 200, is encoded as it is sent."""
    pieces = encode_in_parts(value)
    begin = _batch(pieces, INLINE_BYTES)
    if (rest := next(pieces, None)) is None:
        return Response(begin, status, headers, JSON_TYPE)
    response = EventStream(_batches(begin + rest, pieces), JSON_TYPE)
    response.headers.update(headers or {})
    return response


async def _batches(begin: bytes, pieces: Iterator[bytes]) -> AsyncGenerator[bytes]:
    yield begin
    while batch := await off_the_loop(lambda: _batch(pieces, _BATCH_BYTES)):
        yield batch


def _batch(pieces: Iterator[bytes], most: int) -> bytes:
    """About as many bytes, of a bounded number of pieces; b"" after the last one."""
    batch = bytearray()
    for piece in islice(pieces, _BATCH_PIECES):
        batch += piece
        if len(batch) >= most:
            break
    return bytes(batch)
