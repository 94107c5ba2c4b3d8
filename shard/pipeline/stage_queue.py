"""What waits for a stage's compute thread: rounds of answers before chunks of prompts.

Between two chunks rounds are computed in their order, until one is of an answer that had one since
the last chunk. So an answer waits for one chunk at most, which is under way or next, and a prompt
for one row of each answer. Rounds keep their order, and so do chunks; the generator sends no round
of a request before all stages have computed its prompt.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

Key = tuple[str, int]
"""A request and its attempt."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    members: frozenset[Key]
    run: Callable[[], None]
    dropped: Callable[[], object] = lambda: None


class StageQueue:
    """Filled on the event loop, emptied on the compute thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: deque[_Job] = deque()
        """Rounds, and what computes nothing: a release must not overtake its request's round."""
        self._chunks: deque[_Job] = deque()
        self._served: set[Key] = set()
        """The requests that had a round since the last chunk."""

    def __len__(self) -> int:
        return len(self._first) + len(self._chunks)

    def add_round(self, members: Collection[Key], run: Callable[[], None]) -> None:
        """A round of requests that share it; of none: work that computes nothing."""
        with self._lock:
            self._first.append(_Job(frozenset(members), run))

    def add_chunk(
        self, member: Key, run: Callable[[], None], dropped: Callable[[], object]
    ) -> None:
        """Rows of a prompt. `dropped` is called in the place of `run` where `drop` takes it out."""
        with self._lock:
            self._chunks.append(_Job(frozenset([member]), run, dropped))

    def next(self) -> Callable[[], None] | None:
        """What is to run now; None where nothing is left."""
        with self._lock:
            served_again = self._first and not self._first[0].members.isdisjoint(self._served)
            if self._first and not (served_again and self._chunks):
                job = self._first.popleft()
                self._served |= job.members
            elif self._chunks:
                job = self._chunks.popleft()
                self._served.clear()
            else:
                return None
            return job.run

    def drop(self, request: str, attempt: int) -> int:
        """The request is over, up to this attempt: its chunks are not computed. How many."""

        def is_over(job: _Job) -> bool:
            return all(name == request and number <= attempt for name, number in job.members)

        with self._lock:
            ended = [job for job in self._chunks if is_over(job)]
            for job in ended:
                self._chunks.remove(job)
        for job in ended:
            job.dropped()
        return len(ended)
