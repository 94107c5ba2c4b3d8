"""Stored responses by id: written when they begin and end, read, continued, deleted.

A response belongs to its owner: the id of another's is as unknown as one that never was.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ...placement.errors import (
    InvalidRequest,
    PreviousResponseNotFound,
    ResponseNotFound,
)
from .database import Database, Value, Work
from .retention import Limits, delete_response, retain
from .tables import (
    RUNNING,
    Json,
    add_chunk,
    chain,
    end_interrupted,
    last_chunk,
    pack,
    pack_json,
    unpack,
    unpack_json,
)

FOLDER: Final = "responses"
"""The folder of the database, in the data folder."""


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A response that begins. `items`: the input that it adds to the `previous` conversation."""

    id: str
    owner: str
    is_background: bool
    items: list[Json] = field(repr=False)
    previous: str | None = None


@dataclass(frozen=True, slots=True)
class EndedResponse:
    """The end of a response. `output`: the items with which a next response may continue it.

    `events`: the frames of its stream, empty unless it was answered in the background.
    """

    status: str
    body: Json = field(repr=False)
    output: list[Json] = field(repr=False)
    events: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was stored. `body`: its JSON."""

    status: str
    background: bool
    body: bytes = field(repr=False)
    events: bytes = field(repr=False)


class ResponseStore:
    """The stored responses of one data folder. Its calls raise ResponsesUnavailable.

    `max_conversation`: the most bytes of a conversation that a response may continue.
    """

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        *,
        patience_s: float,
        max_conversation: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = Database(folder, patience_s)
        self._limits = limits
        self._max_conversation = max_conversation
        self._clock = clock
        self._live: set[str] = set()
        """Responses that are being answered. One in the file that is none of them was interrupted
        before it ended."""

    async def begin(self, new: NewResponse, body: Json) -> None:
        """Stores a response that is being answered, until `release`. `body`: its JSON so far.

        Raises PreviousResponseNotFound if the one that it continues was deleted.
        """

        def work(connection: sqlite3.Connection) -> None:
            previous = _continued(connection, new.previous)
            input = add_chunk(connection, new.items, previous)
            row = (new.id, new.owner, int(self._clock()), body["status"], new.is_background)
            _ = connection.execute(
                "INSERT INTO response (id, owner, created, status, background, input, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*row, input, pack_json(body)),
            )
            retain(connection, self._limits, self._clock(), live)

        live = self._live | {new.id}
        await self._database.run(work)
        self._live.add(new.id)

    async def finish(self, id: str, end: EndedResponse) -> None:
        """Stores the end of a response; it is on the disk when this returns.

        Raises ResponseNotFound if it was deleted meanwhile.
        """

        def work(connection: sqlite3.Connection) -> None:
            input = last_chunk(connection, id)
            if input is None:
                raise ResponseNotFound("the response was deleted before it ended")
            output = add_chunk(connection, end.output, input)
            events = pack(end.events) if end.events else None
            _ = connection.execute(
                "UPDATE response SET status = ?, output = ?, body = ?, events = ? WHERE id = ?",
                (end.status, output, pack_json(end.body), events, id),
            )
            retain(connection, self._limits, self._clock(), live)

        live = frozenset(self._live | {id})
        await self._database.run(work)

    def release(self, id: str) -> None:
        """Notes that no answer runs for the response any more: one without an end has failed."""
        self._live.discard(id)

    async def get(self, id: str, owner: str) -> StoredResponse:
        """Raises ResponseNotFound."""

        def work(connection: sqlite3.Connection) -> StoredResponse:
            _ = self._check(connection, id, owner)
            status, background, body, events = connection.execute(
                "SELECT status, background, body, events FROM response WHERE id = ?", (id,)
            ).fetchone()
            return StoredResponse(
                status, bool(background), unpack(body), unpack(events) if events else b""
            )

        return await self._existing(work, id)

    async def input_items(self, id: str, owner: str) -> list[Json]:
        """The conversation up to the response's own output. Raises ResponseNotFound."""

        def work(connection: sqlite3.Connection) -> list[Json]:
            _ = self._check(connection, id, owner)
            (input,) = connection.execute(
                "SELECT input FROM response WHERE id = ?", (id,)
            ).fetchone()
            return [item for packed in chain(connection, input) for item in unpack_json(packed)]

        return await self._existing(work, id)

    async def conversation(self, id: str, owner: str) -> list[Json]:
        """The items of the response's input and output, which a next response continues.

        Raises PreviousResponseNotFound, and InvalidRequest if it cannot be continued.
        """

        def work(connection: sqlite3.Connection) -> list[Json]:
            if self._check(connection, id, owner) in RUNNING:
                raise InvalidRequest(
                    f"the response '{id[:64]}' has not ended; wait until it has, or cancel it",
                    param="previous_response_id",
                )
            return self._joined(chain(connection, _continued(connection, id)))

        try:
            return await self._existing(work, id)
        except ResponseNotFound as fault:
            raise PreviousResponseNotFound(
                f"{fault.message}; send the whole conversation as 'input'",
                param="previous_response_id",
            ) from None

    async def delete(self, id: str, owner: str) -> None:
        """Raises ResponseNotFound."""

        def work(connection: sqlite3.Connection) -> None:
            _ = self._check(connection, id, owner)
            delete_response(connection, id)
            retain(connection, self._limits, self._clock(), live)

        live = frozenset(self._live)
        await self._existing(work, id)

    async def expire(self) -> None:
        """Deletes what has become too old."""
        live = frozenset(self._live)
        if await self._database.exists():
            await self._database.run(lambda each: retain(each, self._limits, self._clock(), live))

    async def close(self) -> None:
        await self._database.close()

    async def _existing(self, work: Work[Value], id: str) -> Value:
        """Runs `work` if there is a file; looking creates none."""
        if not await self._database.exists():
            raise _not_found(id)
        return await self._database.run(work)

    def _check(self, connection: sqlite3.Connection, id: str, owner: str) -> str:
        """The status of the owner's response. Raises ResponseNotFound."""
        row = connection.execute(
            "SELECT status FROM response WHERE id = ? AND owner = ? AND created >= ?",
            (id, owner, max(0.0, self._clock() - self._limits.age_s)),
        ).fetchone()
        if row is None:
            raise _not_found(id)
        status: str = row[0]
        if status in RUNNING and id not in self._live:
            end_interrupted(connection, id)
            return "failed"
        return status

    def _joined(self, chunks: Iterable[bytes]) -> list[Json]:
        """The items of a conversation. Raises InvalidRequest if it is too long."""
        items, remaining = list[Json](), self._max_conversation
        for packed in chunks:
            content = unpack(packed)
            remaining -= len(content)
            if remaining < 0:
                raise InvalidRequest(
                    f"the conversation behind 'previous_response_id' is longer than "
                    f"{self._max_conversation} bytes; begin another one with what matters of it",
                    param="previous_response_id",
                )
            items += json.loads(content)
        return items


def _continued(connection: sqlite3.Connection, previous: str | None) -> int | None:
    """The chunk behind which a response begins. Raises PreviousResponseNotFound."""
    if previous is None:
        return None
    chunk = last_chunk(connection, previous)
    if chunk is None:
        raise PreviousResponseNotFound(
            f"the response '{previous}' was deleted; send the whole conversation as 'input'",
            param="previous_response_id",
        )
    return chunk


def _not_found(id: str) -> ResponseNotFound:
    return ResponseNotFound(
        f"this node stores no response '{id[:64]}': it was made without \"store\": true, with "
        "another key, or on another node, or it was deleted or has expired"
    )
