"""Prompts are read once in a model's life: a restart continues after them, bit for bit."""

import errno
import json
import logging
import os
import random
import re
import shutil
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from budget import seeds
from engines import answer, request
from prefixes import FIRST, OTHER, SECOND, TOKENS, turn
from stored_prefixes import cached_tokens, engine, files, opened, settle

from exo_node.mtp.caches.rollback import cache_arrays
from exo_node.shard.engine.prefixes import disk as prefix_disk
from exo_node.shard.engine.prefixes import encoding as prefix_encoding
from exo_node.shard.engine.prefixes.encoding import CONTENT_FAULTS
from exo_node.shard.engine.prefixes.prompt_path import PromptPath
from exo_node.shard.engine.states.state import State

ENDS = [160, 300, 342]
"""The forwards over FIRST; a file has its first turn, of 300 rows."""


@pytest.mark.smoke
@pytest.mark.parametrize("k", [0, 3])
def test_a_restart_continues_after_the_last_state_of_a_conversation(k: int, tmp_path: Path) -> None:
    prompts = (FIRST, FIRST, SECOND, SECOND, OTHER)
    cached = [cached_tokens(opened(tmp_path), prompt, k) for prompt in prompts]
    assert cached == [0, 300, 300, 460, 300]
    for path in files(tmp_path):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == path.parents[1].stat().st_mode & 0o777 == 0o700


@pytest.mark.smoke
def test_a_file_has_only_the_rows_after_its_parents(tmp_path: Path) -> None:
    for prompt in (FIRST, SECOND):
        _ = cached_tokens(opened(tmp_path), prompt, 2)
    by_rows = {_description(path)["rows"]: _description(path) for path in files(tmp_path)}
    assert {rows: each["begin"] for rows, each in by_rows.items()} == {300: 0, 460: 300}
    assert by_rows[460]["parent"] == by_rows[300]["name"]
    rows = [by_rows[460]["tensors"][name][1] for name in by_rows[460]["tensors"] if name[0] == "0"]
    assert rows and all(160 in shape for shape in rows)


def _description(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["prefix"])


@pytest.mark.smoke
def test_a_file_is_found_by_requests_of_its_salt_alone(tmp_path: Path) -> None:
    salts = (b"", b"alice-xx", b"bob-xxxx")
    cached = [
        cached_tokens(opened(tmp_path), FIRST, 2, cache_salt=salt) for salt in (*salts, *salts)
    ]
    assert cached == [0, 0, 0, 300, 300, 300]
    text = " ".join(str(path) for path in files(tmp_path))
    assert len(files(tmp_path)) == 3
    assert not any(salt.hex() in text for salt in salts[1:])


@pytest.mark.smoke
def test_a_request_that_uses_no_cache_finds_and_leaves_nothing(tmp_path: Path) -> None:
    assert cached_tokens(opened(tmp_path), FIRST, 2, cache=False) == 0
    assert files(tmp_path) == []
    assert cached_tokens(opened(tmp_path), FIRST, 2) == 0
    assert cached_tokens(opened(tmp_path), FIRST, 2, cache=False) == 0
    assert cached_tokens(opened(tmp_path), FIRST, 2) == 300


def test_one_process_finds_on_disk_and_in_memory(tmp_path: Path) -> None:
    _ = cached_tokens(opened(tmp_path), FIRST, 2)
    disk = opened(tmp_path)
    again = engine(disk)
    prompts = (SECOND, SECOND, OTHER)
    stats = [answer(again, request(each, 2, TOKENS)).stats for each in prompts]
    assert [each.cached_tokens for each in stats] == [300, 460, 300]
    assert [each.cached_tier for each in stats] == ["disk", "memory", "memory"]
    assert again.prefix_hits == {"disk": 300, "memory": 760}
    assert disk.size == files(tmp_path)[0].stat().st_size


def test_a_drafting_request_reads_all_of_a_prompt_that_plain_ones_left(tmp_path: Path) -> None:
    assert cached_tokens(opened(tmp_path), FIRST, 0) == 0
    assert cached_tokens(opened(tmp_path), FIRST, 2) == 0  # without the head's rows it cannot draft
    cached = [cached_tokens(opened(tmp_path), FIRST, k) for k in (2, 0)]
    assert cached == [300, 300]


def test_a_drafting_turn_continues_after_rows_of_plain_ones(tmp_path: Path) -> None:
    """The file of the drafting turn has all rows of the head, and the parent's has none."""
    _ = cached_tokens(opened(tmp_path), FIRST, 0)
    assert cached_tokens(opened(tmp_path), SECOND, 2) == 0
    cached = [cached_tokens(opened(tmp_path), SECOND, k) for k in (3, 0, 1)]
    assert cached == [460, 460, 460]


def test_another_model_or_another_beginning_finds_nothing(tmp_path: Path) -> None:
    _ = cached_tokens(opened(tmp_path), FIRST, 1)
    assert cached_tokens(opened(tmp_path, key="the same with other weights"), FIRST, 1) == 0
    assert cached_tokens(opened(tmp_path), [*turn(300, 77), *FIRST[300:]], 1) == 0


def test_a_prompt_of_few_rows_is_not_written(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(prefix_disk, "MIN_ROWS", 301)
    assert cached_tokens(opened(tmp_path), FIRST, 1) == 0
    assert files(tmp_path) == []


# ------------------------------------------------------------------------- when files are written


@pytest.mark.smoke
def test_nothing_is_written_while_a_request_is_in_progress(tmp_path: Path) -> None:
    busy = engine(opened(tmp_path))
    _ = answer(busy, request(FIRST, 1, TOKENS))
    running = busy.generate(request(OTHER, 1, TOKENS))
    _ = next(running)
    assert not busy.save_prefix()
    assert files(tmp_path) == []
    _ = [*running]
    settle(busy)
    assert len(files(tmp_path)) == 1


@pytest.mark.smoke
def test_a_write_is_given_up_for_a_request_and_done_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_continue = threading.Event(), threading.Event()
    pieces_of = prefix_disk.pieces_of

    def slow_pieces(*args: Any) -> Any:
        for piece in pieces_of(*args):
            yield piece
            has_begun.set()
            assert may_continue.wait(60)

    monkeypatch.setattr(prefix_disk, "pieces_of", slow_pieces)
    busy = engine(opened(tmp_path))
    _ = answer(busy, request(FIRST, 1, TOKENS))
    assert busy.save_prefix() and has_begun.wait(60)
    assert len([*tmp_path.glob("*/*")]) == 1
    running = busy.generate(request(FIRST, 1, TOKENS))
    _ = next(running)
    may_continue.set()
    _writer(busy).join(60)
    assert [*tmp_path.glob("*/*")] == []
    _ = [*running]
    settle(busy)
    assert len(files(tmp_path)) == 1


def _writer(busy: Any) -> threading.Thread:
    return busy._prefixes.disk._writing[0]


def test_a_long_prompt_leaves_a_file_every_so_many_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_disk, "FILE_EVERY", 320)
    prompt = [*FIRST[:300], *turn(900, 41), 7, 8]
    _ = cached_tokens(opened(tmp_path), prompt, 1)
    rows = sorted(_description(path)["rows"] for path in files(tmp_path))
    assert rows[0] == 300 and len(rows) >= 3
    assert all(b - a >= 320 for a, b in pairwise(rows[:-1]))
    assert cached_tokens(opened(tmp_path), prompt, 1) == rows[-1]


def test_states_that_were_evicted_before_an_idle_moment_are_not_written(tmp_path: Path) -> None:
    busy = engine(opened(tmp_path))
    _ = answer(busy, request(FIRST, 1, TOKENS))
    busy._prefixes.memory.evict()  # pyright: ignore[reportPrivateUsage]
    settle(busy)
    assert files(tmp_path) == []


def test_the_states_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_disk, "MAX_PENDING", 2)
    busy = engine(opened(tmp_path))
    prompts = [[*turn(300, seed), 7, 8] for seed in (31, 32, 33)]
    for prompt in prompts:
        _ = answer(busy, request(prompt, 1, TOKENS))
    settle(busy)
    cached = [cached_tokens(opened(tmp_path), prompt, 1) for prompt in prompts]
    assert cached == [0, 300, 300]


# ----------------------------------------------------------------------------- damaged files


def _changed(data: bytes, old: bytes, new: bytes) -> bytes:
    """With one entry of the description changed, and no byte more or less."""
    match = re.search(old, data)
    assert match is not None and len(match[0]) == len(new)
    return data.replace(match[0], new)


SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "a bit": lambda data: data[:-100] + bytes([data[-100] ^ 4]) + data[-99:],
    "its end": lambda data: data[:-7],
    "half of it": lambda data: data[: len(data) // 2],
    "no safetensors": lambda _: b"\xff" * 5000,
    "empty": lambda _: b"",
    "more room": lambda data: _changed(data, rb'\\"room\\": \d{3}', b'\\"room\\": 999'),
    "another number of rows": lambda data: data.replace(b'\\"rows\\": 300', b'\\"rows\\": 301'),
    "another format": lambda data: b"\x02\0\0\0\0\0\0\0[]" + data,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of two turns, of which tests make copies."""
    folder = tmp_path_factory.mktemp("kept")
    for prompt in (FIRST, SECOND):
        _ = cached_tokens(opened(folder), prompt, 1)
    return folder


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "prefixes")


def first_turn(folder: Path) -> Path:
    (path,) = (path for path in files(folder) if _description(path)["rows"] == 300)
    return path


def stored_state(folder: Path) -> State | None:
    return opened(folder).find(PromptPath(FIRST, ENDS, drafts=True), 0)


@pytest.mark.smoke
@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_file_that_changed_is_deleted(
    spoil: Callable[[bytes], bytes], copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert stored_state(copied) is not None
    path = first_turn(copied)
    before = path.read_bytes()
    after = spoil(before)
    assert after != before
    _ = path.write_bytes(after)
    with caplog.at_level(logging.WARNING):
        assert stored_state(copied) is None
    assert "is deleted" in caplog.text and not path.exists()


def _bits(prefix: State) -> list[bytes]:
    assert prefix.draft is not None
    arrays = cache_arrays(prefix.all_caches)
    hidden = [] if prefix.draft.hidden is None else [prefix.draft.hidden]
    contiguous: list[Any] = [mx.contiguous(each) for each in (*arrays, *hidden)]
    return [bytes(memoryview(each)) for each in contiguous]


def test_a_byte_that_changed_anywhere_changes_no_state(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = first_turn(copied)
    data = path.read_bytes()
    intact = stored_state(copied)
    assert intact is not None
    expected, draw, refused = _bits(intact), random.Random(29), 0
    header = int.from_bytes(data[:8], "little")
    for number in seeds(1000, 10_000):
        # A half of them in the header, which is a small part of the file.
        at = draw.randrange(8 + header if number % 2 else len(data))
        spoilt = bytearray(data)
        spoilt[at] ^= draw.randrange(1, 256)
        _ = path.write_bytes(spoilt)
        with caplog.at_level(logging.CRITICAL):
            prefix = stored_state(copied)
        assert prefix is None or _bits(prefix) == expected, at
        refused += prefix is None
    assert refused > 0


@pytest.mark.smoke
def test_rows_of_another_prompt_under_a_prompts_name_are_not_used(copied: Path) -> None:
    """A whole file with right checksums, in the place of another one."""
    other = [*turn(300, 78), *FIRST[300:]]
    assert cached_tokens(opened(copied), other, 1) == 0
    mine, foreign = first_turn_of(copied, FIRST), first_turn_of(copied, other)
    _ = shutil.copyfile(foreign, mine)
    assert cached_tokens(opened(copied), FIRST, 1) == 0
    assert cached_tokens(opened(copied), FIRST, 1) == 300


def test_a_file_of_another_model_is_not_used(copied: Path) -> None:
    _ = cached_tokens(opened(copied, key="another"), FIRST, 1)
    theirs, mine = (opened(copied, key=key) for key in ("another", "this model"))
    paths = [disk._folder for disk in (theirs, mine)]  # pyright: ignore[reportPrivateUsage]
    name = first_turn_of(copied, FIRST).name
    _ = shutil.copyfile(paths[0] / name, paths[1] / name)
    assert stored_state(copied) is None


def first_turn_of(folder: Path, prompt: list[int]) -> Path:
    disk = opened(folder)
    ((_, name),) = disk._candidates(  # pyright: ignore[reportPrivateUsage]
        PromptPath(prompt, ENDS, drafts=True)
    )
    return disk._path(name)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_file_is_not_read_and_stops_no_reader(kind: str, copied: Path) -> None:
    path = first_turn(copied)
    elsewhere = copied.parent / "elsewhere"
    _ = shutil.move(path, elsewhere)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(elsewhere)
        case _:
            path.mkdir()
    assert stored_state(copied) is None
    assert kind == "folder" or not os.path.lexists(path)
    assert elsewhere.exists()


@pytest.mark.parametrize("kind", CONTENT_FAULTS)
def test_an_error_that_content_may_cause_while_a_file_is_read_fails_no_answer(
    kind: type[Exception], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise kind

    monkeypatch.setattr(prefix_encoding, "joined", fail)
    assert stored_state(copied) is None
    assert not [path for path in files(copied) if _description(path)["rows"] == 300]


def test_an_error_of_the_code_while_a_file_is_read_is_not_taken_for_its_content(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a fault of the code")

    monkeypatch.setattr(prefix_encoding, "joined", fail)
    with pytest.raises(AssertionError, match="a fault of the code"):
        _ = stored_state(copied)


def test_without_its_parent_a_file_is_not_used(copied: Path) -> None:
    first_turn(copied).unlink()
    assert cached_tokens(opened(copied), SECOND, 1) == 0
    assert cached_tokens(opened(copied), SECOND, 1) == 460


def test_a_damaged_parent_takes_its_children_with_it_and_all_are_written_again(
    copied: Path,
) -> None:
    path = first_turn(copied)
    spoilt = bytearray(path.read_bytes())
    spoilt[8 + int.from_bytes(spoilt[:8], "little") + 50] ^= 1  # among the rows
    _ = path.write_bytes(spoilt)
    assert cached_tokens(opened(copied), SECOND, 1) == 0
    assert cached_tokens(opened(copied), SECOND, 1) == 460


@pytest.mark.parametrize("place", ["root", "folder"])
def test_a_link_in_the_place_of_a_folder_is_left_alone_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    mine = tmp_path / "mine"
    _ = cached_tokens(opened(mine), FIRST, 1)
    [folder] = mine.iterdir()
    link, target = (mine, "mine") if place == "root" else (folder, f"mine/{folder.name}")
    elsewhere = link.rename(tmp_path / "elsewhere")
    _ = (elsewhere / "model.safetensors").write_bytes(b"mine")
    link.symlink_to(elsewhere)
    before = {*elsewhere.rglob("*")}
    with caplog.at_level(logging.WARNING):
        disk = opened(tmp_path / "mine")
        assert cached_tokens(disk, FIRST, 1) == 0
        disk.clear()
    assert {*elsewhere.rglob("*")} == before
    assert f"{target} is a link; put a folder there" in caplog.text


# ------------------------------------------------------------------------------- bounds


def test_the_least_recently_used_goes_first_and_bytes_keep_their_bound(tmp_path: Path) -> None:
    first, second, third = ([*turn(300, seed), 7, 8] for seed in (31, 32, 33))
    _ = cached_tokens(opened(tmp_path), first, 1)
    budget = 2 * files(tmp_path)[0].stat().st_size + 1000
    _ = cached_tokens(opened(tmp_path, budget), second, 1)
    assert cached_tokens(opened(tmp_path, budget), first, 1) == 300  # used
    _ = cached_tokens(opened(tmp_path, budget, key="another model"), third, 1)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= budget
    assert cached_tokens(opened(tmp_path, budget), first, 1) == 300
    assert cached_tokens(opened(tmp_path, budget), second, 1) == 0


def test_a_file_goes_before_its_parent(copied: Path) -> None:
    assert cached_tokens(opened(copied), SECOND, 1) == 460
    size = sum(path.stat().st_size for path in files(copied))
    third = [*turn(150, 31), 7, 8]
    _ = cached_tokens(opened(copied, size), third, 1)
    assert cached_tokens(opened(copied), third, 1) == 150
    assert cached_tokens(opened(copied), SECOND, 1) == 300


def test_a_half_written_file_of_a_killed_process_is_no_prefix_and_goes_in_its_turn(
    tmp_path: Path,
) -> None:
    _ = cached_tokens(opened(tmp_path), FIRST, 1)
    [only] = files(tmp_path)
    half = only.with_name(f"{only.name}.1f001f00")
    _ = half.write_bytes(only.read_bytes()[:-50_000])
    os.utime(half, (1, 1))
    only.unlink()
    budget = int(1.5 * half.stat().st_size)
    assert cached_tokens(opened(tmp_path, budget), FIRST, 1) == 0
    assert cached_tokens(opened(tmp_path, budget), FIRST, 1) == 300
    assert not half.exists()


def test_one_that_is_larger_than_all_of_it_is_not_written(tmp_path: Path) -> None:
    assert cached_tokens(opened(tmp_path, 1000), FIRST, 1) == 0
    assert files(tmp_path) == []


@pytest.mark.smoke
def test_a_full_disk_costs_no_answer_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prefix_disk, "write_atomic", full)
    disk = opened(tmp_path)
    with caplog.at_level(logging.WARNING):
        for seed in (41, 42, 43):
            assert cached_tokens(disk, [*turn(300, seed), 7, 8], 1) == 0
    assert caplog.text.count("No space left") == 1 and files(tmp_path) == []


@pytest.mark.smoke
def test_a_file_that_was_deleted_meanwhile_is_written_again_and_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _ = cached_tokens(opened(tmp_path), FIRST, 0)
    disk = opened(tmp_path)
    files(tmp_path)[0].unlink()
    with caplog.at_level(logging.WARNING):
        assert cached_tokens(disk, FIRST, 0) == 0
    assert caplog.text == ""
    assert cached_tokens(opened(tmp_path), FIRST, 0) == 300


@pytest.mark.smoke
def test_a_child_of_a_file_that_was_deleted_meanwhile_has_its_rows(tmp_path: Path) -> None:
    busy = engine(opened(tmp_path))
    _ = answer(busy, request(FIRST, 1, TOKENS))
    settle(busy)
    files(tmp_path)[0].unlink()
    _ = answer(busy, request(SECOND, 1, TOKENS))
    settle(busy)
    assert [_description(path)["begin"] for path in files(tmp_path)] == [0]
    assert cached_tokens(opened(tmp_path), SECOND, 1) == 460


def test_without_its_data_folder_a_runner_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert cached_tokens(opened(tmp_path / "gone" / "prefixes"), FIRST, 1) == 0
    assert caplog.text.count("are not kept on disk") == 1
    assert not (tmp_path / "gone").exists()
