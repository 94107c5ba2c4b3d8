"""The one writer of files that are replaced: whole or not at all, whatever happens meanwhile.

Also reads files that may be something else, and names why a folder cannot be read.
"""

import errno
import os
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


def write_atomic(
    path: Path, data: bytes | Iterable[Buffer], *, mode: int = 0o600, sync: bool = False
) -> None:
    """Readers see the old content or the new one. Raises OSError, or what `data` raises when it is
    iterated, and leaves the old one.

    `data`: the content, or its pieces in order. `sync`: returns when the file and its name are safe
    from a power cut. The folder is not created: a data folder that has disappeared must not come
    back empty.
    """
    with draft(path, data, mode=mode, sync=sync) as new:
        new.replace(path)
    if sync:
        sync_folder(path.parent)


@contextmanager
def draft(
    path: Path, data: bytes | Iterable[Buffer], *, mode: int = 0o600, sync: bool = False
) -> Generator[Path]:
    """A file beside `path`, with `mode` from its first byte on; deleted unless it was renamed.

    An OSError names `path`, also where the disk became full during the writing.
    """
    new = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            for piece in (data,) if isinstance(data, bytes) else data:
                _ = file.write(piece)
            file.flush()
            if sync:
                os.fsync(descriptor)
        yield new
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        new.unlink(missing_ok=True)


def read_regular(path: Path, limit: int, flags: int = 0) -> tuple[bytes, os.stat_result]:
    """At most `limit` bytes of a regular file, and its status.

    Raises OSError, also for a pipe or device, which might never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit), status
    finally:
        os.close(descriptor)


def read_bounded(path: Path, limit: int) -> bytes:
    """A regular file of at most `limit` bytes. Raises OSError, and ValueError for a longer one."""
    data, _ = read_regular(path, limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has over {limit} bytes")
    return data


def access_fault(folder: Path) -> str:
    """Why a folder cannot be read, with the remedy; "" where it can, or does not exist."""
    try:
        with os.scandir(folder):
            _ = os.stat(os.path.join(folder, "."))  # some can be listed and not entered
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror}); mend its permissions"
    return ""


def sync_folder(folder: Path) -> None:
    """Returns when the names in the folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
