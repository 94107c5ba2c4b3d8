"""Conversations of stored responses: their space on the disk, and files of earlier versions."""

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from stored import add, number_of_chunks, run, store_in

from exo_node.node.responses.database import FILE, FileDatabase
from exo_node.node.responses.store import EndedResponse, NewResponse, ResponseStore
from exo_node.node.responses.tables import ItemPlace
from exo_node.placement.errors import InvalidRequest, PreviousResponseNotFound, ResponsesUnavailable


def test_a_turn_takes_space_for_its_own_text_alone(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await add(store, ids[0])
        for previous, id in pairwise(ids):
            await add(store, id, previous=previous)
            sizes.append(path.stat().st_size)
        assert len(await store.conversation(ids[-1], "")) == 2 * len(ids)

    ids = [f"resp_{number:024}" for number in range(60)]
    sizes = list[int]()
    path = tmp_path / "responses" / FILE
    run(store_in(tmp_path), work)
    assert sizes[-1] - sizes[-31] < 30 * 2000


def test_text_that_two_responses_continue_goes_with_the_last_of_them(tmp_path: Path) -> None:
    async def texts(store: ResponseStore, id: str) -> list[str]:
        return [item["content"] for item in await store.conversation(id, "")]

    async def work(store: ResponseStore) -> None:
        await add(store, "root")
        await add(store, "left", "left", previous="root")
        await add(store, "right", "right", previous="root")
        await store.delete("root", "")
        await store.delete("left", "")
        assert await texts(store, "right") == ["hi", "answer to hi", "right", "answer to right"]
        inputs = await store.input_items("right", "")
        assert [item["content"] for item in inputs] == ["hi", "answer to hi", "right"]
        assert number_of_chunks(tmp_path) == 4
        await add(store, "end", "end", previous="right")
        await store.delete("end", "")
        assert await texts(store, "right") == ["hi", "answer to hi", "right", "answer to right"]
        await store.delete("right", "")
        assert number_of_chunks(tmp_path) == 0

    run(store_in(tmp_path), work)


def test_a_conversation_that_damage_made_a_circle_ends(tmp_path: Path) -> None:
    run(store_in(tmp_path), lambda store: add(store, "r1"))
    with sqlite3.connect(tmp_path / "responses" / FILE) as connection:
        _ = connection.execute("UPDATE chunk SET previous = 3 - id")

    async def use(store: ResponseStore) -> None:
        assert len(await store.conversation("r1", "")) == 2

    run(store_in(tmp_path), use)


def test_a_response_that_damage_took_the_conversation_of_can_be_deleted(tmp_path: Path) -> None:
    run(store_in(tmp_path), lambda store: add(store, "r1"))
    with sqlite3.connect(tmp_path / "responses" / FILE) as connection:
        _ = connection.execute("UPDATE response SET input = NULL, output = NULL")

    async def use(store: ResponseStore) -> None:
        with pytest.raises(PreviousResponseNotFound):
            await add(store, "r2", previous="r1")
        with pytest.raises(PreviousResponseNotFound):
            _ = await store.conversation("r1", "")
        await store.delete("r1", "")
        await add(store, "r3")

    run(store_in(tmp_path), use)


LISTS: dict[str, Any] = {"role": "user", "tools": [{"parameters": {"x": [[]] * 30_000}}]}


def test_what_many_turns_add_up_to_is_bounded_like_one_body(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        previous: str | None = None
        for id in ("r1", "r2", "r3", "r4"):
            await store.begin(NewResponse(id, "", False, [LISTS], previous), {"status": "queued"})
            await store.finish(id, EndedResponse({"status": "completed"}, []))
            store.release(id)
            previous = id
        assert len(await store.conversation("r3", "")) == 3
        for refused in (store.conversation("r4", ""), store.input_items("r4", "")):
            with pytest.raises(InvalidRequest, match="or 100000 lists and objects"):
                _ = await refused
        places = [ItemPlace(id, "input") for id in ("r1", "r2", "r3", "r4")]
        with pytest.raises(InvalidRequest, match="or 100000 lists and objects"):
            _ = await store.own_items(places, "")

    run(store_in(tmp_path, max_conversation=40_000_000), work)


def test_texts_are_not_parsed_in_the_thread_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[str]()
    for name in ("loads", "dumps"):
        own: Callable[..., Any] = getattr(json, name)

        def watched(*args: Any, own: Callable[..., Any] = own, **options: Any) -> Any:
            threads.add(threading.current_thread().name)
            return own(*args, **options)

        monkeypatch.setattr(json, name, watched)

    async def work(store: ResponseStore) -> None:
        await add(store, "r1")
        await add(store, "r2", previous="r1")
        _ = await store.conversation("r2", ""), await store.input_items("r2", "")

    run(store_in(tmp_path), work)
    assert threads and all(name.startswith("response-texts") for name in threads)


def test_patience_is_for_work_that_does_not_end(tmp_path: Path) -> None:
    """Others' work before one's own is no reason to give up while it ends now and then."""

    async def run_all() -> None:
        database = FileDatabase(tmp_path / "responses", patience_s=0.5)
        try:
            calls = [database.run(lambda _: time.sleep(0.2)) for _ in range(6)]
            _ = await asyncio.gather(*calls)
            with pytest.raises(ResponsesUnavailable, match="does not answer"):
                await database.run(lambda _: time.sleep(1.5))
        finally:
            await database.close()

    asyncio.run(run_all())
