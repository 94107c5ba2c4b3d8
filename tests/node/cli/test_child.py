"""The child process of a command: its status, its end, and that it never outlives the command."""

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from api_stub import COMMAND, environment
from interrupts import ending_on_interrupt

from exo_node.node.cli.child import read_child, run_child
from exo_node.placement.errors import LoadFailed


def module(folder: Path, text: str) -> Mapping[str, str]:
    """The environment in which `python -m child` runs `text`."""
    _ = (folder / "child.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


def test_the_request_is_the_childs_first_line_and_its_status_comes_back(tmp_path: Path) -> None:
    reads = "import sys\nsys.exit(7 if sys.stdin.readline() == '{}\\n' else 1)"
    assert run_child("child", "{}", module(tmp_path, reads)) == 7


def test_a_child_that_ends_without_reading_is_told_by_its_status(tmp_path: Path) -> None:
    more_than_a_pipe_holds = "x" * (1 << 20)
    assert run_child("child", more_than_a_pipe_holds, module(tmp_path, "raise SystemExit(3)")) == 3


def test_a_child_that_a_signal_ends_is_an_error_that_says_so(tmp_path: Path) -> None:
    dies = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(LoadFailed, match="ended by signal 9"):
        _ = run_child("child", "{}", module(tmp_path, dies))


def test_a_childs_output_comes_back_with_its_status(tmp_path: Path) -> None:
    """Its request stays open meanwhile: a child ends with it."""
    writes = "import sys\nprint(sys.stdin.readline().strip() * 40_000)\nsys.exit(3)"
    status, output = read_child("child", "ab", module(tmp_path, writes), 300)
    assert (status, output) == (3, b"ab" * 40_000 + b"\n")


def test_a_child_that_takes_too_long_is_ended_and_the_error_says_so(tmp_path: Path) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile 1: signal.pause()"
    with pytest.raises(LoadFailed, match="not done after 1 s"):
        _ = read_child("child", "{}", module(tmp_path, deaf), 1)


def test_an_interrupted_command_ends_a_child_that_does_not_listen(tmp_path: Path) -> None:
    _ = module(tmp_path, "import signal, sys\nprint('up', file=sys.stderr)\nsignal.pause()")
    script = (
        "import sys; from exo_node.node.cli.child import run_child; "
        "run_child('child', '{}', {'PYTHONPATH': sys.argv[1]})"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with ending_on_interrupt():
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
    with process as started:
        assert started.stderr is not None
        assert started.stderr.readline() == b"up\n"
        [child] = psutil.Process(started.pid).children()
        started.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs([child], timeout=60)
        for each in alive:
            each.kill()
        assert alive == []


def test_the_child_of_a_bench_ends_with_its_command_that_is_killed(tmp_path: Path) -> None:
    command = [*COMMAND, "bench", "mtp", "--output", str(tmp_path / "out")]
    with ending_on_interrupt():
        process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment())
    with process as started:
        assert started.stderr is not None
        assert started.stderr.readline() == b"loading demo\n"
        [child] = psutil.Process(started.pid).children()
        started.kill()
        assert started.wait(60) == -signal.SIGKILL
        _, alive = psutil.wait_procs([child], timeout=60)
        assert alive == []
        assert b"Traceback" not in started.stderr.read()
