"""The lock of a data folder, which ends with the node's process, and the file with its address.

Only the lock shows that a node runs. The kernel drops it however the process ends, so the run file
of a killed node is ignored.
"""

import errno
import fcntl
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...placement.errors import InvalidSettings
from ...shard.checkpoint.files import write_atomic
from .private_files import lock_exclusively

_LOCK: Final = "node.lock"
_RECORD: Final = "node.json"
_TRIES: Final = 20  # `find_running` of another process holds the lock for microseconds


@dataclass(frozen=True, slots=True)
class Running:
    """The node that holds a data folder. The HTTP address is None while it is still starting."""

    pid: int
    http_host: str | None = None
    http_port: int | None = None
    models_dirs: tuple[str, ...] = ()
    """The folders of its --models-dir."""


class DataDirLock:
    """This process's lock on its data folder, from `acquire` to `close`."""

    def __init__(self, data_dir: Path, descriptor: int) -> None:
        """Use `acquire`; `descriptor` holds the lock."""
        self._data_dir = data_dir
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, data_dir: Path) -> "DataDirLock":
        """Lock the folder, making it (mode 0700) if need be.

        Raises InvalidSettings if another process holds it or it cannot be written.
        """
        try:
            return cls(data_dir, _open_locked(data_dir))
        except OSError as error:
            raise _unusable(data_dir, error) from error

    def announce(self, host: str, port: int, models_dirs: Sequence[Path] = ()) -> None:
        """Write the run file, once HTTP is bound to `host`:`port`.

        Raises InvalidSettings if the folder cannot be written, as where its disk is full.
        """
        record = {
            "pid": os.getpid(),
            "http_host": host,
            "http_port": port,
            "models_dirs": [str(folder.absolute()) for folder in models_dirs],
        }
        text = json.dumps(record) + "\n"
        try:
            write_atomic(self._data_dir / _RECORD, text.encode(), mode=0o644)
        except OSError as error:
            raise _unusable(self._data_dir, error) from error

    def close(self) -> None:
        """Remove the run file, then release the lock; a second call does nothing."""
        if self._descriptor is None:
            return
        (self._data_dir / _RECORD).unlink(missing_ok=True)
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)  # The lock file stays: removing it would race with a start.
        self._descriptor = None

    def __enter__(self) -> "DataDirLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_running(data_dir: Path) -> Running | None:
    """The node that holds `data_dir` now, or None; raises InvalidSettings if it is unreadable."""
    try:
        descriptor = os.open(data_dir / _LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unusable(data_dir, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(descriptor, data_dir)
    finally:
        os.close(descriptor)
    return None


def reachable(host: str, port: int) -> str:
    """`host:port` of a server bound to `host`; one bound to all addresses is on loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _open_locked(data_dir: Path) -> int:
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(data_dir / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        _lock(descriptor, data_dir)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        (data_dir / _RECORD).unlink(missing_ok=True)
        undo.pop_all()
    return descriptor


def _lock(descriptor: int, data_dir: Path) -> None:
    if lock_exclusively(descriptor, _TRIES):
        return
    holder = _read_holder(descriptor, data_dir)
    who = f"the node with pid {holder.pid}" if holder else "another process"
    raise InvalidSettings(
        f"--data-dir: {data_dir} is in use by {who}; "
        "stop it with `exo-node stop`, or give this one another --data-dir",
        param="--data-dir",
    )


def _read_holder(descriptor: int, data_dir: Path) -> Running | None:
    """The run file of the lock's holder; None in the instant before the holder writes its pid."""
    # The pid is on the lock file: it is there before the address is known.
    text = os.pread(descriptor, 32, 0).decode(errors="replace")
    if not (text.isascii() and text.isdigit() and int(text) > 1):
        return None
    pid = int(text)
    try:
        record: Any = json.loads((data_dir / _RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return Running(pid)
    match record:
        case {"http_host": str(host), "http_port": int(port), "models_dirs": folders} if (
            record.get("pid") == pid
        ):
            return Running(pid, host, port, tuple(map(str, folders)))
        case _:
            return Running(pid)


def _unusable(data_dir: Path, error: OSError) -> InvalidSettings:
    reason = (
        "its file system has no locks"
        if error.errno in (errno.ENOLCK, errno.ENOTSUP)
        else error.strerror or str(error)
    )
    return InvalidSettings(
        f"--data-dir: {data_dir} cannot be used: {reason}; give a folder that you can write to",
        param="--data-dir",
    )
