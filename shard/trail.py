"""What a stage sent on for one request: what the stage behind it is rebuilt from when it is lost.

Hidden rows take hidden_size items each, 10 KiB a token for a model of 27 billion parameters.
"""

import threading
from dataclasses import replace

from ..proto import peer_pb2 as pb
from .frames import HiddenBlock

TRAIL_BYTES = 64 << 20
"""Of one request on one stage. A longer trail is dropped: then every stage is rebuilt."""


class Trail:
    """Blocks from row 0 on, in order. Written on the compute thread, read on the event loop."""

    def __init__(self, limit: int = TRAIL_BYTES) -> None:
        self._limit = limit
        self._blocks: list[HiddenBlock] = []
        self._bytes = 0
        self._lock = threading.Lock()
        self._until = 0
        """Rows that a stage behind this one lacks; 0: it lacks none."""
        self._sent = 0
        self.whole = True
        """False once it had become too long."""

    def add(self, block: HiddenBlock) -> None:
        with self._lock:
            if not self.whole:
                return
            self._blocks.append(block)
            self._bytes += len(block.data)
            if self._bytes > self._limit:
                self._blocks, self.whole = [], False

    def roll_back(self, position: int) -> None:
        """The rows from `position` on do not count."""
        with self._lock:
            while self._blocks and self._blocks[-1].position >= position:
                self._bytes -= len(self._blocks.pop().data)
            if self._blocks and self._blocks[-1].position + self._blocks[-1].rows > position:
                # A part of a block cannot be repeated: its number of rows chose the kernels.
                self._blocks, self.whole = [], False

    def want(self, until: int) -> None:
        """The stage behind lacks the rows before `until`."""
        with self._lock:
            self._until, self._sent = until, 0

    def unsent(self, attempt: int) -> list[HiddenBlock]:
        """What is wanted and was not taken yet."""
        with self._lock:
            new = [b for b in self._blocks[self._sent :] if b.position < self._until]
            self._sent += len(new)
            return [
                replace(block, attempt=attempt, reply=pb.REPLY_NONE, rebuilds=True) for block in new
            ]
