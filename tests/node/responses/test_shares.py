"""The room of stored responses is shared between clients, each of which has its part."""

import secrets
from pathlib import Path
from typing import Any

import pytest
from stored import run, store_in

from exo_node.node.responses.retention import Limits
from exo_node.node.responses.store import EndedResponse, NewResponse, ResponseStore
from exo_node.placement.errors import ResponseNotFound, ResponsesUnavailable

LIMITS = Limits(bytes=3_000_000, age_s=3600)
IN_PROGRESS: dict[str, Any] = {"status": "in_progress"}


async def begin(store: ResponseStore, id: str, owner: str, size: int = 200_000) -> None:
    items = [{"text": secrets.token_hex(size // 2)}]
    await store.begin(NewResponse(id, owner, True, items), IN_PROGRESS)


async def keep(
    store: ResponseStore, id: str, owner: str, status: str = "completed", *, too_long: bool = False
) -> None:
    await begin(store, id, owner)
    await store.finish(id, EndedResponse(status, {"status": status}, [], is_too_long=too_long))
    store.release(id)


async def kept(store: ResponseStore, owner: str, count: int) -> list[int]:
    there = list[int]()
    for number in range(count):
        try:
            _ = await store.get(f"{owner}{number}", owner)
        except ResponseNotFound:
            continue
        there.append(number)
    return there


def test_a_client_with_more_than_its_share_loses_its_own_oldest(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        for number in range(4):
            await keep(store, f"alice{number}", "alice")
        for number in range(40):
            await keep(store, f"bob{number}", "bob")
        assert await kept(store, "alice", 4) == [0, 1, 2, 3]
        bobs = await kept(store, "bob", 40)
        assert len(bobs) > 10 and bobs == [*range(bobs[0], 40)]

    run(store_in(tmp_path, LIMITS), work)


def test_failed_responses_go_before_others_of_their_client(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await keep(store, "bob0", "bob")
        await keep(store, "bob1", "bob", "failed")
        number = 1
        while len(await kept(store, "bob", number + 1)) == number + 1:
            number += 1
            await keep(store, f"bob{number}", "bob")
        assert await kept(store, "bob", number + 1) == [0, *range(2, number + 1)]

    run(store_in(tmp_path, LIMITS), work)


def test_answers_in_progress_of_one_client_take_no_room_from_another(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await keep(store, "alice0", "alice")
        with pytest.raises(ResponsesUnavailable, match="no room for this response"):
            for number in range(40):
                await begin(store, f"bob{number}", "bob")
        await keep(store, "alice1", "alice")
        await keep(store, "carol0", "carol")
        assert await kept(store, "alice", 2) == [0, 1] and await kept(store, "carol", 1) == [0]

    run(store_in(tmp_path, LIMITS), work)


def test_an_input_that_does_not_fit_the_model_is_not_kept(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await keep(store, "bob0", "bob", "failed", too_long=True)
        assert (await store.get("bob0", "bob")).status == "failed"
        assert await store.input_items("bob0", "bob") == []

    run(store_in(tmp_path, LIMITS), work)
    assert sum(path.stat().st_size for path in (tmp_path / "responses").iterdir()) < 100_000
