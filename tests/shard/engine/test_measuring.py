"""What is not measured yet is not used; what is measured then changes no answer in progress."""

# pyright: reportPrivateUsage=false

import logging
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from clocks import Clock
from engines import answer, engine_of, load_quietly, request
from pipelines import TWO
from readers import prompt, together
from small import small_engine, small_spec
from staged_readers import alone as staged_alone
from staged_readers import few_tokens, staged, tokens_of

from exo_node.mtp.types import Round
from exo_node.placement.errors import DeviceLost
from exo_node.placement.gpu_faults import MEASUREMENT, gpu_fault
from exo_node.shard.engine import measuring as measuring_module
from exo_node.shard.engine.answers import lookup_control, model_measurements
from exo_node.shard.engine.answers.draft_profile import DraftProfile, DraftProfileKey
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.attempts import FATAL, MAX_DEATHS, Attempts
from exo_node.shard.engine.measuring import (
    BUSY_PAUSE,
    NOT_MEASURED,
    Measuring,
    repeated,
)
from exo_node.shard.engine.request import Parameters
from exo_node.shard.model.stage_model import StageModel

KEY = DraftProfileKey("chip", "f" * 64, "float32", "0", 0)
CONTEXT = 512


# ------------------------------------------------------------------------- pieces and their time


def pieces(clock: Clock, done: list[float], seconds: Sequence[float]) -> Generator[None]:
    for each in seconds:
        yield
        clock.now += each
        done.append(each)


def test_an_idle_stage_does_one_piece_a_step_until_none_is_left() -> None:
    clock, done = Clock(), list[float]()
    measuring = Measuring(lambda: pieces(clock, done, [1, 2, 3]), clock)
    assert not done, "the first piece waits for an idle moment"
    counts = [len(done) for _ in range(3) if measuring.step(idle=True)]
    assert (counts, measuring.is_done) == ([1, 2, 3], True)
    assert not measuring.step(idle=True)


@pytest.mark.smoke
def test_between_requests_in_progress_pieces_take_a_small_share_of_the_time() -> None:
    clock, done = Clock(), list[float]()
    measuring = Measuring(lambda: pieces(clock, done, [0.05, 0.05, 0.05]), clock)
    assert measuring.step(idle=False)
    clock.now += BUSY_PAUSE * 0.05 - 0.01
    assert not measuring.step(idle=False)
    clock.now += 0.02
    assert measuring.step(idle=False)
    assert not measuring.step(idle=False)
    assert measuring.step(idle=True), "and all of it where there is none"


def failing_by(fault: BaseException) -> Generator[None]:
    yield
    raise fault


def test_a_measurement_that_fails_is_logged_once_and_leaves_its_reason(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    reasons = list[str]()
    guard = Attempts(tmp_path / "profile.json").guard
    measuring = Measuring(
        lambda: guard("drafts", failing_by(MemoryError("no room")), reasons.append), Clock()
    )
    assert measuring.step(idle=True)
    assert measuring.is_done and not measuring.step(idle=True)
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert len(reasons) == 1 and "failed (MemoryError: no room)" in reasons[0]
    assert not list(tmp_path.iterdir()), "the process lives"


def die_within(folder: Path, name: str = "drafts", times: int = 1) -> None:
    """Leaves what processes leave that end within a piece, as by a signal."""
    for _ in range(times):
        pieces_ = Attempts(folder / KEY.file).guard(
            name, failing_by(DeviceLost("its GPU is lost")), lambda _: None
        )
        with pytest.raises(DeviceLost):
            _ = list(pieces_)


def test_a_measurement_that_ended_two_processes_is_not_repeated(tmp_path: Path) -> None:
    done, reasons, clock = list[float](), list[str](), Clock()

    def measure(name: str) -> None:
        guard = Attempts(tmp_path / KEY.file).guard
        for _ in guard(name, pieces(clock, done, [1]), reasons.append):
            pass

    die_within(tmp_path)
    measure("drafts")
    assert (done, reasons, list(tmp_path.iterdir())) == ([1], [], []), "one may be chance"
    die_within(tmp_path, times=MAX_DEATHS)
    measure("drafts")
    assert (done, reasons) == ([1], [FATAL])
    measure("batches")
    assert (done, reasons) == ([1, 1], [FATAL]), "it is one of several"


KILLED = """
import os, signal, sys
from pathlib import Path
from exo_node.shard.engine.attempts import Attempts

def measurement():
    yield
    os.kill(os.getpid(), signal.SIGKILL)

for _ in Attempts(Path(sys.argv[1])).guard("drafts", measurement(), print):
    pass
"""


def test_a_killed_process_leaves_its_count(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "new" / KEY.file)]
    for count in range(1, MAX_DEATHS + 1):
        assert subprocess.run(command).returncode == -signal.SIGKILL
        [file] = (tmp_path / "new").iterdir()
        assert file.stat().st_size == count
    refused = subprocess.run(command, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (0, f"{FATAL}\n")


def test_a_process_that_ends_between_two_pieces_does_not_count(tmp_path: Path) -> None:
    done = list[float]()
    for _ in range(2 * MAX_DEATHS):
        begun = Attempts(tmp_path / KEY.file).guard(
            "drafts", pieces(Clock(), done, [1]), lambda _: None
        )
        next(begun)
    assert not list(tmp_path.iterdir())


def test_a_gpu_fault_of_an_answer_is_not_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX reports it in whichever call comes next."""

    def failing() -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")

    clock, done = Clock(), list[float]()
    measuring = Measuring(lambda: pieces(clock, done, [1]), clock)
    monkeypatch.setattr(mx, "synchronize", failing)
    with pytest.raises(DeviceLost, match="Insufficient Memory"):
        _ = measuring.step(idle=False)
    assert not done


WATCHDOG = "[METAL] Command buffer execution failed: (2:kIOGPUCommandBufferCallbackErrorTimeout)"
NO_MEMORY = "[malloc] Unable to allocate 34359738368 bytes."


def test_a_gpu_that_computes_nothing_after_a_measurement_ends_the_process_and_keeps_the_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing() -> Generator[None]:
        yield
        raise RuntimeError(WATCHDOG)

    def lost(*_: object) -> None:
        raise RuntimeError(WATCHDOG)

    measuring = Measuring(lambda: repeated(failing), Clock())
    monkeypatch.setattr(measuring_module.mx, "eval", lost)
    with pytest.raises(DeviceLost, match="computes nothing") as fault:
        _ = measuring.step(idle=True)
    assert fault.value.param == MEASUREMENT and gpu_fault(fault.value.message) == "watchdog"


# ------------------------------------------------------------------------------------ whole models


def unmeasured(folder: Path | None = None, **changes: Any) -> TextEngine:
    """As a runner has it on a machine that never loaded the model."""
    profile = None
    clock = Clock(step=1e-4)
    if folder is not None:
        profile = DraftProfile.open(str(folder), KEY, clock)
    fields = {"native_mtp": True, "prompt_lookup": True, "context_length": CONTEXT}
    spec = small_spec(**(fields | changes))
    served = engine_of(load_quietly(spec), spec, profile=profile, clock=clock)
    _ = served.measurements.begin()
    return served


def measuring_of(served: TextEngine) -> Measuring:
    measuring = served.measurements._measuring
    assert measuring is not None
    return measuring


def asked(k: int = 3, tokens: int = 32, **changes: Any) -> Parameters:
    """A request that would copy: its prompt repeats itself."""
    rows = [*prompt(0), *prompt(0)]
    return request(rows, k, tokens, **({"ignore_eos": True, "prompt_lookup": True} | changes))


def plain(served: Parameters) -> tuple[int, ...]:
    solo = small_engine(native_mtp=False, context_length=CONTEXT, batching=False)
    rows, tokens = served.prompt, served.limits.max_tokens
    return answer(solo, request(rows, 0, tokens, ignore_eos=True)).ids


def test_before_it_is_measured_an_answer_uses_nothing_and_says_so() -> None:
    served = unmeasured()
    got = answer(served, asked())
    assert got.ids == plain(asked())
    assert {round_.drafted for round_ in got.rounds} == {0}
    stats = got.stats
    assert (stats.num_draft_tokens, stats.drafting_reason) == (0, NOT_MEASURED)
    assert (stats.lookup_reason, stats.batching_reason) == (NOT_MEASURED, NOT_MEASURED)
    assert not measuring_of(served).is_done
    while served.step():
        pass
    again = answer(served, asked())
    assert again.ids == got.ids
    assert again.stats.drafting_reason == again.stats.lookup_reason == ""
    assert sum(round_.drafted for round_ in again.rounds)


@pytest.mark.parametrize("name", ["drafts", "batches", "copies", "costs", "shared-copies"])
def test_answers_say_which_measurement_ended_the_runner_and_have_what_the_others_allow(
    name: str, tmp_path: Path
) -> None:
    die_within(tmp_path, name, MAX_DEATHS)
    served = unmeasured(tmp_path)
    while served.step():
        pass
    reasons = {
        "drafts": served.drafting.refusal,
        "batches": served.measurements.batching_reason,
        "copies": served.lookup.refusal,
        "costs": served.drafting.refusal,
        "shared-copies": served.lookup.shared_reason,
    }
    assert reasons[name] == FATAL
    assert NOT_MEASURED not in (reasons["drafts"], reasons["batches"], reasons["copies"])
    got = answer(served, asked())
    assert got.ids == plain(asked())


@pytest.mark.parametrize(
    ("probe", "field"),
    [
        ("probe_identity", "drafting_reason"),
        ("probe_batch_identity", "batching_reason"),
        ("probe_prompts", "batching_reason"),
        ("probe_costs", "drafting_reason"),
    ],
)
def test_an_error_that_no_measurement_expects_is_the_reason_of_answers(
    probe: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> Generator[None]:
        yield
        raise AssertionError("too much")

    monkeypatch.setattr(model_measurements, probe, failing)
    served = unmeasured()
    while served.step():
        pass
    got = answer(served, asked())
    assert got.ids == plain(asked())
    assert "AssertionError: too much" in getattr(got.stats, field)


def test_a_request_waits_for_one_piece_at_most_while_two_come() -> None:
    served = unmeasured()
    for _ in range(5):
        assert served.step()
    given = list[object]()
    for each in (asked(), asked(2, 16)):
        _ = served.begin(each, given.append, given.append)
        before = len(given)
        assert served._engine.step()
        assert len(given) > before, "the next step is the request's"
    while served._engine.keys:
        assert served.step()
    assert [event for event in given if isinstance(event, BaseException)] == []
    while served.step():
        pass
    assert measuring_of(served).is_done


def test_rounds_that_were_drafted_elsewhere_are_resumed_without_drafts() -> None:
    """As after a loss, on a node that never loaded the model."""
    measured = small_engine(prompt_lookup=True, context_length=CONTEXT)
    measured.measurements.measure()
    whole = answer(measured, asked())
    assert sum(r.drafted for r in whole.rounds)
    for cut in (1, len(whole.rounds) // 2):
        log: Sequence[Round] = whole.rounds[:cut]
        rest = answer(unmeasured(), asked(attempt=2, replay=log))
        assert tuple(t for r in log for t in r.tokens) + rest.ids == whole.ids


@pytest.mark.parametrize(
    ("module", "probe"),
    [
        (model_measurements, "probe_identity"),
        (model_measurements, "probe_batch_identity"),
        (model_measurements, "probe_prompts"),
        (model_measurements, "probe_costs"),
        (lookup_control, "probe_copies"),
        (lookup_control, "probe_shared_copies"),
    ],
)
def test_a_gpu_fault_of_a_piece_turns_nothing_off(
    monkeypatch: pytest.MonkeyPatch, module: Any, probe: str
) -> None:
    real, faults = getattr(module, probe), [RuntimeError(WATCHDOG), RuntimeError(NO_MEMORY)]

    def failing(*args: Any, **options: Any) -> Generator[None]:
        yield
        if faults:
            raise faults.pop()
        return (yield from real(*args, **options))  # pyright: ignore[reportUnknownVariableType]

    monkeypatch.setattr(module, probe, failing)
    monkeypatch.setattr(measuring_module, "RETRIES_S", (1e-3, 1e-3))
    served = unmeasured()
    while not measuring_of(served).is_done:
        _ = served.step()
    assert not faults
    got = answer(served, asked())
    assert got.ids == plain(asked())
    assert got.stats.drafting_reason == got.stats.lookup_reason == got.stats.batching_reason == ""
    assert served.lookup.shared_reason == ""


def test_a_piece_has_the_positions_of_text_after_an_answer_with_an_image() -> None:
    served = unmeasured()
    positions = served._stage.rope_positions
    positions.set_deltas([7, 9])
    assert served.step()
    assert list(positions.deltas) == [0]


# ------------------------------------------------------------------------------------ later stages


def test_a_later_stage_shares_no_rounds_of_requests_that_began_before_it_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shared rounds would have other numbers there."""
    hidden, sizes = StageModel.hidden, list[int]()

    def by_batch(model: StageModel, tokens: mx.array, *rest: Any, **named: Any) -> mx.array:
        rows = tokens.shape[0]
        if model.first:
            sizes.append(rows)
        return hidden(model, tokens, *rest, **named) * (1 + 1e-2 * (model.first > 0 and rows > 1))

    monkeypatch.setattr(StageModel, "hidden", by_batch)
    pipeline, readers = staged(TWO), few_tokens(4)
    worker = pipeline.workers[0]
    measuring = worker.begin_measuring()

    def each(turn: int) -> None:
        while turn == 4 and not measuring.is_done:
            assert worker.live_requests
            _ = measuring.step(idle=False)
            sizes.clear()

    together(pipeline.engine, readers, each)
    assert measuring.is_done and set(sizes) == {1}
    assert [tokens_of(reader) for reader in readers] == [staged_alone(r.request) for r in readers]
    ends = [reader.end for reader in readers]
    assert "near_tie" not in [end and end.batch_identity for end in ends], "each was computed alone"
    together(pipeline.engine, few_tokens(4))
    assert max(sizes) > 1
