"""Machine code on disk, compiled once a machine; free of MLX."""

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
    """The folder of those names below `exo-node` in the user's cache, made where it is not there.

    Machine code is loaded from it. So it and each folder up to `exo-node` must be no link, be this
    user's, and nobody else may write to it. None where that is not so; the log says why.
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
    """Whether it is a regular file of this user's, no link, that nobody else can write to."""
    try:
        return not _trouble(path.lstat(), stat.S_ISREG)
    except OSError:
        return False


def _trouble(found: os.stat_result, is_kind: Callable[[int], bool]) -> str:
    """Why code from there is not to be trusted; "" where it is."""
    if not is_kind(found.st_mode):
        return "it is a link, or of another kind"
    if found.st_uid != os.geteuid():
        return "it is another user's"
    return "others can write to it" if found.st_mode & 0o022 else ""


def kept(path: Path) -> bytes | None:
    """None for what is not there, is not whole, or may be another user's."""
    try:
        # Neither a link to elsewhere nor a pipe without an end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if _trouble(os.fstat(descriptor), stat.S_ISREG):
                return None
            held = file.read()
    except OSError:
        return None
    code = held[_SUM:]
    return code if hashlib.sha256(code).digest() == held[:_SUM] else None


def keep(path: Path, code: bytes) -> None:
    """A full disk keeps nothing, and nothing else happens."""
    held: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            held = Path(file.name)
            _ = file.write(hashlib.sha256(code).digest() + code)
        _ = held.replace(path)
    except OSError:
        if held is not None:
            held.unlink(missing_ok=True)
