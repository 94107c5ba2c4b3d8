"""The folder of a result: checked before the bench, written during it."""

import csv
import io
import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import Final

from exo_node.placement.errors import InvalidSettings
from exo_node.shard.checkpoint.files import write_atomic

from .result import Result

JSON_FILE, CSV_FILE, PAGE_FILE = "serve.json", "serve.csv", "index.html"
_LEAST_FREE: Final = 64 << 20
_MODE: Final = 0o644
"""They are made to be shared."""


def default_folder(model: str, now: datetime) -> Path:
    """A new folder in `serve-bench` here."""
    name = "".join(c if c.isalnum() or c in ".-_" else "-" for c in model.rpartition("/")[2])
    return Path.cwd() / "serve-bench" / f"{name.strip('.-') or 'model'}-{now:%Y%m%d-%H%M%S}"


def claim(folder: Path) -> None:
    """Makes the folder and its JSON file, which no other bench then takes.

    Raises InvalidSettings if it is not empty, cannot be written to, or has no room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise _fault(folder, "is not empty; name a new folder")
        with (folder / JSON_FILE).open("xb") as file:  # fails where another bench was first
            _ = file.write(b"{}\n")
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except FileExistsError as error:
        what = "is not a folder" if not folder.is_dir() else "is not empty"
        raise _fault(folder, f"{what}; name a new folder") from error
    except OSError as error:
        raise _fault(folder, f"cannot be written to ({error.strerror}); name another") from error
    if free < _LEAST_FREE:
        release(folder)
        raise _fault(folder, f"has {free / 1e6:.0f} MB left, too little; name another")


def release(folder: Path) -> None:
    """Removes a claimed folder in which nothing was written."""
    (folder / JSON_FILE).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def write_json(folder: Path, result: Result) -> None:
    """Replaces the JSON, so that a bench that is killed leaves its results so far."""
    write_atomic(folder / JSON_FILE, f"{result.model_dump_json(indent=1)}\n".encode(), mode=_MODE)


def write_all(folder: Path, result: Result, page: str) -> None:
    """Writes all files. Raises OSError."""
    write_json(folder, result)
    write_atomic(folder / CSV_FILE, as_csv(result).encode(), mode=_MODE)
    write_atomic(folder / PAGE_FILE, page.encode(), mode=_MODE)


def as_csv(result: Result) -> str:
    """One row for each run; a figure that there is none of is empty."""
    rows = [
        {
            "server": run.server,
            "workload": run.workload,
            "max_concurrency": run.max_concurrency,
            "repeat": run.repeat,
            "output_tokens_by": run.output_tokens_by,
            **run.figures,
        }
        for run in result.runs
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _fault(folder: Path, what: str) -> InvalidSettings:
    return InvalidSettings(f"--output: {folder} {what}", param="--output")
