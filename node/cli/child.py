"""The child process of a command that runs a model by itself; it never outlives the command."""

import contextlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from ...placement.errors import LoadFailed

END_S: Final = 5.0


def run_child(module: str, request: str, environment: Mapping[str, str]) -> int:
    """Runs `python -m module` with `request` as the first line of its stdin; its exit status.

    Its output is this process's, and its stdin ends with this process. Where this call is
    interrupted the child is ended first. Raises LoadFailed where a signal ended it.
    """
    child = subprocess.Popen(
        (sys.executable, "-P", "-m", module),
        stdin=subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the child
    )
    assert child.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # it ended early: its status says how
            _ = child.stdin.write(request.encode() + b"\n")
            child.stdin.flush()
        status = child.wait()
    except BaseException:  # Ctrl-C above all: the child must not outlive its command
        _end(child)
        raise
    finally:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
    if status < 0:
        raise LoadFailed(
            f"the process that ran the model was ended by signal {-status}; if memory ran out, "
            "close other programs or choose a smaller quantisation"
        )
    return status


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    try:
        _ = child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        _ = child.wait()
