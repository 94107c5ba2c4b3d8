"""Decides which requests run next. It runs nothing, reads no clock and holds no arrays.

In a pipeline there are as many groups of decoding requests as stages, each with one round in
flight, which keeps all stages busy; a forward for a group costs a stage less than one for each of
its requests. Chunks of prompts are in flight only as far as they keep all stages busy: more would
queue at a stage, in front of the chunks of later prompts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final

from ...mtp.caches.batch_slots import padding_of
from ..pipeline.frames import MAX_TOGETHER
from .request import Request

GROWTH: Final = 512
"""Rows of an answer that are reserved at admission; few grow longer, and none is stopped."""
ALONE_DEPTH: Final = 2
"""Rounds of one request in flight at most: a graph is built while another one is computed."""
MAX_PADDING: Final = 2.0
"""Each request of a batch has room for the rows of the longest: the batch has at most this multiple
of the rows that its requests need."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The next rows of each request's prompt, in one forward."""

    requests: tuple[Request, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ContinuePrefill:
    """The next part of the forward over prompts that has begun."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The next rounds of one request's log."""

    request: Request


@dataclass(frozen=True, slots=True)
class Decode:
    """One round of requests that share forwards."""

    requests: tuple[Request, ...]


Work = Prefill | ContinuePrefill | Replay | Decode


@dataclass(slots=True, eq=False)
class Flight:
    """Work for some requests, which this node's device computes unless it `is_away`."""

    requests: tuple[Request, ...]
    _: KW_ONLY
    may_be_followed: bool = False
    """Whether more work for these requests may be issued before it is read."""

    @property
    def is_away(self) -> bool:
        """Whether other stages compute it."""
        return False

    @property
    def is_back(self) -> bool:
        """Whether nothing is computed any more, so that reading it need not wait."""
        return False

    @property
    def is_chunk(self) -> bool:
        """Whether it consists of rows of a prompt or of a log."""
        return False


class Fairness:
    """Whose turn it is: prompts or answers, and which of them has waited longest.

    A piece of prefill is a part of one forward over prompts. After each piece every decoding
    request has a round, and all of them together as much time as the piece took. So during prefill
    decoding keeps at least half of its speed, however long a forward takes and however many prompts
    wait.
    """

    def __init__(self) -> None:
        self._turn = 0
        """Grows with each piece of work; see `Request.turn`."""
        self._prefill_turn = 0
        """The turn of the last piece of prefill: a decoding request is due if its own is older."""
        self._owed_s = 0.0
        """Seconds of prefill that decoding has not had since."""

    def take_turn(self, requests: Iterable[Request], *, for_prefill: bool = False) -> None:
        """Counts a piece of work for `requests`."""
        self._turn += 1
        if for_prefill:
            self._prefill_turn = self._turn
        for request in requests:
            request.turn = self._turn

    def is_due(self, idle: Sequence[Request]) -> bool:
        """Whether a round is next. `idle`: decoding requests that have none on other stages."""
        return self._owed_s > 0 or any(request.turn < self._prefill_turn for request in idle)

    def charge(self, seconds: float, *, for_prefill: bool) -> None:
        """Accounts for time of the compute thread, spent on prefill or on decoding."""
        owed_s = self._owed_s + (seconds if for_prefill else -seconds)
        self._owed_s = max(0.0, owed_s)

    def forgive(self) -> None:
        """Drops what decoding is owed, since no request waits for this thread."""
        self._owed_s = 0.0


class Scheduler:
    """Orders the work of an engine's requests. All methods run on the compute thread."""

    def __init__(
        self,
        context_rows: int,
        chunk: int,
        *,
        depth: int = 1,
        stages: int = 1,
    ) -> None:
        """`context_rows`: rows of all admitted requests; a single request is always admitted.

        `chunk`: rows of one forward over prompts, padding included. `depth`: rounds in flight while
        several requests share them, if one stage has the whole model.
        """
        self._context_rows = context_rows
        self._chunk = chunk
        self._depth = depth
        self._stages = stages
        self._fairness = Fairness()
        self._grouping = Grouping(stages)

    def admit(self, requests: Sequence[Request]) -> list[Request]:
        """The waiting requests that may begin now, in order of arrival, background last.

        A request waits while another one reads the same prompt, and then begins after its prefix.
        """
        reserved_rows = sum(
            self._rows_of(request)
            for request in requests
            if request.phase not in ("waiting", "finished")
        )
        waiting = [request for request in requests if request.phase == "waiting"]
        admitted = list[Request]()
        readers = [request for request in requests if request.phase == "prefill"]
        for request in sorted(waiting, key=lambda request: request.background):
            if any(request.follows(reader) for reader in readers):
                continue
            rows = self._rows_of(request)
            if reserved_rows and reserved_rows + rows > self._context_rows:
                break
            reserved_rows += rows
            readers.append(request)
            admitted.append(request)
        return admitted

    def plan(
        self,
        requests: Sequence[Request],
        in_flight: Sequence[Flight],
        *,
        in_prefill: bool,
        rounds_only: bool = False,
    ) -> Work | None:
        """The next piece of work, or None until a piece in flight is read.

        `in_prefill`: whether a forward over prompts has begun on this stage. `rounds_only`: the
        next round, or None if it is a prompt's turn.
        """
        decoders, prefills = self._by_phase(requests, in_flight)
        idle, reads_prompts = _idle(decoders, in_flight), in_prefill or bool(prefills)
        on_device = any(not flight.is_away for flight in in_flight)
        if not (rounds_only or on_device or idle):
            self._fairness.forgive()
        if (not reads_prompts or self._fairness.is_due(idle)) and (
            group := self._ready_group(decoders, in_flight)
        ):
            self._fairness.take_turn(group)
            return Decode(group)
        # Tokens on this device are delivered first: prefill occupies the thread for long.
        if reads_prompts and not on_device and not rounds_only:
            return self._prefill(prefills, in_prefill=in_prefill)
        return None

    def charge(self, seconds: float, *, for_prefill: bool) -> None:
        """Accounts for time of the compute thread, spent on prefill or on decoding."""
        self._fairness.charge(seconds, for_prefill=for_prefill)

    def _prefill(self, prefills: Sequence[Request], *, in_prefill: bool) -> Work:
        if in_prefill:
            self._fairness.take_turn((), for_prefill=True)
            return ContinuePrefill()
        first, *rest = sorted(prefills, key=lambda r: (r.background, r.turn))
        group = [first]
        if first.phase == "prefill" and _shares_prefill(first):
            self._gather(group, rest)
        self._fairness.take_turn(group, for_prefill=True)
        if first.phase == "replay":
            return Replay(first)
        return Prefill(tuple(group), tuple(request.next_end for request in group))

    def _gather(self, group: list[Request], others: Sequence[Request]) -> None:
        """Adds requests whose next rows fit into the same forward.

        Either all members are at the beginning of their prompts, or none is.
        """
        first, width = group[0], group[0].next_end - group[0].rows
        for other in others:
            is_alike = bool(other.rows) == bool(first.rows)
            if other.phase != "prefill" or not _shares_prefill(other) or not is_alike:
                continue
            wider = max(width, other.next_end - other.rows)
            if wider * (len(group) + 1) <= self._chunk:
                group.append(other)
                width = wider

    def _ready_group(
        self, decoders: Sequence[Request], in_flight: Sequence[Flight]
    ) -> tuple[Request, ...]:
        """The group that has waited longest among those that may have a round now, if any."""
        groups = self._grouping.of(decoders)
        on_device = sum(not flight.is_away for flight in in_flight)
        for group in sorted(groups, key=lambda group: min(request.turn for request in group)):
            members = set(group)
            related = [f for f in in_flight if not members.isdisjoint(f.requests)]
            is_ready = all(set(f.requests) == members and f.may_be_followed for f in related)
            depth = self._depth if len(group) > 1 else ALONE_DEPTH
            if is_ready and (self._stages > 1 or on_device < depth):
                return tuple(group)
        return ()

    def _by_phase(
        self, requests: Sequence[Request], in_flight: Sequence[Flight]
    ) -> tuple[list[Request], list[Request]]:
        """Requests that may have a round, and requests whose prompt or log may be read."""
        decoders = [
            r
            for r in requests
            if r.phase == "decode" and not r.is_paused and r.remaining_tokens > 0
        ]
        if self._stages > 1 and sum(f.is_chunk for f in in_flight) > self._stages:
            return decoders, []  # one more than are computed, so that none waits for a message
        blocked = {r for f in in_flight if not f.may_be_followed for r in f.requests}
        prefills = [
            r
            for r in requests
            if r.phase in ("prefill", "replay")
            and r not in blocked
            and not (r.is_read or r.waits_for_rows)
        ]
        return decoders, prefills

    def _rows_of(self, request: Request) -> int:
        rows = len(request.prompt) + min(request.max_tokens, GROWTH)
        return min(self._context_rows, rows)


def _idle(decoders: Sequence[Request], in_flight: Sequence[Flight]) -> list[Request]:
    """Requests that have nothing in flight on other stages."""
    away = {r for flight in in_flight if flight.is_away for r in flight.requests}
    return [request for request in decoders if request not in away]


def _shares_prefill(request: Request) -> bool:
    return request.batches_prompt and not request.batching_reason


class Grouping:
    """Divides requests into groups, which stay as they are where that is as good."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._groups = 0
        """Number of the last group."""

    def of(self, decoders: Sequence[Request]) -> list[list[Request]]:
        """The groups of requests that share forwards.

        A new request joins the largest group that needs little padding, or in a pipeline the
        smallest. If there are more groups than stages, groups that fit are merged.
        """
        # A round that is repeated belongs to the state that it began with.
        single = [[r] for r in decoders if r.batching_reason or r.checks_target]
        sharing = [r for r in decoders if not (r.batching_reason or r.checks_target)]
        most = len(sharing)
        if self._stages > 1:
            most = min(MAX_TOGETHER, -(-most // self._stages))
        merged = list[list[Request]]()
        for group in self._numbered(sharing, most):
            hosts = sorted(merged, key=len) if self._stages > 1 else merged
            hosts = hosts if len(merged) >= self._stages else []
            fits = (each for each in hosts if len(each) + len(group) <= most and _fit(each, group))
            if (host := next(fits, None)) is None:
                merged.append(group)
            else:
                host.extend(group)
        for group in merged:
            number = min(request.group for request in group if request.group is not None)
            for request in group:
                request.group = number
        return [*single, *merged]

    def _numbered(self, sharing: Sequence[Request], most: int) -> list[list[Request]]:
        """The present groups, the largest first, of at most `most` requests each.

        A request without a group, or beyond that size, becomes a group of its own.
        """
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


def _fit(some: Sequence[Request], others: Sequence[Request]) -> bool:
    return padding_of([request.position for request in (*some, *others)]) <= MAX_PADDING
