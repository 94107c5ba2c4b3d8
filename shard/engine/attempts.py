"""Measurements that were under way when their process ended, kept in small files."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...mtp.pieces import Pieces
from ...placement.errors import DeviceLost
from ..model.open_model import headline

log = logging.getLogger(__name__)

MAX_DEATHS: Final = 2
"""Ends of a process within a measurement, after which it is not repeated. One may be chance."""
FATAL: Final = (
    f"the measurement that it needs ended the runner {MAX_DEATHS} times on this machine; it is not "
    "repeated with these versions of MLX and mlx-lm"
)


@dataclass(frozen=True, slots=True)
class Attempts:
    """Counts the processes that ended within each measurement of one profile.

    `profile` is the profile's path, whose name covers the checkpoint and the versions. None: they
    are not counted. Beside it lies a file for each unfinished measurement, of a byte for each.
    """

    profile: Path | None = None

    def guard(self, name: str, pieces: Pieces[None], refuse: Callable[[str], None]) -> Pieces[None]:
        """Does the pieces of measurement `name`; or calls `refuse` with the reason, where it raises
        or is known to end processes. Raises DeviceLost."""
        path = self.profile and self.profile.with_suffix(f".{name}")
        deaths = _deaths(path)
        if deaths >= MAX_DEATHS:
            log.warning("%s: %s; without %s it is", name, FATAL, path)
            refuse(FATAL)
            return
        try:
            with contextlib.closing(pieces):
                while True:
                    _write(path, deaths + 1)
                    wait_s = next(pieces)
                    _write(path, deaths)
                    yield wait_s
        except StopIteration:
            pass
        except DeviceLost:  # the process ends
            raise
        # The compute thread's edge: answers continue without what it was to allow.
        except Exception as fault:
            log.exception("a measurement (%s) failed", name)
            refuse(
                f"the measurement that it needs failed ({headline(fault)}); it is repeated when "
                "the model is loaded again"
            )
        _write(path, 0)


def _deaths(path: Path | None) -> int:
    try:
        return path.stat().st_size if path else 0
    except OSError:
        return 0


def _write(path: Path | None, count: int) -> None:
    """Makes the file `count` bytes long, or removes it. A full disk is no error: the count is only
    for later loads."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        if count:
            path.parent.mkdir(parents=True, exist_ok=True)
            _ = path.write_bytes(b"." * count)
        else:
            path.unlink(missing_ok=True)
