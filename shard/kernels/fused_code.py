"""A folder of this process alone for the code that MLX compiles for a CPU or an NVIDIA GPU.

MLX 0.32 writes machine code to `mlx/VERSION/cpu` and `mlx/VERSION/ptx` under the temporary folder,
straight under the final names, and loads what already lies there (`compile` in its
`backend/cpu/compiled.cpp`, `read_cached_ptx` in its `backend/cuda/jit_module.cpp`). In a folder
that all users and processes of a machine share, another user's code would be loaded, and a process
would load the half of a library that another one is still writing. So each process has a folder of
its own. It starts with links to the files that earlier processes left in the user's cache, and
leaves complete files there. The cache also survives a restart of the machine, which often empties
the temporary folder.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import platform
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TextIO, cast

import mlx.core as mx

from .code_store import is_own_file, private_folder

log = logging.getLogger(__name__)

VERSION: Final = str(cast(Any, mx).__version__)
"""MLX's version, which is the name of its folder."""
SAVE_TIMEOUT_S: Final = 2.0
"""Seconds that an exit waits for the thread that compiles, which may be within a forward."""
_OWN: Final = "run-"
_OWN_NAME: Final = re.compile(r"run-[a-z0-9_]{8}")
"""Names that `mkdtemp` makes."""
_LOCK: Final = "lock"
_FILES: Final = (("cpu", ".so"), ("cpu", ".fused"), ("ptx", ".txt"), ("ptx", ".ptx"))
"""MLX's folders and the suffixes that it loads, and our notes that libraries are complete. It
ignores a .ptx without its .txt, so the .txt is saved first."""
COMPILING: Final = threading.Lock()
"""Held while a thread beside MLX's compiles, or will: nothing is saved meanwhile."""


class FusedCode:
    """This process's folder, filled with links to the files in the user's cache.

    `cache` is None if there is no folder that only this user can write to: then nothing is saved.
    """

    def __init__(self, cache: Path | None) -> None:
        self._cache = None if cache is None else cache / "kept"
        self._cached_names = set[str]()
        self._former_tmpdir: str | None = None
        if cache is not None:
            for folder in (cache / "kept", *(cache / "kept" / part for part, _ in _FILES)):
                if folder.is_symlink():
                    raise OSError(f"{folder} is a link; remove it")
            _remove_ended(cache)
        self.folder, self._lock = _own_folder(cache)
        for part, suffix in _FILES:
            self._mlx_folder(part).mkdir(parents=True, exist_ok=True)
            if self._cache is not None:
                for folder in (self._cache, self._cache / part):
                    folder.mkdir(mode=0o700, exist_ok=True)
                files = list(_own_files(_files(self._cache / part, suffix)))
                self._cached_names.update(_link(files, self._mlx_folder(part)))

    def use(self) -> None:
        """Makes MLX compile in `folder`. Python's own temporary files stay where they were."""
        _ = tempfile.gettempdir()
        self._former_tmpdir = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(self.folder)

    def save(self) -> None:
        """Saves new code for later processes, unless some is being written beside.

        Runs on MLX's thread, which compiles.
        """
        if self._cache is not None and COMPILING.acquire(blocking=False):
            try:
                self._save(self._cache)
            finally:
                COMPILING.release()

    def _save(self, cache: Path) -> None:
        for part, suffix in _FILES:
            new = [
                f
                for f in _files(self._mlx_folder(part), suffix)
                if f.name not in self._cached_names
            ]
            for path in new:
                with contextlib.suppress(OSError), path.open("rb") as file:
                    os.fchmod(file.fileno(), 0o700)  # whatever the umask
                    os.fsync(file)  # else a power cut could leave an empty one under that name
            self._cached_names.update(_link(new, cache / part))

    def remove(self) -> None:
        """Removes the folder at a regular exit. `_remove_ended` does it for killed processes."""
        if os.environ.get("TMPDIR") == str(self.folder):
            del os.environ["TMPDIR"]
            if self._former_tmpdir is not None:
                os.environ["TMPDIR"] = self._former_tmpdir
        self._lock.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _mlx_folder(self, part: str) -> Path:
        return self.folder / "mlx" / VERSION / part


def note(name: str) -> Path:
    """A file that is saved after the libraries that this process has compiled so far."""
    return Path(os.environ.get("TMPDIR", os.devnull)) / "mlx" / VERSION / "cpu" / f"{name}.fused"


@contextlib.contextmanager
def compiling_apart() -> Generator[Callable[[], None]]:
    """Makes MLX compile in a folder of this process; yields `FusedCode.save`.

    On Metal there are no such files, and nothing happens.
    """
    if mx.metal.is_available():
        yield lambda: None
        return
    if (code := _private_code()) is None:
        yield lambda: None
        return
    code.use()
    try:
        yield code.save
    finally:
        code.remove()


async def wait_for_save(saving: "Future[None]") -> None:
    """Waits for `FusedCode.save`, which was submitted to MLX's thread.

    A failure or timeout is only logged: a later process compiles the code again.
    """
    try:
        async with asyncio.timeout(SAVE_TIMEOUT_S):
            await asyncio.wrap_future(saving)
    except (OSError, TimeoutError) as fault:
        log.info("what MLX compiled last is not kept: %s", fault or "a forward was under way")


def _private_code() -> FusedCode | None:
    """A folder for this process, or None if none can be made, which MLX reports if it compiles."""
    for cache in (users_folder(), None):
        try:
            return FusedCode(cache)
        except OSError as fault:
            log.warning("what MLX compiles is not kept: %s", fault)
    return None


def users_folder() -> Path | None:
    """The folder in the user's cache, or None if others can write to it, or it cannot be made.

    Its name contains MLX's version and the target that it compiles for: a home may be on a
    network, and a machine may have two kinds of GPU.
    """
    return private_folder("fused", f"{VERSION}-{_target()}")


def _target() -> str:
    info = mx.device_info()
    major, minor = (info.get(f"compute_capability_{part}") for part in ("major", "minor"))
    return platform.machine() if major is None else f"sm_{major}{minor}"


def _own_folder(parent: Path | None) -> tuple[Path, TextIO]:
    """A new folder, and its lock, which is held until the process ends in whatever way."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_OWN, dir=parent))
        lock = (folder / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # else another process took it for a dead one's before it was locked
            return folder, lock
        lock.close()


def _remove_ended(parent: Path) -> None:
    """Removes the folders of killed processes."""
    for folder in parent.glob(f"{_OWN}*"):
        if not _OWN_NAME.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _own_files(files: Iterable[Path]) -> Iterator[Path]:
    """The files that only this user can have written; removes the others, to be compiled again."""
    for file in files:
        if is_own_file(file):
            yield file
        else:
            with contextlib.suppress(OSError):
                file.unlink()


def _files(folder: Path, suffix: str) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix == suffix]


def _link(files: Iterable[Path], folder: Path) -> Iterator[str]:
    """Links files into a folder; yields the names of those that are there now.

    A file that cannot be linked is compiled again.
    """
    for file in files:
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                os.link(file, folder / file.name)
            yield file.name
