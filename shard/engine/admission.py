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
    background: bool
    came: "Future[None]" = field(default_factory=lambda: Future[None]())


class Admission:
    """In the order of arrival. All methods run on the compute thread."""

    def __init__(self, rows: int) -> None:
        """`rows`: of one full context, which a placement has the memory for."""
        self._most = rows
        self._held = 0
        self._inside: set[_Entry] = set()
        self._waiting: deque[_Entry] = deque()
        self._background: deque[_Entry] = deque()

    def enter(
        self, prompt: int, max_tokens: int, *, background: bool = False
    ) -> Generator[Wait, None, _Entry]:
        """Waits until there is room; what it returns must `leave`. One alone always has room.

        `background`: behind those that are not.
        """
        entry = _Entry(min(self._most, prompt + min(max_tokens, GROWTH)), background)
        (self._background if background else self._waiting).append(entry)
        self._admit()
        try:
            while entry not in self._inside:
                yield Wait(entry.came)
        except GeneratorExit:
            self.leave(entry)
            raise
        return entry

    def leave(self, entry: _Entry) -> None:
        if entry in self._inside:
            self._inside.remove(entry)
            self._held -= entry.rows
        for queue in (self._waiting, self._background):
            if entry in queue:
                queue.remove(entry)
        self._admit()

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._background)

    def _admit(self) -> None:
        while queue := self._waiting or self._background:
            rows = queue[0].rows
            if self._inside and self._held + rows > self._most:
                return
            entry = queue.popleft()
            self._inside.add(entry)
            self._held += rows
            entry.came.set_result(None)
