"""Decides which requests run next. It runs nothing, reads no clock and holds no arrays.

A piece of work that reads prompts is a part of one forward over them. Behind it every request that
answers has a round, and all of them together as much time as it took: while prompts are read,
running answers keep half of their speed at least, whatever a forward costs and however many prompts
wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ...mtp.batch_slots import padding_of
from .request import Request

GROWTH: Final = 512
"""Rows of an answer that count from the start; few grow longer, and none is stopped."""
ALONE_DEPTH: Final = 2
"""Rounds of one request in flight at most: a graph is built while another one is computed."""
MOST_PADDING: Final = 2.0
"""A batch has the room of its longest request for each: at most so many times what they need."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The next rows of each request's prompt, in one forward."""

    requests: tuple[Request, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GoOn:
    """The next part of the forward over prompts that is under way."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The next rounds of one request's log."""

    request: Request


@dataclass(frozen=True, slots=True)
class Decode:
    """One round of requests that share forwards."""

    requests: tuple[Request, ...]


Step = Prefill | GoOn | Replay | Decode


class InFlight(Protocol):
    """What the scheduler needs to know of a round in flight."""

    @property
    def requests(self) -> tuple[Request, ...]: ...

    @property
    def may_be_followed(self) -> bool:
        """Whether another round of these requests may be issued before it is read."""
        ...


class Scheduler:
    """The only queue of an engine. All methods run on the compute thread."""

    def __init__(
        self, context_rows: int, chunk: int, *, depth: int = 1, reads_together: bool = False
    ) -> None:
        """`context_rows`: of all requests together; one request always fits.

        `chunk`: rows of one forward over prompts, padding among them. `depth`: rounds in flight of
        several requests.
        """
        self._context_rows = context_rows
        self._chunk = chunk
        self.depth = depth
        self.reads_together = reads_together
        """Whether several prompts may share a forward: only where a batch changes no bit."""
        self._turn = 0
        """Grows with each piece of work; see `Request.turn`."""
        self._chunk_turn = 0
        """The turn of the last piece of reading: whoever decodes is due if its own is older."""
        self._owed_s = 0.0
        """Seconds of reading that those that decode have not had since."""
        self._groups = 0

    def admit(self, requests: Sequence[Request]) -> list[Request]:
        """The waiting requests that may begin now, in order of arrival, background last."""
        held = sum(
            self._rows_of(request)
            for request in requests
            if request.phase not in ("waiting", "finished")
        )
        waiting = [request for request in requests if request.phase == "waiting"]
        admitted = list[Request]()
        for request in sorted(waiting, key=lambda request: request.background):
            rows = self._rows_of(request)
            if held and held + rows > self._context_rows:
                break
            held += rows
            admitted.append(request)
        return admitted

    def plan(
        self, requests: Sequence[Request], in_flight: Sequence[InFlight], *, reading: bool
    ) -> Step | None:
        """The next piece of work; None: nothing before the oldest round in flight is read.

        `reading`: whether a forward over prompts is under way.
        """
        decoders, readers = _by_phase(requests)
        if not decoders and not in_flight:
            self._owed_s = 0.0
        step = self.follow(requests, in_flight, reading=reading)
        # Tokens in flight are handed out first: reading keeps the thread for long.
        if step is None and (reading or readers) and not in_flight:
            return self._read(readers, reading=reading)
        return step

    def follow(
        self, requests: Sequence[Request], in_flight: Sequence[InFlight], *, reading: bool
    ) -> Decode | None:
        """The round that comes next; None where none may, or where a prompt's turn is."""
        decoders, readers = _by_phase(requests)
        due = self._owed_s > 0 or any(r.turn < self._chunk_turn for r in decoders)
        if (reading or readers) and not due:
            return None
        return self._round(decoders, in_flight)

    def took(self, seconds: float, *, reading: bool) -> None:
        """How long work kept the compute thread: on prompts if `reading`, else on answers."""
        if reading:
            self._owed_s += seconds
        else:
            self._owed_s = max(0.0, self._owed_s - seconds)

    def _read(self, readers: Sequence[Request], *, reading: bool) -> Step:
        self._turn += 1
        self._chunk_turn = self._turn
        if reading:
            return GoOn()
        first, *rest = sorted(readers, key=lambda r: (r.background, r.turn))
        group = [first]
        if first.phase == "prefill" and self.reads_together and not first.alone:
            self._gather(group, rest)
        for request in group:
            request.turn = self._turn
        if first.phase == "replay":
            return Replay(first)
        return Prefill(tuple(group), tuple(request.next_end for request in group))

    def _gather(self, group: list[Request], others: Sequence[Request]) -> None:
        """Adds those whose rows fit into the same forward. Of all of them or of none, these are the
        prompt's first rows."""
        first, widest = group[0], group[0].next_end - group[0].rows
        for other in others:
            if other.phase != "prefill" or other.alone or bool(other.rows) != bool(first.rows):
                continue
            wide = max(widest, other.next_end - other.rows)
            if wide * (len(group) + 1) <= self._chunk:
                group.append(other)
                widest = wide

    def _round(self, decoders: Sequence[Request], in_flight: Sequence[InFlight]) -> Decode | None:
        """A round of the group that waited longest, of those that may have one now."""
        groups = self._grouped(decoders)
        for group in sorted(groups, key=lambda group: min(request.turn for request in group)):
            members = tuple(group)
            same = set(members)
            related = [f for f in in_flight if not same.isdisjoint(f.requests)]
            ready = all(set(f.requests) == same and f.may_be_followed for f in related)
            if ready and len(in_flight) < (self.depth if len(members) > 1 else ALONE_DEPTH):
                self._turn += 1
                for request in members:
                    request.turn = self._turn
                return Decode(members)
        return None

    def _grouped(self, decoders: Sequence[Request]) -> list[list[Request]]:
        """Those that share forwards. Who has none joins the largest group with little padding;
        groups that fit become one."""
        # A round that is computed once more belongs to the state that it began with.
        alone = [[request] for request in decoders if request.alone or request.checks]
        sharing = [request for request in decoders if not (request.alone or request.checks)]
        groups: dict[int, list[Request]] = {}
        for request in sharing:
            if request.group is not None:
                groups.setdefault(request.group, []).append(request)
        for request in sharing:
            if request.group is None:
                self._groups += 1
                groups[self._groups] = [request]
        merged = list[list[Request]]()
        for _, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
            home = next((each for each in merged if _fit(each, group)), None)
            if home is None:
                merged.append(group)
            else:
                home.extend(group)
        for group in merged:
            names = {request.group for request in group if request.group is not None}
            name = min(names) if names else next(n for n, g in groups.items() if g is group)
            for request in group:
                request.group = name
        return [*alone, *merged]

    def _rows_of(self, request: Request) -> int:
        rows = len(request.prompt) + min(request.max_tokens, GROWTH)
        return min(self._context_rows, rows)


def _by_phase(requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Those that may have a round, and those whose prompt or log is to be read."""
    decoders = [r for r in requests if r.phase == "decode" and not r.paused and r.room > 0]
    return decoders, [r for r in requests if r.phase in ("prefill", "replay")]


def _fit(some: Sequence[Request], others: Sequence[Request]) -> bool:
    return padding_of([request.position for request in (*some, *others)]) <= MOST_PADDING
