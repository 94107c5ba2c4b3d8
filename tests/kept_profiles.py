"""Measurements of this session's loads, copied to the data folders of later nodes and runners.

Only the first measurement of a kind by a load is shared. Values that a node learns from answers
are not, so that no test depends on another one.
"""

import json
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

_LEARNED: dict[str, list[Any]] = {"cells": [], "seen": [], "accepted": []}
_folder: Path | None = None
_sources: set[Path] = set()
_lock = threading.Lock()
"""Nodes are started by several threads at once."""
_ended = threading.Event()
_EVERY_S = 0.3
"""A load takes longer: the next one finds what this one measured."""


def share(folder: Path | None) -> None:
    """Sets the folder of the session's measurements; None, as in bench/, shares nothing."""
    global _folder, _ended
    with _lock:
        _folder = folder
        _sources.clear()
        _ended.set()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        _ended = threading.Event()
        threading.Thread(target=_exchange, args=(folder, _ended), daemon=True).start()


def _exchange(folder: Path, ended: threading.Event) -> None:
    """Exchanges between running nodes: of those of one test only the first to load measures."""
    while not ended.wait(_EVERY_S):
        with _lock:
            for each in _sources:
                _take(each / "profiles", folder)
            for each in _sources:
                _take(folder, each / "profiles")


def seed(data_dir: Path, *, source: bool = True) -> None:
    """Copies the measurements to a new data folder; those of a `source` are collected later."""
    with _lock:
        if _folder is None:
            return
        for each in _sources:
            _take(each / "profiles", _folder)
        if source:
            _sources.add(data_dir)
        target = data_dir / "profiles"
        if not target.exists():
            target.mkdir(parents=True)
        _take(_folder, target)


def take(data_dir: Path) -> None:
    """Collects the measurements of a node that has ended."""
    with _lock:
        if _folder is not None and data_dir in _sources:
            _sources.discard(data_dir)
            _take(data_dir / "profiles", _folder)


def _take(source: Path, target: Path) -> None:
    for path in source.glob("*.json"):
        measured = _as_loaded(path)
        if measured is None or _holds(target / path.name, measured):
            continue
        with suppress(OSError):  # a test may have taken the folder away, or filled the disk
            handle, name = tempfile.mkstemp(dir=target, prefix=".")
            with os.fdopen(handle, "w") as file:
                json.dump(measured, file)
            os.replace(name, target / path.name)


def _as_loaded(path: Path) -> dict[str, Any] | None:
    """The file without learned values; None if nothing is left, or it is a test's own refusal."""
    try:
        stored: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError):  # a test may fill, remove or garble the disk
        return None
    if stored.get("refusal") or not _measured(stored):
        return None
    return stored | {name: empty for name, empty in _LEARNED.items() if name in stored}


def _holds(path: Path, measured: dict[str, Any]) -> bool:
    """Whether the file has at least as many parts: a model without its head has fewer, and only a
    generator's layer times include the tail."""
    try:
        return _measured(json.loads(path.read_bytes())) >= _measured(measured)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):  # of a test's own doing
        return True


def _measured(stored: dict[str, Any]) -> int:
    """How many parts of a profile, of layer times, or of a check that a model can be split."""
    parts = ("batch_identity", "identity", "probed", "decode_s", "tail_s", "schedule")
    return sum(1 for part in parts if stored.get(part))
