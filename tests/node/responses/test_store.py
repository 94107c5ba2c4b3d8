"""The file of stored responses: what stays, what goes, and what happens to a damaged one."""

import secrets
import shutil
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from disks import FilledDisk, small_disk
from stored import LIMITS, add, number_of_chunks, run, store_in

from exo_node.node.responses.database import FILE
from exo_node.node.responses.store import EndedResponse, NewResponse, ResponseStore
from exo_node.node.responses.tables import VERSION
from exo_node.placement.errors import (
    InvalidRequest,
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponsesUnavailable,
)


async def is_there(store: ResponseStore, id: str) -> bool:
    try:
        _ = await store.get(id, "")
    except ResponseNotFound:
        return False
    return True


def test_only_the_nodes_user_may_read_the_files(tmp_path: Path) -> None:
    run(store_in(tmp_path), lambda store: add(store, "r1"))
    folder = tmp_path / "responses"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}


def test_looking_for_a_response_creates_no_file(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        assert not await is_there(store, "r1")
        await store.expire()

    run(store_in(tmp_path), work)
    assert list(tmp_path.iterdir()) == []


def test_text_that_no_response_needs_is_off_the_disk(tmp_path: Path) -> None:
    marks = [secrets.token_hex(3000) for _ in range(2)]

    async def work(store: ResponseStore) -> None:
        await add(store, "r1", marks[0])
        await add(store, "r2", marks[1], previous="r1")
        await store.delete("r1", "")
        items = await store.conversation("r2", "")
        assert [item["content"] for item in items][:3:2] == marks
        assert size() > 3000
        await store.delete("r2", "")

    def size() -> int:
        data = (tmp_path / "responses" / FILE).read_bytes()
        return len(data.replace(b"\0", b""))

    run(store_in(tmp_path), work)
    assert size() < 2500, "only the schema is left"


def test_the_oldest_responses_make_room(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        for number in range(12):
            await add(store, f"r{number}", secrets.token_hex(20_000))
        there = [number for number in range(12) if await is_there(store, f"r{number}")]
        assert there == list(range(there[0], 12)) and 3 < len(there) < 12

    run(store_in(tmp_path, replace(LIMITS, bytes=300_000)), work)
    assert (tmp_path / "responses" / FILE).stat().st_size <= 300_000
    run(store_in(tmp_path, replace(LIMITS, bytes=100_000)), lambda store: store.expire())
    assert (tmp_path / "responses" / FILE).stat().st_size <= 100_000, "the file becomes smaller"


def test_a_response_expires_and_one_that_is_answered_does_not(tmp_path: Path) -> None:
    now = [1000.0]

    async def work(store: ResponseStore) -> None:
        await add(store, "old")
        await store.begin(NewResponse("long", "", True, []), {"status": "queued"})
        now[0] += LIMITS.age_s
        assert await is_there(store, "old")
        now[0] += 1
        assert not await is_there(store, "old")
        with pytest.raises(PreviousResponseNotFound):
            _ = await store.conversation("old", "")
        await store.expire()
        await store.finish("long", EndedResponse({"status": "completed"}, []))

    run(store_in(tmp_path, clock=lambda: now[0]), work)
    assert number_of_chunks(tmp_path) == 2


def test_a_response_that_no_process_answers_any_more_has_failed(tmp_path: Path) -> None:
    async def begin(store: ResponseStore) -> None:
        await add(store, "done")
        await store.begin(NewResponse("left", "", True, []), {"status": "queued"})
        assert (await store.get("left", "")).status == "queued"
        with pytest.raises(InvalidRequest, match="has not ended"):
            _ = await store.conversation("left", "")

    async def after(store: ResponseStore) -> None:
        assert (await store.get("done", "")).status == "completed"
        left = await store.get("left", "")
        assert left.status == "failed" and b"send the request again" in left.body
        assert (await store.get("left", "")) == left
        assert await store.conversation("left", "") == []
        await add(store, "next", previous="left")
        assert len(await store.conversation("next", "")) == 2

    run(store_in(tmp_path), begin)
    run(store_in(tmp_path), after)


def test_a_response_that_was_deleted_does_not_come_back_when_it_ends(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await store.begin(NewResponse("r1", "", True, []), {"status": "queued"})
        await store.delete("r1", "")
        with pytest.raises(ResponseNotFound):
            await store.finish("r1", EndedResponse({"status": "completed"}, []))
        assert not await is_there(store, "r1")

    run(store_in(tmp_path), work)


@pytest.mark.parametrize(
    "damage", ["text", "page", "cut", "schema", "table", "column", "status", "tables"]
)
def test_a_damaged_file_is_set_aside_and_a_new_one_begins(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fill(store: ResponseStore) -> None:
        for number in range(20):
            await add(store, f"r{number}", secrets.token_hex(3000))

    run(store_in(tmp_path), fill)
    path = tmp_path / "responses" / FILE
    content = path.read_bytes()
    match damage:
        case "text":
            content = b"this is no database" * 100
        case "page":
            content = content[:4096] + secrets.token_bytes(len(content) - 4096)
        case "cut":
            content = content[:9000]
        case "schema":
            content = content.replace(b"CREATE INDEX", b"CREATE\xa1INDEX")
        case "table":
            content = content.replace(b"TABLE chunk", b"TABLE chink")
        case "column":
            content = content.replace(b"owner TEXT", b"ovner TEXT")
        case "status":
            content = content.replace(b"completed", b"c\xd0mpleted")
        case _:
            content = _other_tables(tmp_path / "other")
    _ = path.write_bytes(content)

    async def use(store: ResponseStore) -> None:
        assert not await is_there(store, "r1")
        await add(store, "new")
        assert await is_there(store, "new")

    run(store_in(tmp_path), use)
    [aside] = [each for each in path.parent.iterdir() if "damaged" in each.name]
    assert aside.read_bytes() == content
    [record] = [record for record in caplog.records if "damaged" in record.getMessage()]
    assert aside.name in record.getMessage()


def _other_tables(path: Path) -> bytes:
    """A database of the same version with nothing of ours."""
    with sqlite3.connect(path) as connection:
        _ = connection.execute(f"PRAGMA user_version = {VERSION}")
    return path.read_bytes()


def test_a_link_to_another_folder_is_refused_and_its_permissions_stay(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o755)
    (tmp_path / "responses").symlink_to(mine)

    async def work(store: ResponseStore) -> None:
        with pytest.raises(ResponsesUnavailable, match="responses is a link; put a folder there"):
            await add(store, "resp_1")

    run(store_in(tmp_path), work)
    assert mine.stat().st_mode & 0o777 == 0o755 and not [*mine.iterdir()]


@pytest.mark.parametrize("value", ["x'00'", "'text'", "5"])
def test_one_damaged_text_is_reported_and_the_others_are_read(tmp_path: Path, value: str) -> None:
    async def fill(store: ResponseStore) -> None:
        await add(store, "r1")
        await add(store, "r2")

    run(store_in(tmp_path), fill)
    with sqlite3.connect(tmp_path / "responses" / FILE) as connection:
        _ = connection.execute(f"UPDATE response SET body = {value} WHERE id = 'r1'")

    async def use(store: ResponseStore) -> None:
        with pytest.raises(ResponsesUnavailable, match="damaged on the disk; delete it"):
            _ = await store.get("r1", "")
        assert await is_there(store, "r2")
        await store.delete("r1", "")

    run(store_in(tmp_path), use)


@pytest.mark.parametrize(("version", "why"), [(2, "an older exo-node"), (9, "a newer exo-node")])
def test_a_file_of_another_version_is_left_alone(tmp_path: Path, version: int, why: str) -> None:
    run(store_in(tmp_path), lambda store: add(store, "r1"))
    path = tmp_path / "responses" / FILE
    with sqlite3.connect(path) as connection:
        _ = connection.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()

    async def use(store: ResponseStore) -> None:
        for _ in range(2):
            with pytest.raises(ResponsesUnavailable, match=why):
                await add(store, "r2")

    run(store_in(tmp_path), use)
    assert path.read_bytes() == before


def test_a_folder_that_somebody_removes_begins_again(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await add(store, "r1")
        _ = (tmp_path / "responses").rename(tmp_path / "away")
        assert not await is_there(store, "r1")
        await add(store, "r2")
        assert await is_there(store, "r2")

    run(store_in(tmp_path), work)
    assert (tmp_path / "away" / FILE).exists()


def test_a_data_folder_that_is_gone_does_not_come_back_empty(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        with pytest.raises(ResponsesUnavailable):
            await add(store, "r1")

    run(store_in(tmp_path / "gone"), work)
    assert not (tmp_path / "gone").exists()


def test_a_file_that_another_program_has_locked_is_reported(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await add(store, "r1")
        with sqlite3.connect(tmp_path / "responses" / FILE, isolation_level=None) as other:
            _ = other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(ResponsesUnavailable, match="close the other program"):
                _ = await store.get("r1", "")
            _ = other.execute("ROLLBACK")
        assert await is_there(store, "r1")

    run(store_in(tmp_path), work)


def test_a_full_disk_stores_nothing_and_loses_nothing(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await add(store, "r1")
        connection: sqlite3.Connection = store._file.database._connection  # pyright: ignore
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        _ = connection.execute(f"PRAGMA max_page_count = {pages}").fetchone()
        with pytest.raises(ResponsesUnavailable, match="free space on the disk"):
            await add(store, "r2", secrets.token_hex(20_000))
        assert await is_there(store, "r1") and not await is_there(store, "r2")
        await add(store, "r2", secrets.token_hex(20_000))

    run(store_in(tmp_path), work)


def test_removing_the_folder_makes_room_where_the_disk_is_too_full_to_delete_one(
    tmp_path: Path,
) -> None:
    async def work(store: ResponseStore) -> None:
        for number in range(3):
            await add(store, f"r{number}", secrets.token_hex(10_000))
        FilledDisk().begin(data)
        with pytest.raises(ResponsesUnavailable, match=f"removing the folder of {FILE} needs none"):
            await store.delete("r1", "")
        assert await is_there(store, "r1")
        shutil.rmtree(data / "responses")
        assert not await is_there(store, "r1")
        assert shutil.disk_usage(data).free > 40_000
        await add(store, "new")
        assert await is_there(store, "new")

    data = tmp_path / "data"
    with small_disk(data):
        run(store_in(data), work)
