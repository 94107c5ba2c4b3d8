"""What waits for a stage's compute thread: rows of answers before chunks of prompts.

The order is that of the turns on one node (`shard/engine/compute.py`): before each chunk, every
answer whose row is here has one computed. So an answer waits for one chunk at most, which is under
way or its turn, and a prompt for one row of each answer. What is of one request keeps its order.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from ...proto import peer_pb2 as pb
from .frames import HiddenBlock

Kind = Literal["row", "chunk", "word"]
"""A row of one answer or of several; rows of a prompt, or of what is rebuilt; what computes
nothing, as a rollback or a release."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    requests: frozenset[str]
    attempt: int
    kind: Kind
    run: Callable[[], None]
    dropped: Callable[[], object]


def kind_of(block: HiddenBlock) -> Kind:
    """Of a block that travels alone."""
    return "row" if block.reply == pb.REPLY_ALL else "chunk"


class StageQueue:
    """Filled on the event loop, emptied on the compute thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: deque[_Job] = deque()
        """Rows and words."""
        self._chunks: deque[_Job] = deque()
        """And what came for their requests behind them."""
        self._behind: Counter[str] = Counter()
        """How much of `_chunks` is of each request."""
        self._had: set[str] = set()
        """The requests that had a row computed since the last chunk."""

    def __len__(self) -> int:
        return len(self._first) + len(self._chunks)

    def add(
        self,
        requests: Iterable[str],
        attempt: int,
        kind: Kind,
        run: Callable[[], None],
        dropped: Callable[[], object] = lambda: None,
    ) -> None:
        """`dropped` is called in the place of `run` where `drop` takes it out."""
        job = _Job(frozenset(requests), attempt, kind, run, dropped)
        with self._lock:
            if kind == "chunk" or any(self._behind[name] for name in job.requests):
                self._chunks.append(job)
                self._behind.update(job.requests)
            else:
                self._first.append(job)

    def next(self) -> Callable[[], None] | None:
        """What is to run now; None where nothing is left."""
        with self._lock:
            job = self._answers() or self._chunk()
            if job is None:
                if not self._first:
                    return None
                job = self._first[0]
            self._taken(job)
            return job.run

    def drop(self, request: str, attempt: int) -> int:
        """The request is over, up to this attempt: its chunks are not computed. How many."""
        with self._lock:
            ended = [
                job
                for job in self._chunks
                if job.kind == "chunk" and job.requests <= {request} and job.attempt <= attempt
            ]
            for job in ended:
                self._chunks.remove(job)
                self._forget(job.requests)
        for job in ended:
            job.dropped()
        return len(ended)

    def _answers(self) -> _Job | None:
        """The first whose request had none since the last chunk; none overtakes its own."""
        passed = set[str]()
        for job in self._first:
            again = job.kind == "row" and job.requests <= self._had
            if not again and passed.isdisjoint(job.requests):
                return job
            passed |= job.requests
        return None

    def _chunk(self) -> _Job | None:
        """None, too, where something of its request came before it."""
        if not self._chunks:
            return None
        requests = self._chunks[0].requests
        before = any(not requests.isdisjoint(job.requests) for job in self._first)
        return None if before else self._chunks[0]

    def _taken(self, job: _Job) -> None:
        if self._chunks and job is self._chunks[0]:
            _ = self._chunks.popleft()
            self._forget(job.requests)
        else:
            self._first.remove(job)
        if job.kind == "chunk":
            self._had.clear()
        elif job.kind == "row":
            self._had |= job.requests

    def _forget(self, requests: Collection[str]) -> None:
        for name in requests:
            self._behind[name] -= 1
            if not self._behind[name]:
                del self._behind[name]
