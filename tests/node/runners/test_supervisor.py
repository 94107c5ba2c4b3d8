"""A runner process ends with its load; what its answers show is reported."""

# pyright: reportPrivateUsage=false

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from exo_node.node.machine.timing import LAN
from exo_node.node.runners.runner_process import RunnerHost, RunnerProcess, Status
from exo_node.node.runners.supervisor import Supervisor
from exo_node.node.trust.certificates import Credentials
from exo_node.placement.gpu_faults import MEASUREMENT
from exo_node.proto import peer_pb2 as pb

HANGS = "import signal; signal.pause()"
"""Python code that hangs, in place of the runner's start."""


async def test_a_cancelled_load_ends_its_runner(tmp_path: Path) -> None:
    _ = (tmp_path / "sitecustomize.py").write_text(HANGS)
    process_started = asyncio.Event()

    def credentials() -> Credentials:
        process_started.set()
        return Credentials(b"", b"", b"")

    host = RunnerHost(
        node="a" * 20,
        host="127.0.0.1",
        credentials=credentials,
        environment={"PYTHONPATH": str(tmp_path)},
        timing=replace(LAN, reply_s=0.0),
    )
    supervisor = Supervisor(host, lambda _, why: None)
    spec = pb.StageSpec(placement="p", path=str(tmp_path))
    load = asyncio.ensure_future(supervisor.load(spec, lambda _: None))
    try:
        async with asyncio.timeout(60):
            _ = await process_started.wait()
        [state] = supervisor.states()
        assert psutil.pid_exists(state.pid)
        _ = load.cancel()
        with pytest.raises(asyncio.CancelledError):
            _ = await load
        assert supervisor.states() == []
        assert not psutil.pid_exists(state.pid)
    finally:
        await supervisor.close()


@pytest.mark.parametrize(
    ("status", "live", "reported"),
    [("ready", 0, True), ("ready", 1, False), ("loading", 0, False), ("failed", 0, True)],
)
async def test_each_answer_shows_its_speed_once_and_none_beside_another_runner_at_work(
    status: Status, live: int, reported: bool
) -> None:
    shown = list[tuple[str, float, float]]()

    async def note(spec: pb.StageSpec, new: pb.RunnerState) -> None:
        shown.append((spec.placement, new.step_s, new.mtp_speedup))

    host = RunnerHost("a" * 20, "127.0.0.1", lambda: Credentials(b"", b"", b""), {}, LAN)
    supervisor = Supervisor(host, lambda _, why: None, note)
    runner, other = (
        RunnerProcess(pb.StageSpec(placement=p), lambda _: None, supervisor._answered, LAN)
        for p in ("p", "q")
    )
    supervisor._runners = {("p", 0): runner, ("q", 0): other}
    other.status, other.state = status, pb.RunnerState(live_requests=live)
    for answers, step_s, gain in [(1, 0.5, 0.0), (1, 0.5, 0.0), (2, 0.5, 0.0), (2, 0.5, 1.5)]:
        before = runner.state
        runner.state = pb.RunnerState(timed_answers=answers, step_s=step_s, mtp_speedup=gain)
        await runner._on_state(before)
    expected = [("p", 0.5, 0.0), ("p", 0.5, 0.0), ("p", 0.0, 1.5)]
    assert shown == (expected if reported else [])


WATCHDOG = (
    "libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] Command "
    "buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
)
READY_AT_ONCE = f"""
import os, socket, sys
from exo_node.proto import peer_pb2 as pb
from exo_node.proto.framing import framed
ready = pb.FromRunner(ready=pb.LoadReady(pid=os.getpid()))
parent = socket.socket(fileno=int(sys.orig_argv[-1]))
parent.sendall(framed(ready.SerializeToString()))
os.write(2, {WATCHDOG.encode()!r} + b"\\n")
"""
"""A runner's start that is ready at once; how it ends follows."""


def supervisor_of(
    folder: Path, end: str, faults: list[tuple[str, str, bool]], ends: list[str]
) -> Supervisor:
    """A supervisor whose runners write of a fault once they are ready, and then run `end`."""
    _ = (folder / "sitecustomize.py").write_text(READY_AT_ONCE + end)
    host = RunnerHost(
        node="a" * 20,
        host="127.0.0.1",
        credentials=lambda: Credentials(b"", b"", b""),
        environment={"PYTHONPATH": str(folder)},
        timing=LAN,
    )
    return Supervisor(
        host,
        lambda _, why: ends.append(why),
        None,
        lambda spec, fault, measured: faults.append((spec.placement, fault, measured)),
    )


async def faults_of(folder: Path, end: str) -> list[tuple[str, str, bool]]:
    """The GPU faults that are reported once a runner has ended by `end`."""
    faults, ends = list[tuple[str, str, bool]](), list[str]()
    supervisor = supervisor_of(folder, end, faults, ends)
    try:
        _ = await supervisor.load(pb.StageSpec(placement="p", path=str(folder)), lambda _: None)
        async with asyncio.timeout(60):
            while not ends:
                await asyncio.sleep(0.01)
    finally:
        await supervisor.close()
    return faults


@pytest.mark.parametrize("head_noticed_first", [False, True])
async def test_the_last_words_of_a_runner_tell_of_a_gpu_fault_once(
    tmp_path: Path, *, head_noticed_first: bool
) -> None:
    """The head may unload a runner that does not answer before its node knows that it ended."""
    faults, ends = list[tuple[str, str, bool]](), list[str]()
    supervisor = supervisor_of(tmp_path, "os.abort()", faults, ends)
    try:
        spec = pb.StageSpec(placement="p", path=str(tmp_path))
        ready = await supervisor.load(spec, lambda _: None)
        if head_noticed_first:
            with contextlib.suppress(psutil.NoSuchProcess):
                _ = psutil.Process(ready.pid).wait(60)  # this loop stands still meanwhile
            await supervisor.unload("p", 0, kill=True)
        async with asyncio.timeout(60):
            while not faults:
                await asyncio.sleep(0.01)
    finally:
        await supervisor.close()
    assert faults == [("p", "watchdog", False)]
    assert [WATCHDOG in why for why in ends] == [True] * (not head_noticed_first)


@pytest.mark.parametrize(("pooling", "value"), [("mean", "0"), ("", None)])
async def test_an_embedders_runner_multiplies_float32_whole(
    tmp_path: Path, pooling: str, value: str | None
) -> None:
    said = tmp_path / "said"
    write = f"open({str(said)!r}, 'w').write(repr(os.environ.get('MLX_ENABLE_TF32')))"
    supervisor = supervisor_of(tmp_path, f"{write}; os._exit(0)", [], ends := list[str]())
    try:
        spec = pb.StageSpec(placement="p", path=str(tmp_path), pooling=pooling)
        _ = await supervisor.load(spec, lambda _: None)
        async with asyncio.timeout(60):
            while not ends:
                await asyncio.sleep(0.01)
    finally:
        await supervisor.close()
    assert said.read_text() == repr(value)


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
async def test_what_a_stopped_or_killed_runner_wrote_earlier_is_no_reason_of_its_end(
    tmp_path: Path, end: str
) -> None:
    assert await faults_of(tmp_path, end) == []


async def test_a_fault_of_a_measurement_is_reported_as_one(tmp_path: Path) -> None:
    failure = f"""
failure = pb.Failure(message={WATCHDOG!r}, param={MEASUREMENT!r})
parent.sendall(framed(pb.FromRunner(failure=failure).SerializeToString()))
os._exit(1)
"""
    assert await faults_of(tmp_path, failure) == [("p", "watchdog", True)]
