"""Bodies that a client compressed: read as they are meant, and never beyond any body's limit."""

import gzip
import json
import zlib
from collections.abc import Callable

import pytest
from http_node import Node, chat_body

from exo_node.node.api.http.guard import MAX_BODY_BYTES

CHAT = "/v1/chat/completions"
BODY = json.dumps(chat_body()).encode()
CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
}


@pytest.mark.parametrize("coding", CODINGS)
def test_a_compressed_body_is_read(node: Node, coding: str) -> None:
    node.chat.reset()
    reply = node.ask("POST", CHAT, CODINGS[coding](BODY), {"Content-Encoding": coding})
    assert (reply.status, reply.json["choices"][0]["message"]["content"]) == (200, "héllo")
    (request,) = node.chat.requests
    assert request.messages[0]["content"] == "hi"


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "compress", "x" * 900])
def test_another_coding_is_refused_by_its_header(node: Node, coding: str) -> None:
    reply = node.ask("POST", CHAT, BODY, {"Content-Encoding": coding})
    assert (reply.status, reply.error["param"]) == (415, "Content-Encoding")
    assert reply.headers["accept-encoding"] == "gzip, deflate"
    assert len(reply.error["message"]) < 300


def test_a_bomb_is_refused_as_any_body_of_its_size_is(node: Node) -> None:
    """A few kilobytes that become one byte more than the limit, and eight times as much."""
    just = gzip.compress(b" " * (MAX_BODY_BYTES + 1))
    huge = gzip.compress(b" " * (64 << 20))
    for bomb in (just, huge):
        reply = node.ask("POST", CHAT, bomb, {"Content-Encoding": "gzip"})
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    full = gzip.compress(BODY + b" " * (MAX_BODY_BYTES - len(BODY)))
    assert node.ask("POST", CHAT, full, {"Content-Encoding": "gzip"}).status == 200


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (BODY, "cannot be unpacked"),
        (gzip.compress(BODY)[:-3], "cut off"),
        (gzip.compress(BODY)[:-5] + b"12345", "cannot be unpacked"),
        (gzip.compress(BODY) + gzip.compress(b"") * 100_000, "one stream"),
        (b"", "cut off"),
    ],
    ids=["plain", "short", "changed", "many", "empty"],
)
def test_what_is_no_whole_stream_is_refused(node: Node, body: bytes, why: str) -> None:
    reply = node.ask("POST", CHAT, body, {"Content-Encoding": "gzip"})
    assert (reply.status, reply.error["param"]) == (400, "body")
    assert why in reply.error["message"]
    assert node.chat_reply().status == 200
