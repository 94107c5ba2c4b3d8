"""The limits on stored responses: how long, how many bytes, how many. The oldest go first."""

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass

from ...placement.errors import ResponsesUnavailable
from .tables import last_chunk


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on all stored responses. `age_s` may be infinite."""

    bytes: int
    age_s: float
    number: int = 50_000


def delete_response(connection: sqlite3.Connection, id: str) -> None:
    """Deletes a response, and the text that no other needs."""
    chunk = last_chunk(connection, id)
    _ = connection.execute("DELETE FROM response WHERE id = ?", (id,))
    while chunk is not None:
        unused = connection.execute(
            "SELECT previous FROM chunk WHERE id = ?1"
            " AND NOT EXISTS (SELECT 1 FROM chunk WHERE previous = ?1)"
            " AND NOT EXISTS (SELECT 1 FROM response WHERE input = ?1 OR output = ?1)",
            (chunk,),
        ).fetchone()
        if unused is None:
            return
        _ = connection.execute("DELETE FROM chunk WHERE id = ?", (chunk,))
        (chunk,) = unused


def retain(
    connection: sqlite3.Connection, limits: Limits, now: float, live: Collection[str]
) -> None:
    """Deletes what is too old, then the oldest responses until the limits hold.

    `live`: responses that are being answered, which stay. Raises ResponsesUnavailable if nothing
    else is left to delete.
    """
    too_old = connection.execute(
        "SELECT id FROM response WHERE created < ?", (max(0.0, now - limits.age_s),)
    ).fetchall()
    for (id,) in too_old:
        if id not in live:
            delete_response(connection, id)
    while _used_bytes(connection) > limits.bytes or _number(connection) > limits.number:
        _delete_oldest(connection, live)


def _delete_oldest(connection: sqlite3.Connection, live: Collection[str]) -> None:
    oldest = connection.execute(
        "SELECT id FROM response ORDER BY created, rowid LIMIT ?", (len(live) + 1,)
    ).fetchall()
    for (id,) in oldest:
        if id not in live:
            delete_response(connection, id)
            return
    raise ResponsesUnavailable(
        "the stored responses have no room for this one; raise EXO_RESPONSES_GB, or leave 'store' "
        "out"
    )


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages = _pragma(connection, "page_count") - _pragma(connection, "freelist_count")
    return pages * _pragma(connection, "page_size")


def _number(connection: sqlite3.Connection) -> int:
    (number,) = connection.execute("SELECT count(*) FROM response").fetchone()
    return int(number)


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)
