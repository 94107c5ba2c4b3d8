"""The memory of the last encodings: what it has, and its bounds."""

from array import array

import pytest
from engines import message

from exo_node.proto import peer_pb2 as pb
from exo_node.shard.runner.encodings import (
    MAX_AGE_S,
    MAX_BYTES,
    MAX_ENCODINGS,
    Encoding,
    Encodings,
)
from exo_node.shard.text.image_rows import PreparedImage


def _of(ids: list[int], *notes: str, pixels: int = 0) -> Encoding:
    image = PreparedImage(1, (1, 2, 2), b"", bytes(pixels), (), ())
    return Encoding(notes, array("i", ids), (image,) if pixels else ())


def test_what_was_put_comes_back() -> None:
    memory = Encodings()
    memory.put(b"key", _of([1, -2], "a note"))
    assert memory.get(b"key") == _of([1, -2], "a note")
    assert memory.get(b"other") is None


def test_all_that_decides_the_ids_decides_the_key() -> None:
    messages = pb.Messages(json="[]")
    requests = [
        pb.GenerateRequest(messages=messages),
        pb.GenerateRequest(messages=pb.Messages(json="[1]")),
        pb.GenerateRequest(messages=pb.Messages(json="[]", options="{}")),
        pb.GenerateRequest(messages=messages, tools="[]"),
        pb.GenerateRequest(text="[]"),
        pb.GenerateRequest(text="[1]"),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2])),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[12])),
        pb.GenerateRequest(messages=messages, images=[pb.Image(data=b"ab")]),
        pb.GenerateRequest(messages=messages, images=[pb.Image(data=b"a"), pb.Image(data=b"b")]),
        pb.GenerateRequest(),
    ]
    assert len({Encodings.key(request) for request in requests}) == len(requests)
    other = message(messages=messages, max_tokens=5, request="r", cache_salt=b"a")
    assert Encodings.key(other) == Encodings.key(requests[0])


def test_an_old_encoding_is_not_used_because_a_template_may_write_the_date() -> None:
    now = [0.0]
    memory = Encodings(lambda: now[0])
    memory.put(b"key", _of([1]))
    now[0] = MAX_AGE_S
    assert memory.get(b"key") == _of([1])
    now[0] = MAX_AGE_S + 1
    assert memory.get(b"key") is None


def test_the_least_recently_used_one_gives_way() -> None:
    memory, keys = Encodings(), [bytes([number]) for number in range(MAX_ENCODINGS + 1)]
    for key in keys[:-1]:
        memory.put(key, _of([1]))
    assert memory.get(keys[0]) is not None
    memory.put(keys[-1], _of([1]))
    assert [memory.get(key) is not None for key in keys] == [True, False, *[True] * (len(keys) - 2)]


@pytest.mark.parametrize("kind", ["ids", "pixels"])
def test_all_of_them_have_a_bounded_size(kind: str) -> None:
    def sized(size: int) -> Encoding:
        return _of([1], pixels=size) if kind == "pixels" else _of([1] * (size // 4))

    memory = Encodings()
    for key in (b"a", b"b", b"c"):
        memory.put(key, sized(MAX_BYTES // 2 - 64))
    assert [memory.get(key) is not None for key in (b"a", b"b", b"c")] == [False, True, True]
    memory.put(b"d", sized(MAX_BYTES + 4))
    assert memory.get(b"d") is None and memory.get(b"c") is not None
