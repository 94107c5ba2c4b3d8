"""Responses by id: written when they begin and end, read, continued, deleted.

Those that a request asks to store are in a file. Those of requests that do not say are in memory,
for an hour. A response belongs to its owner: the id of another's is as unknown as one that never
was.
"""

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, cast

from ...placement.errors import InvalidRequest, PreviousResponseNotFound, ResponseNotFound
from ..machine.json_size import MAX_CONTAINERS, MAX_ELEMENTS, Room, fits
from .database import Database, FileDatabase, Value
from .retention import IN_MEMORY, Limits, delete_response, retain
from .tables import (
    RUNNING,
    ItemPlace,
    Json,
    add_chunk,
    chain,
    end_interrupted,
    last_chunk,
    own_chunk,
    pack,
    pack_json,
    unpack,
)

FOLDER: Final = "responses"
"""The folder of the database, in the data folder."""
PREVIOUS: Final = "previous_response_id"
_CONVERSATION: Final = f"the conversation of '{PREVIOUS}' has"
_INPUT: Final = "the input of this response has"


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A response that begins. `items`: the input that it adds to the `previous` conversation.

    `is_stored`: in the file; otherwise in memory.
    """

    id: str
    owner: str
    is_background: bool
    items: list[Json] = field(repr=False)
    previous: str | None = None
    is_stored: bool = True


@dataclass(frozen=True, slots=True)
class EndedResponse:
    """The end of a response. `output`: the items with which a next response may continue it.

    `events`: the frames of its stream, empty unless it was answered in the background.
    """

    body: Json = field(repr=False)
    output: list[Json] = field(repr=False)
    events: bytes = field(default=b"", repr=False)
    is_too_long: bool = False
    """Whether its input does not fit the model: it is not kept then."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was stored. `body`: its JSON."""

    status: str
    background: bool
    body: bytes = field(repr=False)
    events: bytes = field(repr=False)


_Work = Callable[[sqlite3.Connection, Limits], Value]


@dataclass(frozen=True, slots=True)
class _Tier:
    database: Database
    limits: Limits

    async def run(self, work: _Work[Value]) -> Value:
        return await self.database.run(lambda connection: work(connection, self.limits))


class ResponseStore:
    """The responses of a node, in a file of `folder` and in `memory`, each within its limits.

    Its calls raise ResponsesUnavailable. `max_conversation`: the most bytes of a conversation that
    a response may continue.
    """

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        *,
        memory: Limits = IN_MEMORY,
        patience_s: float,
        max_conversation: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._file = _Tier(FileDatabase(folder, patience_s), limits)
        self._memory = _Tier(Database(patience_s), memory)
        self._max_conversation = max_conversation
        self._clock = clock
        self._thread = ThreadPoolExecutor(2, thread_name_prefix="response-texts")
        self._live: dict[str, _Tier] = {}
        """Responses that are being answered, and where. One in the file that is none of them was
        interrupted before it ended."""

    async def begin(self, new: NewResponse, body: Json) -> None:
        """Stores a response that is being answered, until `release`. `body`: its JSON so far.

        Raises PreviousResponseNotFound if the one that it continues was deleted.
        """

        def work(
            connection: sqlite3.Connection,
            limits: Limits,
            previous: str | None,
            chunks: Sequence[bytes],
        ) -> None:
            input = _continued(connection, previous)
            for chunk in chunks:
                input = add_chunk(connection, chunk, input)
            row = (new.id, new.owner, int(self._clock()), body["status"], new.is_background)
            _ = connection.execute(
                "INSERT INTO response (id, owner, created, status, background, input, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*row, input, packed_body),
            )
            retain(connection, limits, self._clock(), live, new.owner)

        items, packed_body = await self._off_the_loop(
            lambda: (pack_json(new.items), pack_json(body))
        )
        tier = self._file if new.is_stored else self._memory
        live = {*self._live, new.id}
        try:
            await tier.run(partial(work, previous=new.previous, chunks=[items]))
        except PreviousResponseNotFound:
            # It may be in the other place, whose texts have to be copied then.
            earlier = await self._conversation(new.previous or "", new.owner)
            await tier.run(partial(work, previous=None, chunks=[*earlier, items]))
        self._live[new.id] = tier

    async def finish(self, id: str, end: EndedResponse) -> None:
        """Stores the end of a response; that of a stored one is on the disk when this returns.

        Raises ResponseNotFound if it was deleted meanwhile.
        """

        def work(connection: sqlite3.Connection, limits: Limits) -> None:
            input = last_chunk(connection, id)
            if input is None:
                raise ResponseNotFound("the response was deleted before it ended")
            if end.is_too_long:
                _ = connection.execute("UPDATE chunk SET items = ? WHERE id = ?", (nothing, input))
            row = (end.body["status"], add_chunk(connection, output, input), body, events, id)
            (owner,) = connection.execute(
                "UPDATE response SET status = ?, output = ?, body = ?, events = ? WHERE id = ?"
                " RETURNING owner",
                row,
            ).fetchone()
            retain(connection, limits, self._clock(), live, owner)

        def packed() -> tuple[bytes, bytes, bytes | None]:
            events = pack(end.events) if end.events else None
            return pack_json(end.output), pack_json(end.body), events

        output, body, events = await self._off_the_loop(packed)
        live, nothing = {*self._live, id}, pack_json([])
        await self._live.get(id, self._file).run(work)

    def release(self, id: str) -> None:
        """Notes that no answer runs for the response any more: one without an end has failed."""
        _ = self._live.pop(id, None)

    async def get(self, id: str, owner: str) -> StoredResponse:
        """The response. Raises ResponseNotFound."""

        def work(
            connection: sqlite3.Connection, limits: Limits
        ) -> tuple[str, int, bytes, bytes | None]:
            _ = self._check(connection, limits, id, owner)
            return connection.execute(
                "SELECT status, background, body, events FROM response WHERE id = ?", (id,)
            ).fetchone()

        status, background, body, events = await self._find(work, id)
        return await self._off_the_loop(
            lambda: StoredResponse(
                status, bool(background), unpack(body), unpack(events) if events else b""
            )
        )

    async def input_items(self, id: str, owner: str) -> list[Json]:
        """The conversation up to the response's own output.

        Raises ResponseNotFound, and InvalidRequest if it is too long.
        """

        def work(connection: sqlite3.Connection, limits: Limits) -> list[bytes]:
            _ = self._check(connection, limits, id, owner)
            (input,) = connection.execute(
                "SELECT input FROM response WHERE id = ?", (id,)
            ).fetchone()
            return self._bounded(chain(connection, input), _INPUT, "id")

        return await self._items(await self._find(work, id), _INPUT, "id")

    async def own_items(self, places: Collection[ItemPlace], owner: str) -> list[Json]:
        """The items there; none of responses that are not here.

        Raises InvalidRequest if that is too much.
        """

        def work(connection: sqlite3.Connection, limits: Limits) -> list[bytes]:
            chunks = (
                packed
                for place in places
                if self._is_there(connection, limits, place.response, owner)
                for packed in own_chunk(connection, place)
            )
            return self._bounded(chunks, which, "input")

        which, chunks = "the responses that 'input' refers to have", list[bytes]()
        for tier in self._tiers:
            if await tier.database.exists():
                chunks += await tier.run(work)
        return await self._items(chunks, which, "input")

    async def conversation(self, id: str, owner: str) -> list[Json]:
        """The items of the response's input and output, which a next response continues.

        Raises PreviousResponseNotFound, and InvalidRequest if it cannot be continued.
        """
        return await self._items(await self._conversation(id, owner), _CONVERSATION, PREVIOUS)

    async def _conversation(self, id: str, owner: str) -> list[bytes]:
        def work(connection: sqlite3.Connection, limits: Limits) -> list[bytes]:
            if self._check(connection, limits, id, owner) in RUNNING:
                raise InvalidRequest(
                    f"the response '{id[:64]}' has not ended; wait until it has, or cancel it",
                    param=PREVIOUS,
                )
            chunks = chain(connection, _continued(connection, id))
            return self._bounded(chunks, _CONVERSATION, PREVIOUS)

        try:
            return await self._find(work, id)
        except ResponseNotFound as fault:
            raise PreviousResponseNotFound(
                f"{fault.message}; send the whole conversation as 'input'", param=PREVIOUS
            ) from None

    async def delete(self, id: str, owner: str) -> None:
        """Deletes a response. Raises ResponseNotFound."""

        def work(connection: sqlite3.Connection, limits: Limits) -> None:
            _ = self._check(connection, limits, id, owner)
            delete_response(connection, id)
            retain(connection, limits, self._clock(), live)

        live = frozenset(self._live)
        await self._find(work, id)

    async def expire(self) -> None:
        live, now = frozenset(self._live), self._clock()
        for tier in self._tiers:
            if await tier.database.exists():
                await tier.run(lambda each, limits: retain(each, limits, now, live))

    async def close(self) -> None:
        for tier in self._tiers:
            await tier.database.close()
        self._thread.shutdown(wait=False)

    async def _off_the_loop(self, work: Callable[[], Value]) -> Value:
        """Runs `work` beside the loop and the thread of the disk, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @property
    def _tiers(self) -> tuple[_Tier, _Tier]:
        return self._memory, self._file

    async def _find(self, work: _Work[Value], id: str) -> Value:
        """Runs `work` where the response is; looking creates no file. Raises ResponseNotFound."""
        for tier in self._tiers:
            if await tier.database.exists():
                with suppress(ResponseNotFound):
                    return await tier.run(work)
        raise _not_found(id)

    def _is_there(
        self, connection: sqlite3.Connection, limits: Limits, id: str, owner: str
    ) -> bool:
        with suppress(ResponseNotFound):
            return bool(self._check(connection, limits, id, owner))
        return False

    def _check(self, connection: sqlite3.Connection, limits: Limits, id: str, owner: str) -> str:
        """The status of the owner's response. Raises ResponseNotFound."""
        row = connection.execute(
            "SELECT status FROM response WHERE id = ? AND owner = ? AND created >= ?",
            (id, owner, max(0.0, self._clock() - limits.age_s)),
        ).fetchone()
        if row is None:
            raise _not_found(id)
        status: str = row[0]
        if status in RUNNING and id not in self._live:
            end_interrupted(connection, id)
            return "failed"
        return status

    def _bounded(self, chunks: Iterable[object], which: str, param: str) -> list[bytes]:
        """These packed chunks, which are no larger than what they contain."""
        packed, remaining = list[bytes](), self._max_conversation
        for chunk in chunks:
            packed.append(cast("bytes", chunk))  # `unpack` refuses what damage has made of it
            remaining -= len(chunk) if isinstance(chunk, bytes) else 0
            if remaining < 0:
                raise self._too_long(which, param)
        return packed

    async def _items(self, chunks: Sequence[bytes], which: str, param: str) -> list[Json]:
        """The items of these chunks. Raises InvalidRequest if they are too many or too long."""

        def items() -> list[Json]:
            items, room, remaining = list[Json](), Room(), self._max_conversation
            for packed in chunks:
                text = unpack(packed, max(1, remaining))
                remaining -= len(text)
                if remaining < 0 or not fits(text, room):
                    raise self._too_long(which, param)
                items += json.loads(text)
            return items

        return await self._off_the_loop(items)

    def _too_long(self, which: str, param: str) -> InvalidRequest:
        return InvalidRequest(
            f"{which} more than {self._max_conversation} bytes, or {MAX_CONTAINERS} lists and "
            f"objects, or {MAX_ELEMENTS} elements; begin another conversation with what matters "
            "of it",
            param=param,
        )


def _continued(connection: sqlite3.Connection, previous: str | None) -> int | None:
    """The chunk after which a response begins. Raises PreviousResponseNotFound."""
    if previous is None:
        return None
    chunk = last_chunk(connection, previous)
    if chunk is None:
        raise PreviousResponseNotFound(
            f"the response '{previous}' was deleted; send the whole conversation as 'input'",
            param=PREVIOUS,
        )
    return chunk


def _not_found(id: str) -> ResponseNotFound:
    return ResponseNotFound(
        f"this node has no response '{id[:64]}': it was made with \"store\": false, with another "
        'key, or on another node, or it was deleted or has expired; without "store": true one '
        "stays for an hour at most, and not when the node restarts"
    )
