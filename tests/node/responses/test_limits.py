"""The limits on responses, on the disk and in memory: an hour, and shares of the room by key."""

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored import run, store_in

from exo_node.node.responses.retention import IN_MEMORY, Limits
from exo_node.node.responses.store import EndedResponse, NewResponse, ResponseStore
from exo_node.placement.errors import ResponseNotFound, ResponsesUnavailable

LIMITS = Limits(bytes=3_000_000, age_s=3600)
IN_PROGRESS: dict[str, Any] = {"status": "in_progress"}


async def begin(
    store: ResponseStore, id: str, owner: str = "", size: int = 200_000, *, stored: bool = True
) -> None:
    items = [{"text": secrets.token_hex(size // 2)}]
    await store.begin(NewResponse(id, owner, False, items, is_stored=stored), IN_PROGRESS)


async def keep(
    store: ResponseStore,
    id: str,
    owner: str = "",
    size: int = 200_000,
    status: str = "completed",
    *,
    stored: bool = True,
    too_long: bool = False,
) -> None:
    await begin(store, id, owner, size, stored=stored)
    await store.finish(id, EndedResponse({"status": status}, [], is_too_long=too_long))
    store.release(id)


async def present(store: ResponseStore, ids: list[str], owner: str = "") -> list[str]:
    there = list[str]()
    for id in ids:
        try:
            _ = await store.get(id, owner)
        except ResponseNotFound:
            continue
        there.append(id)
    return there


def test_what_is_in_memory_is_on_no_disk(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        for number in range(20):
            await keep(store, f"r{number}", size=100_000, stored=False)
        await store.expire()
        assert len(await store.input_items("r1", "")) == 1
        await store.delete("r1", "")
        assert await present(store, ["r0", "r1"]) == ["r0"]

    run(store_in(tmp_path), work)
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_memory_is_gone_after_an_hour(tmp_path: Path) -> None:
    now = [1000.0]

    async def work(store: ResponseStore) -> None:
        await keep(store, "r1", stored=False)
        now[0] += 3600
        assert await present(store, ["r1"]) == ["r1"]
        now[0] += 1
        assert await present(store, ["r1"]) == []
        await store.expire()
        now[0] -= 2
        assert await present(store, ["r1"]) == [], "its text is deleted"

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
            await keep(store, id, "quiet", size, stored=False)
        for number, (name, bytes) in enumerate(flood):
            await keep(store, f"{name}{number}", "loud", bytes, stored=False)
            assert await present(store, own, "quiet") == own
        loud = [f"{name}{number}" for number, (name, _) in enumerate(flood)]
        there = await present(store, loud, "loud")
        assert 2 <= len(there) < len(loud) and there == loud[-len(there) :], "its oldest went"

    run(store_in(tmp_path, memory=limits), work)


@pytest.mark.parametrize("stored", [True, False])
def test_answers_in_progress_of_one_key_take_no_room_from_another(
    tmp_path: Path, stored: bool
) -> None:
    async def work(store: ResponseStore) -> None:
        await keep(store, "alice0", "alice", stored=stored)
        with pytest.raises(ResponsesUnavailable, match="no room for this response"):
            for number in range(40):
                await begin(store, f"bob{number}", "bob", stored=stored)
        await keep(store, "alice1", "alice", stored=stored)
        await keep(store, "carol0", "carol", stored=stored)
        assert await present(store, ["alice0", "alice1"], "alice") == ["alice0", "alice1"]
        assert await present(store, ["carol0"], "carol") == ["carol0"]

    run(store_in(tmp_path, LIMITS, memory=LIMITS), work)


def test_failed_responses_go_before_others_of_their_key(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await keep(store, "r0")
        await keep(store, "r1", status="failed")
        ids = ["r0", "r1"]
        while await present(store, ids) == ids:
            ids.append(f"r{len(ids)}")
            await keep(store, ids[-1])
        assert await present(store, ids) == ["r0", *ids[2:]]

    run(store_in(tmp_path, LIMITS), work)


def test_an_input_that_does_not_fit_the_model_is_not_kept(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await keep(store, "bob0", "bob", status="failed", too_long=True)
        assert (await store.get("bob0", "bob")).status == "failed"
        assert await store.input_items("bob0", "bob") == []

    run(store_in(tmp_path, LIMITS), work)
    assert sum(path.stat().st_size for path in (tmp_path / "responses").iterdir()) < 100_000


def test_a_disk_that_fails_does_not_concern_what_is_in_memory(tmp_path: Path) -> None:
    _ = (tmp_path / "responses").write_text("in the way")

    async def work(store: ResponseStore) -> None:
        await keep(store, "r1", stored=False)
        assert await present(store, ["r1"]) == ["r1"]
        await store.delete("r1", "")

    run(store_in(tmp_path), work)
