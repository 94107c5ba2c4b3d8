"""The one writer of files that are replaced: whole or not at all, whatever happens meanwhile.

And what to say of a folder that may not be looked into.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600, sync: bool = False) -> None:
    """Whoever reads sees the old content or the new one. Raises OSError, and leaves the old one.

    `sync`: returns when the file and its name are safe from a power cut. The folder is not made: a
    data folder that is gone must not come back empty.
    """
    with draft(path, data, mode=mode, sync=sync) as written:
        written.replace(path)
    if sync:
        sync_folder(path.parent)


@contextmanager
def draft(path: Path, data: bytes, *, mode: int = 0o600, sync: bool = False) -> Generator[Path]:
    """A file beside `path`, of that mode from its first byte on; gone at the end unless renamed."""
    written = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            _ = file.write(data)
            file.flush()
            if sync:
                os.fsync(descriptor)
        yield written
    finally:
        written.unlink(missing_ok=True)


def closed(folder: Path) -> str:
    """Why a folder cannot be looked into, with the remedy; "": it can, or is not there."""
    try:
        with os.scandir(folder):
            _ = os.stat(os.path.join(folder, "."))  # listed it may be, and still not entered
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror}); mend its permissions"
    return ""


def sync_folder(folder: Path) -> None:
    """The names in it are on the disk then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
