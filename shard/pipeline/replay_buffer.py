"""What a stage sent on for one request: what the stage behind it is rebuilt from when it is lost.

Hidden rows take hidden_size items each, 10 KiB a token for a model of 27 billion parameters.
"""

import threading
from collections import deque
from dataclasses import replace
from itertools import accumulate, islice

from ...placement.errors import StateLost
from ...proto import peer_pb2 as pb
from .frames import HiddenBlock

TRAIL_BYTES = 64 << 20
"""Of one request on one stage. Of a longer trail the oldest blocks are dropped."""


class ReplayBuffer:
    """Blocks without a gap, in order. Written on the compute thread, read on the event loop."""

    def __init__(self, limit: int = TRAIL_BYTES) -> None:
        self._limit = limit
        self._blocks: deque[HiddenBlock] = deque()
        self._bytes = 0
        self._lock = threading.Lock()
        self._since = self._until = 0
        """The rows that a stage behind this one lacks; none where they are equal."""
        self._answer = False
        self._sent = 0
        self.begins = 0
        """The first row that is here; those before it were too much to keep."""

    def add(self, block: HiddenBlock) -> None:
        with self._lock:
            self._blocks.append(block)
            self._bytes += len(block.data)
            while self._bytes > self._limit:
                oldest = self._blocks.popleft()
                self._bytes -= len(oldest.data)
                self.begins = oldest.position + oldest.rows
                self._sent = max(0, self._sent - 1)

    def begin_at(self, row: int) -> None:
        """Nothing of the rows before `row` can be sent again."""
        with self._lock:
            self._blocks.clear()
            self._bytes, self._sent, self.begins = 0, 0, row

    def roll_back(self, position: int) -> None:
        """The rows from `position` on do not count."""
        with self._lock:
            while self._blocks and self._blocks[-1].position >= position:
                self._bytes -= len(self._blocks.pop().data)
            if self._blocks and self._blocks[-1].position + self._blocks[-1].rows > position:
                # A part of a block cannot be repeated: its number of rows chose the kernels.
                self._blocks.clear()
                self._bytes, self.begins = 0, position
            self._sent = min(self._sent, len(self._blocks))
            self.begins = min(self.begins, position)

    def after(self, position: int) -> list[HiddenBlock]:
        """The blocks from row `position` on, where one begins."""
        with self._lock:
            return [block for block in self._blocks if block.position >= position]

    def want(self, since: int, until: int, *, answer: bool) -> None:
        """The stage behind lacks the rows [since, until); `answer`: and what follows the last.

        Raises StateLost where they are not here any more.
        """
        with self._lock:
            if since < self.begins:
                raise StateLost(
                    f"rows from {since} on are lacking, and the trail begins at row {self.begins}: "
                    "more was sent than is kept"
                )
            self._since, self._until, self._answer, self._sent = since, until, answer, 0

    def unsent(self, attempt: int) -> list[HiddenBlock]:
        """What is wanted and was not taken yet. Raises StateLost where no forward ends there."""
        with self._lock:
            new = [b for b in islice(self._blocks, self._sent, None) if b.position < self._until]
            self._sent += len(new)
            lacked = [_behind(b, self._since) for b in new if b.position + b.rows > self._since]
            return [
                replace(
                    block,
                    attempt=attempt,
                    reply=block.reply if last else pb.REPLY_NONE,
                    rebuilds=True,
                )
                for block in lacked
                for last in (self._answer and block.reply == pb.REPLY_LAST,)
            ]


def _behind(block: HiddenBlock, row: int) -> HiddenBlock:
    """The forwards of a block from `row` on."""
    held = row - block.position
    if held <= 0:
        return block
    schedule = block.schedule or (block.rows,)
    ends = list(accumulate(schedule))
    if held not in ends:
        raise StateLost(f"no forward ended at row {row}: what a stage holds up to there fits none")
    size = len(block.data) // block.rows
    return replace(
        block,
        position=row,
        rows=block.rows - held,
        tokens=block.tokens[held:],
        schedule=schedule[ends.index(held) + 1 :],
        data=block.data[held * size :],
    )
