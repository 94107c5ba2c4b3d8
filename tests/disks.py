"""A small disk that a test can fill."""

import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path

import pytest


class FilledDisk:
    """A small disk that is full until the filler is deleted."""

    def begin(self, folder: Path) -> None:
        with (folder / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError as fault:
                assert fault.errno == ENOSPC

    def end(self, folder: Path) -> None:
        (folder / "filler").unlink()


@contextmanager
def small_disk(folder: Path, size: str = "512k") -> Generator[None]:
    """A mounted tmpfs; skips the test where this user may not mount."""
    folder.mkdir(parents=True)
    mount = shutil.which("mount") or "mount"
    command = [mount, "-t", "tmpfs", "-o", f"size={size}", "exo-test", str(folder)]
    try:
        mounting = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk with")
    if mounting.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounting.stderr.decode().strip()}")
    try:
        yield
    finally:
        _ = subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)
