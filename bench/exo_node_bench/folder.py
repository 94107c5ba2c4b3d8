"""The folder of a result: claimed before the bench, written during it and at its end."""

import csv
import io
import os
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from exo_node.placement.errors import InvalidSettings
from exo_node.shard.checkpoint.files import write_atomic

PAGE_FILE: Final = "index.html"
_LEAST_FREE: Final = 64 << 20
_MODE: Final = 0o644
"""They are made to be shared."""
_CLAIM: Final = b"{}\n"


def output_folder(output: str | None, kind: str, model: str) -> Path:
    """The folder that --output names, or a new one in `kind` here."""
    if output is not None:
        return Path(output).expanduser().absolute()
    last = model.rstrip("/").rpartition("/")[2]
    name = "".join(c if c.isalnum() or c in ".-_" else "-" for c in last).strip(".-") or "model"
    return Path.cwd() / kind / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def claim(folder: Path, file: str) -> None:
    """Makes the folder and its JSON file, which no other bench then takes.

    Raises InvalidSettings if it is not empty, cannot be written to, or has no room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise fault(folder, "is not empty; name a new folder")
        with (folder / file).open("xb") as stream:  # fails where another bench was first
            _ = stream.write(_CLAIM)
            stream.flush()
            os.fsync(stream.fileno())
        free = shutil.disk_usage(folder).free
    except FileExistsError as error:
        what = "is not a folder" if not folder.is_dir() else "is not empty"
        raise fault(folder, f"{what}; name a new folder") from error
    except OSError as error:
        raise fault(folder, f"cannot be written to ({error.strerror}); name another") from error
    if free < _LEAST_FREE:
        release(folder, file)
        raise fault(folder, f"has {free / 1e6:.0f} MB left, too little; name another")


def release(folder: Path, file: str) -> None:
    """Removes a claimed folder in which no result was written."""
    claimed = folder / file
    if claimed.is_file() and claimed.read_bytes() == _CLAIM:
        claimed.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Replaces files, each at once, so that a bench that is killed leaves its results so far.

    Raises OSError.
    """
    for name, text in texts.items():
        write_atomic(folder / name, text.encode(), mode=_MODE)


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows with the same columns; None is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def fault(folder: Path, what: str) -> InvalidSettings:
    return InvalidSettings(f"--output: {folder} {what}", param="--output")
