"""Where MLX keeps what it compiles for a CPU or an NVIDIA GPU: in a folder of this process alone.

MLX 0.32 writes machine code to `mlx/VERSION/cpu` and `mlx/VERSION/ptx` under the temporary folder,
straight under the final names, and loads what already lies there (`compile` in its
`backend/cpu/compiled.cpp`, `read_cached_ptx` in its `backend/cuda/jit_module.cpp`). In a folder
that all users and processes of a machine share, another user's code would be loaded, and a process
would load the half of a library that another one is still writing. So each process has a folder of
its own. It begins with links to what earlier ones left in the user's cache, and leaves there what
it has compiled, whole; also across a restart of the machine, which often empties the other folder.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TextIO, cast

import mlx.core as mx

from .kept_code import is_own_file, private_folder

log = logging.getLogger(__name__)

VERSION: Final = str(cast(Any, mx).__version__)
"""As MLX names its folder."""
KEPT_WITHIN_S: Final = 2.0
"""So long an end waits for the thread that compiles, which may be in the middle of a forward."""
_OWN: Final = "run-"
_LOCK: Final = "lock"
_FILES: Final = (("cpu", ".so"), ("ptx", ".txt"), ("ptx", ".ptx"))
"""Folders of MLX's and what it loads from them. A .ptx counts only with its .txt: so that one is
left first."""


class FusedCode:
    """This process's folder, and the user's from which it begins.

    `kept` is None where there is no folder that only this user can write to: then nothing is kept.
    """

    def __init__(self, kept: Path | None) -> None:
        self._kept = None if kept is None else kept / "kept"
        self._known = set[str]()
        self._before: str | None = None
        if kept is not None:
            _remove_ended(kept)
        self.folder, self._lock = _own_folder(kept)
        for part, suffix in _FILES:
            self._mlxs(part).mkdir(parents=True, exist_ok=True)
            if self._kept is not None:
                for folder in (self._kept, self._kept / part):
                    folder.mkdir(mode=0o700, exist_ok=True)
                held = list(_trusted(_files(self._kept / part, suffix)))
                self._known.update(_linked(held, self._mlxs(part)))

    def use(self) -> None:
        """From now on MLX compiles there. Python's own temporary files stay where they were."""
        _ = tempfile.gettempdir()
        self._before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(self.folder)

    def keep(self) -> None:
        """Leaves what was compiled to later processes. On MLX's thread, which compiles: so nothing
        is half written meanwhile."""
        if self._kept is None:
            return
        for part, suffix in _FILES:
            new = [f for f in _files(self._mlxs(part), suffix) if f.name not in self._known]
            for found in new:
                with contextlib.suppress(OSError), found.open("rb") as file:
                    os.fchmod(file.fileno(), 0o700)  # whatever the umask
                    os.fsync(file)  # else a power cut could leave an empty one under that name
            self._known.update(_linked(new, self._kept / part))

    def remove(self) -> None:
        """At the end of a process that ends by itself; those that do not are tidied up after."""
        if os.environ.get("TMPDIR") == str(self.folder):
            del os.environ["TMPDIR"]
            if self._before is not None:
                os.environ["TMPDIR"] = self._before
        self._lock.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _mlxs(self, part: str) -> Path:
        return self.folder / "mlx" / VERSION / part


@contextlib.contextmanager
def compiling_apart() -> Generator[Callable[[], None]]:
    """MLX compiles in a folder of this process meanwhile; what is given keeps what it compiled.

    See `FusedCode.keep`. On Metal there are no such files, and nothing happens.
    """
    if mx.metal.is_available():
        yield lambda: None
        return
    if (code := _begun()) is None:
        yield lambda: None
        return
    code.use()
    try:
        yield code.keep
    finally:
        code.remove()


async def kept_at_the_end(keeping: "Future[None]") -> None:
    """Waits for `FusedCode.keep`, submitted to MLX's thread; what hinders it costs no orderly end.

    What is not kept is compiled again by a later process.
    """
    try:
        async with asyncio.timeout(KEPT_WITHIN_S):
            await asyncio.wrap_future(keeping)
    except (OSError, TimeoutError) as fault:
        log.info("what MLX compiled last is not kept: %s", fault or "a forward was under way")


def _begun() -> FusedCode | None:
    """None where no folder can be made at all: MLX will say so if it has to compile."""
    for kept in (users_folder(), None):
        try:
            return FusedCode(kept)
        except OSError as fault:
            log.warning("what MLX compiles is not kept: %s", fault)
    return None


def users_folder() -> Path | None:
    """In the user's cache; None where it is not this user's alone, or cannot be made.

    MLX's version and what it compiles for are in its name: a home may be on a network, and a
    machine may have two kinds of GPU.
    """
    return private_folder("fused", f"{VERSION}-{_target()}")


def _target() -> str:
    info = mx.device_info()
    major, minor = (info.get(f"compute_capability_{part}") for part in ("major", "minor"))
    return platform.machine() if major is None else f"sm_{major}{minor}"


def _own_folder(parent: Path | None) -> tuple[Path, TextIO]:
    """A new one, and its lock, which is held as long as the process lives, however it ends."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_OWN, dir=parent))
        lock = (folder / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # else another process took it for a dead one's before it was locked
            return folder, lock
        lock.close()


def _remove_ended(parent: Path) -> None:
    """What killed processes left there."""
    for left in parent.glob(f"{_OWN}*"):
        with contextlib.suppress(OSError), (left / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)


def _trusted(files: Iterable[Path]) -> Iterator[Path]:
    """Those that nobody else can have written; the others go, to be compiled again."""
    for file in files:
        if is_own_file(file):
            yield file
        else:
            with contextlib.suppress(OSError):
                file.unlink()


def _files(folder: Path, suffix: str) -> list[Path]:
    return [found for found in folder.iterdir() if found.suffix == suffix]


def _linked(files: Iterable[Path], folder: Path) -> Iterator[str]:
    """Names of those that are in the folder now. What cannot be linked is compiled again."""
    for file in files:
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                os.link(file, folder / file.name)
            yield file.name
