"""Small files of measurements: written whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Whoever reads sees the old text or the new one, after a crash too. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            _ = file.write(text)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
