"""A command that a GPU ended leaves numbers undefined: its process ends, whoever meets the error.

MLX raises it once, in whichever call comes next.
"""

# pyright: reportPrivateUsage=false

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driven import driven
from engines import answer, request
from prefixes import FIRST, SECOND, TOKENS
from readers import Reader, assert_as_alone, engine, prompt
from stored_prefixes import cached_tokens, files, opened, settle
from stored_prefixes import engine as stored_engine

from exo_node.placement.errors import DeviceLost, InsufficientMemory
from exo_node.shard.engine import prefill_forward
from exo_node.shard.engine.compute import ComputeThread
from exo_node.shard.engine.prefixes import disk, store

CALLBACK = "kIOGPUCommandBufferCallbackError"
WATCHDOG = f"[METAL] Command buffer execution failed: Hang (00000003:{CALLBACK}Hang)."
STARVED = f"[METAL] Command buffer execution failed: Memory (00000008:{CALLBACK}OutOfMemory)."
TOO_LARGE = "[malloc] Unable to allocate 34359738368 bytes."
SOON_S = 60.0


def fails(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(prefill_forward.PrefillForward, "advance", failing)


@pytest.mark.parametrize(
    ("words", "keeps_chunk"), [(WATCHDOG, False), (WATCHDOG, True), (TOO_LARGE, False)]
)
def test_a_fault_that_another_process_may_not_have_ends_this_one_and_no_answer(
    monkeypatch: pytest.MonkeyPatch, words: str, *, keeps_chunk: bool
) -> None:
    reader = Reader(request(prompt(1), 2, 8))
    fails(monkeypatch, words)
    with pytest.raises(DeviceLost, match="the GPU ended a computation"):
        driven(engine(keeps_chunk=keeps_chunk), [reader])
    assert reader.fault is None and reader.end is None


def test_an_answer_that_finds_no_memory_with_a_short_chunk_ends_alone_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, reader = engine(keeps_chunk=True), Reader(request(prompt(1), 2, 8))
    with monkeypatch.context() as patched:
        fails(patched, TOO_LARGE)
        driven(made, [reader])
    assert isinstance(reader.fault, InsufficientMemory)
    assert "send a shorter prompt" in str(reader.fault)
    after = [Reader(request(prompt(2), 2, 8))]
    driven(made, after)
    assert_as_alone(after)


def test_a_command_without_memory_ends_its_answer_and_then_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = Reader(request(prompt(1), 2, 8))
    fails(monkeypatch, STARVED)
    with pytest.raises(DeviceLost):
        driven(engine(keeps_chunk=True), [reader])
    assert isinstance(reader.fault, InsufficientMemory)


@pytest.mark.parametrize("keeps_chunk", [False, True])
def test_a_fault_that_a_reader_of_tokens_meets_ends_the_process_too(
    monkeypatch: pytest.MonkeyPatch, *, keeps_chunk: bool
) -> None:
    made = engine(keeps_chunk=keeps_chunk)

    def failing(*_: object) -> None:
        raise RuntimeError(WATCHDOG)

    monkeypatch.setattr(made._executor, "keep_prefix", failing)
    with pytest.raises(DeviceLost):
        driven(made, [Reader(request(prompt(1), 2, 8))])


@pytest.mark.parametrize(("words", "ends"), [(WATCHDOG, True), (STARVED, True), (TOO_LARGE, False)])
def test_a_job_ends_the_thread_where_numbers_are_undefined(words: str, *, ends: bool) -> None:
    deaths = queue.SimpleQueue[BaseException]()
    thread = ComputeThread(on_death=deaths.put)

    def job() -> None:
        raise RuntimeError(words)

    fault = thread.submit(job).exception(SOON_S)
    assert isinstance(fault, DeviceLost if ends else RuntimeError)
    if ends:
        assert isinstance(deaths.get(timeout=SOON_S), DeviceLost)
        return
    assert thread.submit(lambda: 1).result(SOON_S) == 1
    thread.close()


def hung(*_: object, **__: object) -> None:
    raise RuntimeError(WATCHDOG)


@pytest.mark.parametrize("call", ["read_state", "encoded"])
def test_a_command_that_failed_is_no_fault_of_the_file_that_is_read_or_written_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    """Else answers beside it would continue with what the command should have written."""
    _ = cached_tokens(opened(tmp_path), FIRST, 0)
    before, made = files(tmp_path), stored_engine(opened(tmp_path))
    monkeypatch.setattr(disk, call, hung)
    with pytest.raises((DeviceLost, RuntimeError), match="CallbackErrorHang"):
        _ = answer(made, request(SECOND, 0, TOKENS))
        settle(made)
    assert before and files(tmp_path) == before


def test_a_command_that_failed_is_no_fault_of_the_state_that_a_peer_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: Any = SimpleNamespace(rows=9, free=lambda: None)
    path: Any = SimpleNamespace(ids=())
    monkeypatch.setattr(store, "read_state", hung)
    with pytest.raises(RuntimeError, match="CallbackErrorHang"):
        _ = store.PrefixStore(1 << 20, list)._of_peer(received, path, 0)
