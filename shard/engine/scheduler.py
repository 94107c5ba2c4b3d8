"""Decides which requests run next. It runs nothing, reads no clock and holds no arrays.

Over stages as many groups of answers as there are stages keep all of them busy, each with one round
under way, and a forward for a group costs a stage less than one for each of its requests. As many
chunks of prompts are under way as keep all stages busy: more would only wait at a stage, where
those of prompts that come later would be behind them.

A piece of work that reads prompts is a part of one forward over them. Behind it every request that
answers has a round, and all of them together as much time as it took: while prompts are read,
running answers keep half of their speed at least, whatever a forward costs and however many prompts
wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...mtp.batch_slots import padding_of
from ..pipeline.frames import MAX_TOGETHER
from .outcome import Flight
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


class Scheduler:
    """The only queue of an engine. All methods run on the compute thread."""

    def __init__(
        self,
        context_rows: int,
        chunk: int,
        *,
        depth: int = 1,
        reads_together: bool = False,
        stages: int = 1,
    ) -> None:
        """`context_rows`: of all requests together; one request always fits.

        `chunk`: rows of one forward over prompts, padding among them. `depth`: rounds in flight of
        several requests, where one stage has the whole model.
        """
        self._context_rows = context_rows
        self._chunk = chunk
        self._depth = depth
        self._stages = stages
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
        self, requests: Sequence[Request], in_flight: Sequence[Flight], *, reading: bool
    ) -> Step | None:
        """The next piece of work; None: nothing before a piece in flight is read.

        `reading`: whether a forward over prompts is under way here.
        """
        decoders, readers = self._by_phase(requests, in_flight)
        on_device = any(not flight.is_away for flight in in_flight)
        if not on_device and not _here(decoders, in_flight):
            self._owed_s = 0.0  # nobody waits for this thread
        step = self.follow(requests, in_flight, reading=reading)
        # Tokens on this device are handed out first: reading keeps the thread for long.
        if step is None and (reading or readers) and not on_device:
            return self._read(readers, reading=reading)
        return step

    def follow(
        self, requests: Sequence[Request], in_flight: Sequence[Flight], *, reading: bool
    ) -> Decode | None:
        """The round that comes next; None where none may, or where a prompt's turn is."""
        decoders, readers = self._by_phase(requests, in_flight)
        here = _here(decoders, in_flight)
        due = self._owed_s > 0 or any(r.turn < self._chunk_turn for r in here)
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

    def _round(self, decoders: Sequence[Request], in_flight: Sequence[Flight]) -> Decode | None:
        """A round of the group that waited longest, of those that may have one now."""
        groups = self._grouped(decoders)
        for group in sorted(groups, key=lambda group: min(request.turn for request in group)):
            members = tuple(group)
            same = set(members)
            related = [f for f in in_flight if not same.isdisjoint(f.requests)]
            ready = all(set(f.requests) == same and f.may_be_followed for f in related)
            depth = self._depth if len(members) > 1 else ALONE_DEPTH
            if ready and (self._stages > 1 or len(in_flight) < depth):
                self._turn += 1
                for request in members:
                    request.turn = self._turn
                return Decode(members)
        return None

    def _grouped(self, decoders: Sequence[Request]) -> list[list[Request]]:
        """Those that share forwards. Who has none joins the largest group with little padding, or
        over stages the smallest; where there are more groups than stages, those that fit become
        one."""
        # A round that is computed once more belongs to the state that it began with.
        alone = [[request] for request in decoders if request.alone or request.checks]
        sharing = [request for request in decoders if not (request.alone or request.checks)]
        most = len(sharing)
        if self._stages > 1:
            most = min(MAX_TOGETHER, -(-most // self._stages))
        merged = list[list[Request]]()
        for group in self._named(sharing, most):
            homes = sorted(merged, key=len) if self._stages > 1 else merged
            homes = homes if len(merged) >= self._stages else []
            fits = (each for each in homes if len(each) + len(group) <= most and _fit(each, group))
            if (home := next(fits, None)) is None:
                merged.append(group)
            else:
                home.extend(group)
        for group in merged:
            name = min(request.group for request in group if request.group is not None)
            for request in group:
                request.group = name
        return [*alone, *merged]

    def _named(self, sharing: Sequence[Request], most: int) -> list[list[Request]]:
        """The groups that there are, the largest first, of `most` requests each. Who has none, or
        is one too many, is a group of its own."""
        groups: dict[int, list[Request]] = {}
        others = list[Request]()
        for request in sharing:
            if request.group is None or len(groups.get(request.group, ())) >= most:
                others.append(request)
            else:
                groups.setdefault(request.group, []).append(request)
        for request in others:
            self._groups += 1
            request.group = self._groups
            groups[self._groups] = [request]
        return [group for _, group in sorted(groups.items(), key=lambda it: (-len(it[1]), it[0]))]

    def _by_phase(
        self, requests: Sequence[Request], in_flight: Sequence[Flight]
    ) -> tuple[list[Request], list[Request]]:
        """Those that may have a round, and those whose prompt or log is to be read."""
        decoders = [r for r in requests if r.phase == "decode" and not r.paused and r.room > 0]
        if self._stages > 1 and sum(f.is_chunk for f in in_flight) > self._stages:
            return decoders, []  # one more than are computed, so that none waits for a message
        waits = {r for f in in_flight if not f.may_be_followed for r in f.requests}
        readers = [r for r in requests if r.phase in ("prefill", "replay") and r not in waits]
        return decoders, readers

    def _rows_of(self, request: Request) -> int:
        rows = len(request.prompt) + min(request.max_tokens, GROWTH)
        return min(self._context_rows, rows)


def _here(decoders: Sequence[Request], in_flight: Sequence[Flight]) -> list[Request]:
    """Those of whom nothing is on its way round other nodes."""
    away = {r for flight in in_flight if flight.is_away for r in flight.requests}
    return [request for request in decoders if request not in away]


def _fit(some: Sequence[Request], others: Sequence[Request]) -> bool:
    return padding_of([request.position for request in (*some, *others)]) <= MOST_PADDING
