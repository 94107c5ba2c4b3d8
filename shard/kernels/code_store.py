"""Machine code on disk, compiled once per machine. Free of MLX."""

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import platformdirs

log = logging.getLogger(__name__)

_SUM: Final = hashlib.sha256().digest_size


def private_folder(*names: str) -> Path | None:
    """The folder `names` below `exo-node` in the user's cache; made if it is missing.

    Machine code is loaded from it. So it and each folder up to `exo-node` must not be a link, must
    belong to this user, and no other user may write to it. Else returns None and logs why.
    """
    folder = platformdirs.user_cache_path("exo-node", appauthor=False)
    try:
        for each in (*reversed(folder.parents), folder):
            if not each.exists():
                each.mkdir(mode=0o700, exist_ok=True)
        while (trouble := _trouble(folder.lstat(), stat.S_ISDIR)) == "" and names:
            folder, names = folder / names[0], names[1:]
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as fault:
        trouble = fault.strerror or type(fault).__name__
    if not trouble:
        return folder
    log.warning(
        "what is compiled for this machine is not kept: %s: %s; make it yours alone "
        "(`chmod go-w`), or remove it",
        folder,
        trouble,
    )
    return None


def is_own_file(path: Path) -> bool:
    """Whether `path` is a regular file of this user, no link, that no other user can write to."""
    try:
        return not _trouble(path.lstat(), stat.S_ISREG)
    except OSError:
        return False


def _trouble(status: os.stat_result, is_kind: Callable[[int], bool]) -> str:
    """The reason why code from there is not trusted; "" if it is."""
    if not is_kind(status.st_mode):
        return "it is a link, or of another kind"
    if status.st_uid != os.geteuid():
        return "it is another user's"
    return "others can write to it" if status.st_mode & 0o022 else ""


def load_code(path: Path) -> bytes | None:
    """The code stored at `path`. None if it is missing, incomplete or not surely this user's."""
    try:
        # Neither a link to elsewhere nor a pipe without an end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if _trouble(os.fstat(descriptor), stat.S_ISREG):
                return None
            content = file.read()
    except OSError:
        return None
    code = content[_SUM:]
    return code if hashlib.sha256(code).digest() == content[:_SUM] else None


def store_code(path: Path, code: bytes) -> None:
    """Stores `code` with its checksum. A full disk is no error: the code is compiled again."""
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = Path(file.name)
            _ = file.write(hashlib.sha256(code).digest() + code)
        _ = temporary.replace(path)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
