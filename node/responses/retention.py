"""The limits on responses: how long, how many bytes, how many. The oldest go first."""

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from ...placement.errors import ResponsesUnavailable
from .tables import last_chunk

_SIZE: Final = """length(body) + coalesce(length(events), 0)
 + (SELECT coalesce(sum(length(items)), 0) FROM chunk WHERE chunk.id IN (input, output))"""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on all responses of a database. `age_s` may be infinite.

    `by_owner`: where they are reached, the owner with the most loses its oldest response, so that
    nobody's responses displace those of others. That looks at all responses, so `number` is small.
    """

    bytes: int
    age_s: float
    number: int = 50_000
    by_owner: bool = False


IN_MEMORY: Final = Limits(bytes=64_000_000, age_s=3600, number=1000, by_owner=True)
"""The limits on responses whose requests do not say whether to store them."""


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
    while _used_bytes(connection) > limits.bytes:
        _delete_oldest(connection, live, _SIZE if limits.by_owner else "")
    while _number(connection) > limits.number:
        _delete_oldest(connection, live, "1" if limits.by_owner else "")


def _delete_oldest(connection: sqlite3.Connection, live: Collection[str], weight: str) -> None:
    """Deletes the oldest response, with a `weight` of those of the owner with the greatest sum."""
    first = f"sum({weight}) OVER (PARTITION BY owner) DESC, " if weight else ""
    oldest = connection.execute(
        f"SELECT id FROM response ORDER BY {first}created, rowid LIMIT ?", (len(live) + 1,)
    ).fetchall()
    for (id,) in oldest:
        if id not in live:
            delete_response(connection, id)
            return
    raise ResponsesUnavailable(
        'there is no room for this response beside those that are being answered; "store": true '
        "and a greater EXO_RESPONSES_GB give more"
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
