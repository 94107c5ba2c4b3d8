"""The tables of stored responses, and the form of what they hold.

A conversation is a chain of chunks, each of which refers to the one before it. A response refers to
the chunks of its own input and output. So a turn adds only its own text, and a response stays whole
when an earlier one is deleted.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple, cast

from ...placement.errors import ResponsesUnavailable

VERSION: Final = 3
"""`PRAGMA user_version` of the file."""
SCHEMA: Final = """
CREATE TABLE response (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created INTEGER NOT NULL,
    status TEXT NOT NULL,
    background INTEGER NOT NULL,
    body BLOB NOT NULL,
    events BLOB,
    input INTEGER REFERENCES chunk (id),
    output INTEGER REFERENCES chunk (id)
);
CREATE INDEX response_created ON response (created);
CREATE TABLE chunk (
    id INTEGER PRIMARY KEY,
    items BLOB NOT NULL,
    previous INTEGER REFERENCES chunk (id)
);
CREATE INDEX chunk_previous ON chunk (previous);
CREATE INDEX response_input ON response (input);
CREATE INDEX response_output ON response (output);
CREATE INDEX response_share ON response (owner, status != 'failed', created);
"""
"""`created`: Unix seconds. A chunk's id is greater than that of its `previous`."""
RUNNING: Final = ("queued", "in_progress")
"""The statuses of a response that has not ended."""
Json = dict[str, Any]
_LEVEL: Final = 1
_INTERRUPTED: Final = (
    "the end of this answer was not stored: the node stopped meanwhile, or its disk took no more; "
    "send the request again"
)


def pack(data: bytes) -> bytes:
    """Compressed, with zlib's checksum."""
    return zlib.compress(data, _LEVEL)


def pack_json(value: object) -> bytes:
    """Compressed JSON. Of a list each item is encoded by itself, so that other threads run."""
    if not isinstance(value, list):
        return pack(_encoded(value))
    compressor, opening = zlib.compressobj(_LEVEL), b"["
    parts = list[bytes]()
    for item in cast("list[object]", value):
        parts.append(compressor.compress(opening + _encoded(item)))
        opening = b","
    end = b"]" if value else b"[]"
    return b"".join((*parts, compressor.compress(end), compressor.flush()))


def _encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def unpack(packed: bytes, most: int = 0) -> bytes:
    """Beyond `most` bytes, unless it is 0, only that there are more of them.

    Raises ResponsesUnavailable for data that the disk has changed.
    """
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, most and most + 1)
        if not unpacker.eof and not len(data) > most > 0:
            raise zlib.error("it ends too early")
        return data
    except (zlib.error, TypeError):  # the latter: what was bytes became text or a number
        raise ResponsesUnavailable(
            "this stored response is damaged on the disk; delete it, and send the conversation "
            "as 'input'"
        ) from None


def add_chunk(connection: sqlite3.Connection, packed: bytes, previous: int | None) -> int:
    """Writes packed items after the chunk `previous` and returns the new chunk's id."""
    added = connection.execute(
        "INSERT INTO chunk (previous, items) VALUES (?, ?)", (previous, packed)
    )
    assert added.lastrowid is not None
    return added.lastrowid


def last_chunk(connection: sqlite3.Connection, id: str) -> int | None:
    """The chunk with which the response's conversation ends; None without such a response, or where
    damage has taken its conversation."""
    row = connection.execute(
        "SELECT coalesce(output, input) FROM response WHERE id = ?", (id,)
    ).fetchone()
    return None if row is None or row[0] is None else int(row[0])


def chain(connection: sqlite3.Connection, last: int | None) -> Iterator[bytes]:
    """The packed items of the conversation that ends with the chunk `last`, in its order.

    UNION ends even where damage has made the chain a circle.
    """
    chunks = connection.execute(
        "WITH RECURSIVE chain (id, previous) AS ("
        " SELECT id, previous FROM chunk WHERE id = ?"
        " UNION SELECT chunk.id, chunk.previous FROM chain JOIN chunk ON chunk.id = chain.previous"
        ") SELECT items FROM chain JOIN chunk USING (id) ORDER BY id",
        (last,),
    )
    return (packed for (packed,) in chunks)


class ItemPlace(NamedTuple):
    """A response and the part of it that has an item."""

    response: str
    part: Literal["input", "output"]


def own_chunk(connection: sqlite3.Connection, place: ItemPlace) -> list[bytes]:
    """The packed items that a response itself has there, as one chunk; none where it has no end."""
    chunks = connection.execute(
        "SELECT items FROM response"
        " JOIN chunk ON chunk.id = CASE ? WHEN 'input' THEN input ELSE output END"
        " WHERE response.id = ?",
        (place.part, place.response),
    )
    return [packed for (packed,) in chunks]


def end_interrupted(connection: sqlite3.Connection, id: str) -> None:
    """Gives a response that no process works on any more the end that it lacks."""
    (packed,) = connection.execute("SELECT body FROM response WHERE id = ?", (id,)).fetchone()
    error = {"code": "server_error", "message": _INTERRUPTED}
    body = json.loads(unpack(packed)) | {"status": "failed", "error": error}
    _ = connection.execute(
        "UPDATE response SET status = 'failed', body = ? WHERE id = ?", (pack_json(body), id)
    )
