"""Machine code on disk, compiled once a machine; free of MLX."""

import hashlib
import tempfile
from pathlib import Path
from typing import Final

import platformdirs

_SUM: Final = hashlib.sha256().digest_size


def private_folder() -> Path | None:
    """Ours alone, since machine code is loaded from it; None where there can be none."""
    folder = platformdirs.user_cache_path("exo-node", appauthor=False) / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = folder.stat()
    except OSError:
        return None
    return (
        folder
        if held.st_uid == Path("/proc/self").stat().st_uid and not held.st_mode & 0o022
        else None
    )


def kept(path: Path) -> bytes | None:
    """None for what is not there or is not whole."""
    try:
        held = path.read_bytes()
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
