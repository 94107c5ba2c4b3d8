"""A server over fakes that stores responses, and answers that wait for the test."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fakes import FINISHED, Script
from http_node import Node, serving_fakes

from exo_node.node.api.http.drain import Drain
from exo_node.node.api.responses.response_runs import ResponseRuns
from exo_node.node.chat.requests import Event, Started, TextDelta
from exo_node.node.machine.timing import LOCAL
from exo_node.node.responses.database import FILE
from exo_node.node.responses.retention import Limits
from exo_node.node.responses.store import EndedResponse, NewResponse, ResponseStore

Work = Callable[[ResponseStore], Coroutine[Any, Any, None]]
LIMITS = Limits(bytes=50_000_000, age_s=3600)


def store_in(folder: Path, limits: Limits = LIMITS, **options: Any) -> ResponseStore:
    values: dict[str, Any] = {"patience_s": 60, "max_conversation": 1_000_000, **options}
    return ResponseStore(folder / "responses", limits, **values)


def run(store: ResponseStore, work: Work) -> None:
    async def whole() -> None:
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(whole())


async def add(
    store: ResponseStore, id: str, text: str = "hi", previous: str | None = None, owner: str = ""
) -> None:
    items = [{"role": "user", "content": text}]
    await store.begin(NewResponse(id, owner, False, items, previous), {"status": "in_progress"})
    output = [{"type": "message", "content": f"answer to {text}"}]
    await store.finish(id, EndedResponse({"status": "completed"}, output))
    store.release(id)


def number_of_chunks(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "responses" / FILE)) as connection:
        (number,) = connection.execute("SELECT count(*) FROM chunk").fetchone()
    return int(number)


@contextmanager
def serving_stored(
    store: ResponseStore, leaving: Drain | None = None, **options: Any
) -> Generator[Node]:
    """The whole app over fakes and a real store, which is closed at the end."""
    leaving = leaving or Drain(LOCAL)
    runs = ResponseRuns(store, leaving, LOCAL.tick_s)
    try:
        with serving_fakes(responses=runs, between=leaving.around, **options) as node:
            yield node
    finally:
        asyncio.run(store.close())


class Gate:
    """An answer of several words, each of which waits until the test lets it pass."""

    def __init__(self, words: int = 4) -> None:
        self._words = words
        self._passes = threading.Semaphore(0)

    def let(self, words: int) -> None:
        self._passes.release(words)

    def script(self) -> Script:
        async def answer() -> AsyncGenerator[Event]:
            yield Started((1, 2))
            for number in range(self._words):
                while not self._passes.acquire(blocking=False):
                    await asyncio.sleep(0.005)
                yield TextDelta(f"word{number} ", (number,))
            yield FINISHED

        return answer
