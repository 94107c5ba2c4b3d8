"""Runners that hang, or whose compute thread is gone: noticed, ended, and told with the reason."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import last_spec
from nodes import python_path
from runners import eventually, on_answer, runner_host

from exo_node.node.machine.timing import LAN
from exo_node.node.runners.load_watch import SLOWEST_BYTES_S, LoadWatch, cpu_seconds
from exo_node.node.runners.runner_process import RunnerHost, RunnerProcess
from exo_node.node.runners.supervisor import Supervisor
from exo_node.placement.errors import LoadFailed
from exo_node.proto import peer_pb2 as pb

STUCK = """
import threading
import exo_node.shard.model.loader_import
import exo_node.shard.model.load as load

def hang(spec, report, **_):
    report(load.pb.LoadProgress(step="reading"))
    threading.Event().wait()

load.load = hang
"""
NUMB_LATER = """
import threading, time
from pathlib import Path
import exo_node.shard.engine.compute as compute

begin = compute.ComputeThread.__init__

def boom():
    raise SystemExit(1)

def init(self, *args, **kwargs):
    begin(self, *args, **kwargs)

    def look():
        while not Path(__file__).with_name("now").exists():
            time.sleep(0.05)
        self._inbox.put(boom)

    threading.Thread(target=look, daemon=True).start()

compute.ComputeThread.__init__ = init
"""


def faulty(folder: Path, fault: str, **changes: Any) -> RunnerHost:
    """Its runners run `fault` before anything else."""
    _ = (folder / "sitecustomize.py").write_text(fault)
    host = runner_host()
    environment = {**host.environment, "PYTHONPATH": python_path(folder)}
    return replace(host, environment=environment, **changes)


NOISY = """
import os, sys
for number in range(500):
    print(f"E0000 00:00:1700000000.1  {number} ssl.cc:1884] Handshake failed", file=sys.stderr)
print("what ended it", file=sys.stderr, flush=True)
os._exit(3)
"""


async def test_strangers_at_a_runners_port_do_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(faulty(tmp_path, NOISY), lambda _, why: None)
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(LoadFailed, match=r"it last wrote: what ended it$"),
    ):
        _ = await supervisor.load(last_spec(), lambda _: None)
    noise = [r for r in caplog.records if "Handshake" in r.getMessage()]
    assert 0 < len(noise) <= 10


async def test_a_runner_that_ends_before_it_is_told_what_to_load_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = RunnerProcess._send  # pyright: ignore[reportPrivateUsage]

    async def late(runner: RunnerProcess, message: pb.ToRunner) -> None:
        assert runner._process is not None  # pyright: ignore[reportPrivateUsage]
        _ = await runner._process.wait()  # pyright: ignore[reportPrivateUsage]
        await send(runner, message)

    monkeypatch.setattr(RunnerProcess, "_send", late)
    supervisor = Supervisor(faulty(tmp_path, "import os; os._exit(3)"), lambda _, why: None)
    with pytest.raises(LoadFailed, match="exited with status 3"):
        _ = await supervisor.load(last_spec(), lambda _: None)


# ------------------------------------------------------------------------------- the rule


def test_a_load_that_continues_has_all_the_time_it_needs() -> None:
    watch = LoadWatch(50, 0)
    for second in range(10_000):
        watch.report_progress(second // 49)
        assert watch.tick(1.0) == ""


@pytest.mark.smoke
@pytest.mark.parametrize(("size", "patience"), [(0, 50), (100 * SLOWEST_BYTES_S, 150)])
def test_a_load_that_stands_still_is_given_up_later_the_larger_it_is(
    size: int, patience: int
) -> None:
    watch = LoadWatch(50, size)
    for _ in range(patience - 1):
        watch.report_progress(7)
        assert watch.tick(1.0) == ""
    watch.report_progress(7)
    assert f"did not get on for {patience} s" in watch.tick(1.0)


def test_a_load_that_says_nothing_is_given_up_sooner_once_it_has_spoken() -> None:
    watch = LoadWatch(50, 100 * SLOWEST_BYTES_S)
    assert [watch.tick(1.0) for _ in range(49)] == [""] * 49  # Python's imports
    watch.report_progress(1)
    assert [watch.tick(1.0) for _ in range(9)] == [""] * 9
    assert "said nothing for 10 s" in watch.tick(1.0)


def test_a_runner_that_never_speaks_has_a_minute_and_a_person_is_told_meanwhile() -> None:
    watch = LoadWatch(300, 0)
    news: list[str] = []
    for second in range(1, 60):
        assert watch.tick(1.0) == "", second
        news += [notice] if (notice := watch.notice()) else []
    assert len(news) == 11 and news[0] == "its runner has not spoken for 5 of 60 s"
    assert "said nothing for 60 s" in watch.tick(1.0)
    spoken = LoadWatch(300, 0)
    spoken.report_progress(1)
    for _ in range(5):
        assert spoken.tick(1.0) == spoken.notice() == ""


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("share", "ends_after"),
    [
        (0.0, 50),
        (0.004, 50),  # it only reports
        (0.06, 833),  # it computes on a busy machine: 50 s of CPU time
        (1.0, 50),  # it runs in circles
        (8.0, 50),  # in several threads
    ],
)
def test_a_runner_that_computes_has_its_patience_in_cpu_time(share: float, ends_after: int) -> None:
    watch = LoadWatch(50, 0)
    for _ in range(ends_after - 1):
        watch.report_progress(7)
        assert watch.tick(1.0, share) == ""
    watch.report_progress(7)
    assert "did not get on" in watch.tick(1.0, share) + watch.tick(1.0, share)


def test_cpu_time_grows_while_a_process_computes_and_stands_still_while_it_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            before = cpu_seconds(child.pid)
            while cpu_seconds(child.pid) <= before + 0.1:
                time.sleep(0.01)
            child.send_signal(signal.SIGSTOP)
            while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            stopped_at = cpu_seconds(child.pid)
            time.sleep(0.3)
            assert cpu_seconds(child.pid) == stopped_at
        finally:
            child.kill()
    assert cpu_seconds(child.pid) == 0.0


# -------------------------------------------------------------------------- real runners


SLOW = """
import time
import exo_node.shard.model.loader_import
import exo_node.shard.model.load as load

really_load = load.load

def slowly(spec, report, **how):
    end = time.monotonic() + 25
    while time.monotonic() < end:
        begin = time.process_time()
        while time.process_time() < begin + 0.06:
            pass
        time.sleep(0.3)
    return really_load(spec, report, **how)

load.load = slowly
"""
"""It reports nothing for 25 s, in which it computes for a few."""


async def test_a_runner_that_is_slow_and_computes_is_loaded(tmp_path: Path) -> None:
    supervisor = Supervisor(
        faulty(tmp_path, SLOW, load_timeout_s=8), lambda _, why: exited.append(why)
    )
    exited: list[str] = []
    ready = await supervisor.load(last_spec(), lambda _: None)
    cpu_s = supervisor.cpu_s_of(last_spec().placement, last_spec().stage)
    assert ready.pid and cpu_s and supervisor.states()[0].cpu_s >= cpu_s
    assert exited == []
    await supervisor.close()


WARNING_AND_STUCK = f"""
import sys
print("You are using a model of type `mimo` to instantiate another.", file=sys.stderr, flush=True)
{STUCK}"""


async def test_the_last_words_of_a_runner_that_the_node_ends_are_left_out(
    tmp_path: Path,
) -> None:
    host = faulty(tmp_path, WARNING_AND_STUCK, load_timeout_s=8)
    supervisor = Supervisor(host, lambda _, why: None)
    with pytest.raises(LoadFailed, match="did not get on for") as caught:
        _ = await supervisor.load(last_spec(), lambda _: None)
    assert "mimo" not in caught.value.message and "last wrote" not in caught.value.message


async def test_a_runner_that_is_stopped_while_it_loads_is_ended(
    tmp_path: Path,
) -> None:
    """It is not awaited as one whose disk is slow, while another node may have room."""

    supervisor = Supervisor(
        faulty(tmp_path, STUCK, load_timeout_s=600), lambda _, why: exited.append(why)
    )
    exited: list[str] = []

    def stop(_: pb.LoadProgress) -> None:
        os.kill(supervisor.states()[0].pid, signal.SIGSTOP)
        stopped.append(supervisor.states()[0].pid)

    stopped: list[int] = []
    async with asyncio.timeout(120):
        with pytest.raises(LoadFailed, match="a signal stopped it for 10 s while it loaded"):
            _ = await supervisor.load(last_spec(), stop)
    assert (supervisor.states(), exited) == ([], [])
    assert stopped and not psutil.pid_exists(stopped[0])


async def test_a_runner_whose_compute_thread_ends_later_is_lost_with_that_reason(
    tmp_path: Path,
) -> None:
    exited: list[RunnerProcess] = []
    host = faulty(tmp_path, NUMB_LATER)
    process = RunnerProcess(last_spec(), exited.append, on_answer, LAN)
    _ = await process.start(host, lambda _: None)
    (tmp_path / "now").touch()
    _ = await eventually(lambda: bool(exited), 180)
    assert "compute thread" in exited[0].error
    await process.stop()


async def test_an_idle_runner_that_is_stopped_is_lost_with_that_reason() -> None:
    """Nobody asks it anything, so nothing else would notice."""

    lost: list[str] = []
    supervisor = Supervisor(runner_host(), lambda _, why: lost.append(why))
    ready = await supervisor.load(last_spec(), lambda _: None)
    os.kill(ready.pid, signal.SIGSTOP)
    _ = await eventually(lambda: bool(lost), 180)
    assert "said nothing for 10 s" in lost[0]
    assert supervisor.states() == []
    await supervisor.close()
