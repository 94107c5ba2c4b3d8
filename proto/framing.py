"""Messages on a socket or a join port: a length of four bytes, big-endian, and the body."""

from typing import Final

HEAD_BYTES: Final = 4


def framed(body: bytes) -> bytes:
    """`body` after its length."""
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def body_bytes(head: bytes) -> int:
    """The length in a frame's first HEAD_BYTES. A reader of untrusted frames must bound it."""
    return int.from_bytes(head, "big")
