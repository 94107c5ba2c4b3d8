"""The tables of stored responses, and the form of what they hold.

A conversation is a list of chunks. Each response refers to all chunks of its conversation, so the
text of a turn is on the disk once, and a response stays whole when an earlier one is deleted.
"""

import json
import sqlite3
import zlib
from typing import Any, Final

from ...placement.errors import ResponsesUnavailable

VERSION: Final = 1
"""`PRAGMA user_version` of the file."""
SCHEMA: Final = """
CREATE TABLE response (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created INTEGER NOT NULL,
    status TEXT NOT NULL,
    background INTEGER NOT NULL,
    inputs INTEGER NOT NULL,
    body BLOB NOT NULL,
    events BLOB
);
CREATE INDEX response_created ON response (created);
CREATE TABLE chunk (id INTEGER PRIMARY KEY, items BLOB NOT NULL);
CREATE TABLE history (
    response TEXT NOT NULL REFERENCES response (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    chunk INTEGER NOT NULL REFERENCES chunk (id),
    PRIMARY KEY (response, position)
) WITHOUT ROWID;
CREATE INDEX history_chunk ON history (chunk);
PRAGMA user_version = 1;
"""
"""`inputs`: the number of a response's chunks before its own output. `created`: Unix seconds."""

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
    return pack(json.dumps(value, separators=(",", ":")).encode())


def unpack(packed: bytes) -> bytes:
    """Raises ResponsesUnavailable for data that the disk has changed."""
    try:
        return zlib.decompress(packed)
    except (zlib.error, TypeError):  # the latter: what was bytes became text or a number
        raise ResponsesUnavailable(
            "this stored response is damaged on the disk; delete it, and send the conversation "
            "as 'input'"
        ) from None


def unpack_json(packed: bytes) -> Any:
    return json.loads(unpack(packed))


def add_chunk(connection: sqlite3.Connection, items: list[Json]) -> int:
    """Writes the items and returns the chunk's id."""
    added = connection.execute("INSERT INTO chunk (items) VALUES (?)", (pack_json(items),))
    assert added.lastrowid is not None
    return added.lastrowid


def end_interrupted(connection: sqlite3.Connection, id: str) -> None:
    """Gives a response that no process works on any more the end that it lacks."""
    (packed,) = connection.execute("SELECT body FROM response WHERE id = ?", (id,)).fetchone()
    error = {"code": "server_error", "message": _INTERRUPTED}
    body = unpack_json(packed) | {"status": "failed", "error": error}
    _ = connection.execute(
        "UPDATE response SET status = 'failed', body = ? WHERE id = ?", (pack_json(body), id)
    )
