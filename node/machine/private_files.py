"""Files that only their owner may read, created and replaced as a whole."""

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Final

from ...placement.errors import InvalidSettings
from ...shard.checkpoint.files import draft, sync_folder, write_atomic

_FILE_LIMIT: Final = 4096  # bytes: no key is longer, and the file may be a pipe without an end
_PAUSE_S: Final = 0.02


def read_text(path: Path, origin: str) -> str:
    """The beginning of a key file. Raises InvalidSettings that names the setting `origin`."""
    try:
        with path.open("rb") as file:
            return file.read(_FILE_LIMIT).decode("ascii", "replace")
    except OSError as fault:
        raise InvalidSettings(
            f"{origin}: {path} cannot be read: {fault.strerror}; give a file that holds the key",
            param=origin,
        ) from fault


def read_or_create(path: Path, fresh: bytes) -> bytes:
    """The file's content; creates it with `fresh` if it is missing. Its mode becomes 0600."""
    try:
        if not path.exists():
            create_private(path, fresh)
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                os.fchmod(file.fileno(), 0o600)
            return file.read(_FILE_LIMIT)
    except OSError as fault:
        raise InvalidSettings(
            f"{path} cannot be used: {fault.strerror}; check who owns the data folder, or give "
            "another --data-dir",
            param=str(path),
        ) from fault


def create_private(path: Path, data: bytes) -> None:
    """Creates a file with mode 0600, complete or not at all; an existing one stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with draft(path, data, sync=True) as complete, contextlib.suppress(FileExistsError):
        os.link(complete, path)  # if another start was first, its key counts
    sync_folder(path.parent)


def update_private(path: Path, data: bytes) -> None:
    """Replaces a file without a sync: a power cut may lose the change. The folder must exist."""
    write_atomic(path, data)


def replace_private(path: Path, data: bytes) -> None:
    """Replaces a file with mode 0600 atomically and syncs it; creates the folder if needed."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(path, data, sync=True)


def lock_exclusively(descriptor: int, tries: int) -> bool:
    """Locks an open file, unless another process holds it at each of `tries`, 20 ms apart.

    Raises OSError.
    """
    for _ in range(tries):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_S)
        else:
            return True
    return False
