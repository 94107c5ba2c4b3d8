"""Responses in memory: bounded, shared fairly between keys, gone after an hour, on no disk."""

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored import run, store_in

from exo_node.node.responses.retention import IN_MEMORY
from exo_node.node.responses.store import EndedResponse, NewResponse, ResponseStore
from exo_node.placement.errors import ResponseNotFound, ResponsesUnavailable

IN_PROGRESS: dict[str, Any] = {"status": "in_progress"}


async def keep(store: ResponseStore, id: str, owner: str = "", size: int = 0) -> None:
    new = NewResponse(id, owner, False, [{"text": secrets.token_hex(size // 2)}], is_stored=False)
    await store.begin(new, IN_PROGRESS)
    await store.finish(id, EndedResponse("completed", {"status": "completed"}, []))
    store.release(id)


async def kept(store: ResponseStore, ids: list[str], owner: str = "") -> list[str]:
    there = list[str]()
    for id in ids:
        try:
            _ = await store.get(id, owner)
        except ResponseNotFound:
            continue
        there.append(id)
    return there


def test_nothing_of_it_is_on_a_disk(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        for number in range(20):
            await keep(store, f"r{number}", size=100_000)
        await store.expire()
        assert len(await store.input_items("r1", "")) == 1
        await store.delete("r1", "")
        assert await kept(store, ["r0", "r1"]) == ["r0"]

    run(store_in(tmp_path), work)
    assert list(tmp_path.iterdir()) == []


def test_it_is_gone_after_an_hour_whether_somebody_asks_or_not(tmp_path: Path) -> None:
    now = [1000.0]

    async def work(store: ResponseStore) -> None:
        await keep(store, "r1")
        now[0] += 3600
        assert await kept(store, ["r1"]) == ["r1"]
        now[0] += 1
        assert await kept(store, ["r1"]) == []
        await store.expire()
        now[0] -= 2
        assert await kept(store, ["r1"]) == [], "its text is deleted"

    run(store_in(tmp_path, clock=lambda: now[0]), work)


@pytest.mark.parametrize(
    ("limits", "flood"),
    [
        (replace(IN_MEMORY, bytes=600_000), [("few", 300_000)] * 20),
        (replace(IN_MEMORY, number=12), [("many", 10)] * 40),
    ],
    ids=["bytes", "number"],
)
def test_one_keys_flood_displaces_its_own_responses_alone(
    tmp_path: Path, limits: Any, flood: list[tuple[str, int]]
) -> None:
    """Few large ones of the other key must not lose against many small ones, nor the reverse."""

    async def work(store: ResponseStore) -> None:
        size = 10 if flood[0][1] > 100 else 40_000
        own = [f"own{number}" for number in range(4)]
        for id in own:
            await keep(store, id, "quiet", size)
        for number, (name, bytes) in enumerate(flood):
            await keep(store, f"{name}{number}", "loud", bytes)
            assert await kept(store, own, "quiet") == own
        loud = [f"{name}{number}" for number, (name, _) in enumerate(flood)]
        there = await kept(store, loud, "loud")
        assert 2 <= len(there) < len(loud) and there == loud[-len(there) :], "its oldest went"

    run(store_in(tmp_path, memory=limits), work)


def test_answers_in_progress_stay_and_one_without_room_says_so(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        text = [{"text": secrets.token_hex(100_000)}]
        await store.begin(NewResponse("live", "a", False, text, is_stored=False), IN_PROGRESS)
        with pytest.raises(ResponsesUnavailable, match="no room for this response"):
            await keep(store, "next", "b", 200_000)
        assert await kept(store, ["next"], "b") == []
        await keep(store, "small", "b", 10)
        await store.finish("live", EndedResponse("completed", {"status": "completed"}, []))
        assert await kept(store, ["live"], "a") == ["live"]

    run(store_in(tmp_path, memory=replace(IN_MEMORY, bytes=200_000)), work)


def test_a_disk_that_fails_does_not_concern_what_is_in_memory(tmp_path: Path) -> None:
    _ = (tmp_path / "responses").write_text("in the way")

    async def work(store: ResponseStore) -> None:
        await keep(store, "r1")
        assert await kept(store, ["r1"]) == ["r1"]
        await store.delete("r1", "")

    run(store_in(tmp_path), work)
