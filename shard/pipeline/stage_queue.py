"""The queue of a stage's compute thread: rounds of decoding before chunks of prompts.

Between two chunks rounds run in order, until the next one has a request that already had a round
since the last chunk. So a decoding request waits for at most one chunk, which is running or next,
and a prompt for one row of each decoding request. Rounds keep their order, and so do chunks; the
first stage sends no round of a request before all stages have computed its prompt.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .link import Key


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    members: frozenset[Key]
    run: Callable[[], None]
    dropped: Callable[[], object] = lambda: None


class StageQueue:
    """A queue of jobs; the event loop adds them, the compute thread takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: deque[_Job] = deque()
        """Rounds, and jobs without forwards: a release must not overtake its request's round."""
        self._chunks: deque[_Job] = deque()
        self._served_requests: set[Key] = set()
        """Requests that had a round since the last chunk."""

    def __len__(self) -> int:
        return len(self._first) + len(self._chunks)

    def add_round(self, members: Collection[Key], run: Callable[[], None]) -> None:
        """Adds a round of `members`, or a job without a forward if there are none."""
        with self._lock:
            self._first.append(_Job(frozenset(members), run))

    def add_chunk(
        self, member: Key, run: Callable[[], None], dropped: Callable[[], object]
    ) -> None:
        """Adds a chunk of a prompt. `dropped` is called in place of `run` if `drop` removes it."""
        with self._lock:
            self._chunks.append(_Job(frozenset([member]), run, dropped))

    def next(self) -> Callable[[], None] | None:
        """Removes and returns the next job, or None if there is none."""
        with self._lock:
            served_again = self._first and not self._first[0].members.isdisjoint(
                self._served_requests
            )
            if self._first and not (served_again and self._chunks):
                job = self._first.popleft()
                self._served_requests |= job.members
            elif self._chunks:
                job = self._chunks.popleft()
                self._served_requests.clear()
            else:
                return None
            return job.run

    def drop(self, request: str, attempt: int) -> int:
        """Drops the chunks of a request up to `attempt`. Returns how many there were."""

        def has_ended(job: _Job) -> bool:
            return all(name == request and number <= attempt for name, number in job.members)

        with self._lock:
            ended = [job for job in self._chunks if has_ended(job)]
            for job in ended:
                self._chunks.remove(job)
        for job in ended:
            job.dropped()
        return len(ended)
