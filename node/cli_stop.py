"""`exo-node stop`: the node on a data folder is asked to end, and waited for."""

import os
import signal
import time
from pathlib import Path
from typing import Final

from ..placement.errors import ExoNodeError
from .cli_client import no_node
from .presence import find_running

_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.05


def stop_node(folder: Path) -> int:
    """The pid of the node that has ended. Raises CallFailed where none runs, and ExoNodeError."""
    running = find_running(folder)
    if running is None:
        raise no_node(f"no node runs with the data folder {folder}")
    _end(running.pid, folder)
    return running.pid


def _end(pid: int, folder: Path) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise ExoNodeError(f"pid {pid} belongs to another user; stop it as that user") from error
    deadline = time.monotonic() + _TIMEOUT_S
    while (holder := find_running(folder)) is not None and holder.pid == pid:
        if time.monotonic() > deadline:
            raise ExoNodeError(
                f"the node (pid {pid}) still runs {_TIMEOUT_S:g} s after it was asked to end; "
                f"`kill -9 {pid}` ends it without care for its requests"
            )
        time.sleep(_POLL_S)
