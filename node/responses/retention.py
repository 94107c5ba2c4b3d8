"""The limits on responses: how long, how many bytes, how many.

Where they are reached, the owner with the most loses a response: one that failed before others,
then the oldest. So no owner's responses displace those of one that has less than its share.
"""

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
    """The limits on all responses of a database. `age_s` may be infinite."""

    bytes: int
    age_s: float
    number: int = 50_000


IN_MEMORY: Final = Limits(bytes=64_000_000, age_s=3600, number=1000)
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
    connection: sqlite3.Connection,
    limits: Limits,
    now: float,
    live: Collection[str],
    writer: str | None = None,
) -> None:
    """Deletes what is too old, then responses until the limits hold.

    `live`: responses that are being answered, which stay. `writer`: the owner of what was just
    written. Raises ResponsesUnavailable if nothing of those that have the most can be deleted, and
    the writer is one of them; another writer may exceed the limits meanwhile.
    """
    too_old = connection.execute(
        "SELECT id FROM response WHERE created < ?", (max(0.0, now - limits.age_s),)
    ).fetchall()
    for (id,) in too_old:
        if id not in live:
            delete_response(connection, id)
    for cost, used, most in ((_SIZE, _used_bytes, limits.bytes), ("1", _number, limits.number)):
        # A hundredth more goes at a time, since the shares are sums over all responses.
        goal, shares = most - most // 100 if used(connection) > most else most, dict[str, int]()
        while used(connection) > goal:
            shares = shares or _shares(connection, cost)
            if not _delete_one(connection, shares, cost, most, live, writer):
                break


def _shares(connection: sqlite3.Connection, cost: str) -> dict[str, int]:
    """The sums by owner of what each response costs."""
    rows = connection.execute(f"SELECT owner, sum({cost}) FROM response GROUP BY owner")
    return dict(rows.fetchall())


def _delete_one(
    connection: sqlite3.Connection,
    shares: dict[str, int],
    cost: str,
    most: int,
    live: Collection[str],
    writer: str | None,
) -> bool:
    """Deletes a response of an owner that has more than its share. Returns False if none can be.

    Raises ResponsesUnavailable if the writer is such an owner.
    """
    owners = sorted(shares, key=lambda owner: -shares[owner])
    fair = min(most // max(1, len(owners)), max(shares.values(), default=0))
    greedy = [owner for owner in owners if shares[owner] >= fair]
    for owner in greedy:
        candidates = connection.execute(
            f"SELECT id, {cost} FROM response WHERE owner = ?"
            " ORDER BY status != 'failed', created, rowid LIMIT ?",
            (owner, len(live) + 1),
        ).fetchall()
        for id, size in candidates:
            if id not in live:
                delete_response(connection, id)
                shares[owner] -= size
                return True
    if writer not in greedy:
        return False
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
