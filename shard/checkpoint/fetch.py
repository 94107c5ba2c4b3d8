"""Fetches one file over HTTP into a partial file that outlives the process, and checks its hash."""

import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from ...placement.errors import DownloadFailed
from .progress import Progress, partial_of, size_of

_REPORT_BYTES = 256 << 10
_ENOUGH_BYTES = 1 << 20
_PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Before each attempt after a broken connection; `_ENOUGH_BYTES` of new data start the row."""


class Meter:
    """Counts bytes over several files and reports a number that never falls."""

    def __init__(self, total: int, done: int, report: Callable[[Progress], None]) -> None:
        self._total = total
        self._done = self._shown = done
        self._report = report
        self._lock = threading.Lock()
        report(Progress(done, total, ""))

    def add(self, count: int, file: str) -> None:
        """`count` is negative where a file starts over."""
        with self._lock:
            self._done += count
            if self._done - self._shown >= _REPORT_BYTES:
                self._shown = min(self._done, self._total)
                self._report(Progress(self._shown, self._total, file))

    def finish(self) -> None:
        self._report(Progress(self._total, self._total, ""))


class Stopped(Exception):
    """`stop` was set while a file was fetched."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One file on its way to `target`, which appears only when it is whole.

    `open_at` starts a GET from the given byte on and raises for every refusal below 500; the
    statuses above it and broken connections are tried again. `name` is the file's for a person.
    """

    name: str
    size: int
    sha256: str
    target: Path
    open_at: Callable[[int], AbstractContextManager[httpx2.Response]]
    meter: Meter
    stop: threading.Event

    @property
    def partial(self) -> Path:
        return partial_of(self.target)

    def run(self) -> None:
        """Raises DownloadFailed, Stopped, OSError, or what `open_at` or the meter raise."""
        if size_of(self.partial) > self.size:
            self.partial.unlink()
        failures = 0
        while (before := size_of(self.partial)) < self.size:
            why = self._attempt(before)
            here = size_of(self.partial)
            if here >= self.size:
                break
            failures = 1 if here - before >= _ENOUGH_BYTES else failures + 1
            if failures > len(_PAUSES_S):
                raise self._broken_off(here, why)
            if self.stop.wait(_PAUSES_S[failures - 1]):
                raise Stopped
        self._check_hash()
        os.replace(self.partial, self.target)

    def _attempt(self, position: int) -> str:
        """Append what one connection brings; returns why it ended, if that may pass."""
        try:
            with self.open_at(position) as response:
                if response.status_code >= 500:
                    return f"the server answered {response.status_code}"
                self._append(response, position)
        except httpx2.TransportError as error:
            return str(error) or type(error).__name__
        return "the server ended its answer early"

    def _append(self, response: httpx2.Response, position: int) -> None:
        if position and response.status_code != 206:  # the server ignores ranges
            self.meter.add(-position, self.name)
            position = 0
        with self.partial.open("ab" if position else "wb") as out:
            for chunk in response.iter_bytes():
                if self.stop.is_set():
                    raise Stopped
                out.write(chunk[: self.size - position])
                self.meter.add(len(chunk), self.name)
                position += len(chunk)
                if position >= self.size:  # what a server sends beyond it is not read
                    return

    def _check_hash(self) -> None:
        with self.partial.open("rb") as data:
            digest = hashlib.file_digest(data, "sha256").hexdigest()
        if digest == self.sha256:
            return
        self.partial.unlink()
        raise DownloadFailed(
            f"{self.name} arrived damaged (SHA-256 {digest}, not {self.sha256}). "
            "Start the download again; it begins anew with this file.",
            param=self.name,
        )

    def _broken_off(self, here: int, why: str) -> DownloadFailed:
        return DownloadFailed(
            f"{self.name} broke off at {here} of {self.size} bytes too often ({why}). Check the "
            "network and start the download again; it goes on from there.",
            param=self.name,
        )
