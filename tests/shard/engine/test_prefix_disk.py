"""A long first turn is read once in a model's life: a restart goes on behind it, bit for bit."""

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engines import answer, engine_of, request
from prefixes import CHUNK, FIRST, OTHER, ROOM, SECOND, TOKENS, cold, comparable, hybrid, turn
from small import small_spec
from zoo import VOCABULARY, tiny_config
from zoo_runs import small

from exo_node.mtp.rollback import cache_arrays
from exo_node.shard.engine import prefix_disk
from exo_node.shard.engine.prefix_disk import PrefixDisk
from exo_node.shard.engine.text_engine import TextEngine
from exo_node.shard.model.stage_model import StageModel

MIB = 1 << 20


def opened(folder: Path, budget: int = 64 * MIB, key: str = "this model") -> PrefixDisk:
    return PrefixDisk(folder, key, budget, hybrid().model.make_caches)


def engine(disk: PrefixDisk) -> TextEngine:
    stage_spec = small_spec(native_mtp=True, prefill_chunk=CHUNK, prefix_cache_bytes=ROOM)
    return engine_of(hybrid(), stage_spec, prefix_disk=disk)


def cached_tokens(disk: PrefixDisk, prompt: Sequence[int], k: int) -> int:
    """Tokens that a new process did not read. Its answer is the cold one."""
    got = answer(engine(disk), request(prompt, k, TOKENS))
    assert comparable(got) == cold(prompt, k)
    disk.settle()
    return got.stats.cached_tokens


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.smoke
@pytest.mark.parametrize("k", [0, 3])
def test_a_restart_goes_on_behind_the_first_turn(k: int, tmp_path: Path) -> None:
    assert cached_tokens(opened(tmp_path), FIRST, k) == 0
    assert [cached_tokens(opened(tmp_path), prompt, k) for prompt in (FIRST, SECOND, OTHER)] == [
        300
    ] * 3
    [only] = files(tmp_path)
    assert only.stat().st_mode & 0o777 == 0o600 and only.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.smoke
def test_a_file_is_found_by_who_asked_its_prompt_alone(tmp_path: Path) -> None:
    def cached(salt: bytes) -> int:
        disk = opened(tmp_path)
        got = answer(engine(disk), request(FIRST, 2, TOKENS, cache_salt=salt))
        assert comparable(got) == cold(FIRST, 2)
        disk.settle()
        return got.stats.cached_tokens

    salts = (b"alice-xx", b"bob-xxxx", b"")
    assert [cached(salt) for salt in (*salts, *salts)] == [0, 0, 0, 300, 300, 300]
    text = " ".join(str(path) for path in files(tmp_path))
    assert len(files(tmp_path)) == 3
    assert not any(salt.hex() in text for salt in salts[:2])


def test_the_rest_of_a_conversation_is_in_memory_as_without_a_disk(tmp_path: Path) -> None:
    _ = cached_tokens(opened(tmp_path), FIRST, 2)
    again = engine(opened(tmp_path))
    cached = [
        answer(again, request(prompt, 2, TOKENS)).stats.cached_tokens
        for prompt in (SECOND, SECOND, OTHER)
    ]
    assert cached == [300, 460, 300]


def test_a_drafting_request_reads_what_a_plain_one_wrote_and_adds_its_drafters(
    tmp_path: Path,
) -> None:
    assert cached_tokens(opened(tmp_path), FIRST, 0) == 0
    assert cached_tokens(opened(tmp_path), FIRST, 2) == 0  # without the head's rows it cannot draft
    assert (
        cached_tokens(opened(tmp_path), FIRST, 2)
        == cached_tokens(opened(tmp_path), FIRST, 0)
        == 300
    )
    assert len(files(tmp_path)) == 1


def test_another_model_or_another_beginning_finds_nothing(tmp_path: Path) -> None:
    _ = cached_tokens(opened(tmp_path), FIRST, 1)
    assert cached_tokens(opened(tmp_path, key="the same with other weights"), FIRST, 1) == 0
    assert cached_tokens(opened(tmp_path), [*turn(300, 77), *FIRST[300:]], 1) == 0
    short = [*turn(prefix_disk.MIN_ROWS - 1, 5), 7, 8]
    assert (
        cached_tokens(opened(tmp_path), short, 1) == cached_tokens(opened(tmp_path), short, 1) == 0
    )


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
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the first turn of FIRST, of which tests make copies."""
    folder = tmp_path_factory.mktemp("kept")
    _ = cached_tokens(opened(folder), FIRST, 1)
    return folder


@pytest.mark.smoke
@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_file_that_changed_is_deleted(
    spoil: Callable[[bytes], bytes],
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _ = shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    assert opened(tmp_path).find(FIRST, [160, 300, 342], 0, drafts=True) is not None
    [only] = files(tmp_path)
    before = only.read_bytes()
    after = spoil(before)
    assert after != before
    _ = only.write_bytes(after)
    disk = opened(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert disk.find(FIRST, [160, 300, 342], 0, drafts=True) is None
    assert "is deleted" in caplog.text and files(tmp_path) == []


def test_a_pipe_in_the_place_of_a_file_stops_nobody(folder: Path, tmp_path: Path) -> None:
    _ = shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    [only] = files(tmp_path)
    only.unlink()
    os.mkfifo(only)
    disk = opened(tmp_path)
    assert disk.find(FIRST, [160, 300, 342], 0, drafts=True) is None
    assert files(tmp_path) == []


def test_whatever_a_file_makes_its_reader_raise_it_is_deleted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ = shutil.copytree(folder, tmp_path, dirs_exist_ok=True)

    def too_much(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(prefix_disk, "joined", too_much)
    assert opened(tmp_path).find(FIRST, [160, 300, 342], 0, drafts=True) is None
    assert files(tmp_path) == []


def test_the_least_recently_used_goes_first_and_bytes_keep_their_bound(tmp_path: Path) -> None:
    first, second, third = ([*turn(300, seed), 7, 8] for seed in (31, 32, 33))
    _ = cached_tokens(opened(tmp_path), first, 1)
    size = files(tmp_path)[0].stat().st_size
    budget = 2 * size + 1000
    _ = cached_tokens(opened(tmp_path, budget), second, 1)
    assert cached_tokens(opened(tmp_path, budget), first, 1) == 300  # used
    _ = cached_tokens(opened(tmp_path, budget, key="another model"), third, 1)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= budget
    assert cached_tokens(opened(tmp_path, budget), first, 1) == 300
    assert cached_tokens(opened(tmp_path, budget), second, 1) == 0


def test_what_a_killed_process_left_half_written_is_no_prefix_and_goes_in_its_turn(
    tmp_path: Path,
) -> None:
    _ = cached_tokens(opened(tmp_path), FIRST, 1)
    [only] = files(tmp_path)
    half = only.with_name(f"{only.name}.1f00")
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


def test_a_full_disk_costs_no_answer_and_is_told_once(
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
def test_a_file_that_another_runner_deleted_is_written_again_and_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without drafts: else the file is looked at before each prompt is kept."""
    _ = cached_tokens(opened(tmp_path), FIRST, 0)
    disk = opened(tmp_path)
    files(tmp_path)[0].unlink()
    with caplog.at_level(logging.WARNING):
        assert cached_tokens(disk, FIRST, 0) == 0
    assert caplog.text == ""
    assert cached_tokens(opened(tmp_path), FIRST, 0) == 300


KINDS = ("llama", "gemma3_text", "gpt_oss", "nemotron_h", "deepseek_v3", "qwen3_next")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    # Experts need float32 on a CPU.
    [*((kind, mx.float32) for kind in KINDS), ("llama", mx.bfloat16), ("nemotron_h", mx.bfloat16)],
)
def test_other_kinds_of_cache_come_back_bit_for_bit(
    kind: str, dtype: mx.Dtype, tmp_path: Path
) -> None:
    model: Any = small(tiny_config(kind))
    model.set_dtype(dtype)
    stage = StageModel(model, 0, len(model.layers))
    ids = [(37 * i + 11) % (VOCABULARY - 2) + 1 for i in range(340)]
    ids[299] = VOCABULARY - 1
    caches, ends = stage.make_caches(), [160, 300, 340]
    for begin, end in ((0, 160), (160, 300)):
        _ = model(mx.array([ids[begin:end]]), cache=caches)
        mx.eval(*cache_arrays(caches))  # pyright: ignore[reportUnknownMemberType]
    disk = PrefixDisk(tmp_path, kind, 64 * MIB, stage.make_caches)
    disk.keep(ids, ends, 300, caches, None, frozenset({VOCABULARY - 1}))
    disk.settle()
    prefix = PrefixDisk(tmp_path, kind, 64 * MIB, stage.make_caches).find(
        ids, ends, 160, drafts=False
    )
    assert prefix is not None and prefix.position == 300
    assert [type(cache) for cache in prefix.caches] == [type(cache) for cache in caches]
    pairs = list(zip(cache_arrays(prefix.caches), cache_arrays(caches), strict=True))
    assert len(pairs) >= len(caches)
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    rest = mx.array([ids[300:]])
    mine, theirs = (model(rest, cache=each) for each in (prefix.caches, caches))
    assert mx.array_equal(mine, theirs).item()
