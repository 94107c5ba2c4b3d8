"""Which requests may hold rows in the caches: together no more than the memory was planned for."""

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from ...mtp.seams import Wait

GROWTH: Final = 512
"""Rows of an answer that are counted from the start; few grow longer, and none is stopped."""


@dataclass(slots=True, eq=False)
class _Entry:
    rows: int
    came: "Future[None]" = field(default_factory=lambda: Future[None]())


class Admission:
    """In the order of arrival. All methods run on the compute thread."""

    def __init__(self, rows: int) -> None:
        """`rows`: of one full context, which a placement has the memory for."""
        self._most = rows
        self._held = 0
        self._inside: set[_Entry] = set()
        self._waiting: deque[_Entry] = deque()

    def enter(self, prompt: int, max_tokens: int) -> Generator[Wait, None, _Entry]:
        """Waits until there is room; what it returns must `leave`. One alone always has room."""
        entry = _Entry(min(self._most, prompt + min(max_tokens, GROWTH)))
        self._waiting.append(entry)
        self._admit()
        try:
            if entry not in self._inside:
                yield Wait(entry.came)
        except GeneratorExit:
            self.leave(entry)
            raise
        return entry

    def leave(self, entry: _Entry) -> None:
        if entry in self._inside:
            self._inside.remove(entry)
            self._held -= entry.rows
        elif entry in self._waiting:
            self._waiting.remove(entry)
        self._admit()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _admit(self) -> None:
        while self._waiting:
            rows = self._waiting[0].rows
            if self._inside and self._held + rows > self._most:
                return
            entry = self._waiting.popleft()
            self._inside.add(entry)
            self._held += rows
            entry.came.set_result(None)
