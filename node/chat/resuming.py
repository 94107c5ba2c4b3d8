"""What the chat service keeps of an answer so that another attempt can go on with it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..machine.timing import ChatTiming

MAX_BARREN = 3
"""Losses in a row, without a new token between them, that an answer outlives."""


@dataclass(slots=True)
class AnswerLog:
    """The rounds that reached this node, with the forwards that made them.

    Text and ids of these rounds were handed out, so whatever attempt comes next begins behind them.
    """

    request: str
    timing: ChatTiming
    clock: Callable[[], float] = time.monotonic
    attempt: int = 1
    prompt_ids: tuple[int, ...] = ()
    rounds: list[pb.Round] = field(default_factory=list[pb.Round])
    exact: bool = True
    """Whether every attempt ran where the same forwards give the same numbers."""
    _kernels: tuple[str, ...] | None = None
    _runners: tuple[tuple[NodeId, int], ...] = ()
    _as_it_was: bool = False
    """Whether the present attempt has the runners of the one before it."""
    _alone: bool = False
    """Whether the next attempt shares nothing with others."""
    _announced: bool = False
    _begun: float = 0.0
    _first: float | None = None
    _last: float = 0.0
    _lost_at: float | None = None
    _barren: int = 0
    """Attempts that were lost since the last new token."""
    _flowing_since: float | None = None
    """When the present attempt gave its first token."""

    def __post_init__(self) -> None:
        self._begun = self._last = self.clock()

    @property
    def resumes(self) -> int:
        return self.attempt - 1

    def runs_on(self, placed: pb.Placed) -> None:
        """An attempt begins there."""
        kernels = tuple(placed.kernels)
        self.exact = self.exact and self._kernels in (None, kernels)
        self._kernels = kernels
        runners = tuple((NodeId(stage.node), stage.ready.pid) for stage in placed.stages)
        self._as_it_was, self._runners = runners == self._runners, runners
        self._flowing_since = None

    @property
    def steady(self) -> bool:
        """Whether the present attempt has gone well for a while: what failed before is over."""
        since = self._flowing_since
        return since is not None and self._last - since >= self.timing.steady_s

    def announce(self) -> bool:
        """Whether the client is yet to be told that its prompt was read; only once."""
        first, self._announced = not self._announced, True
        return first

    def saw(self, event: pb.GenerateEvent) -> None:
        match event.WhichOneof("event"):
            case "started":
                self.prompt_ids = tuple(event.started.prompt_ids)
            case "delta":
                self.rounds.append(event.delta.round)
                self._last = self.clock()
                self._first = self._first or self._last
                self._flowing_since = self._flowing_since or self._last
                self._lost_at, self._barren, self._alone = None, 0, False
            case "prefill" | "rebuilt":
                self._lost_at = None
            case _:
                pass

    def begin_alone(self) -> None:
        """The next attempt shares nothing with others: that is what failed."""
        self._alone = True

    def lost(self) -> bool:
        """The attempt was lost; whether another one may be made."""
        now = self.clock()
        self._lost_at = self._lost_at or now
        self._barren += 1
        too_late = now - self._lost_at > self.timing.resume_within_s
        if self._barren > MAX_BARREN or too_late:
            return False
        self.attempt += 1
        return True

    def continues(self, request: pb.GenerateRequest) -> pb.GenerateRequest:
        """The request of the present attempt: the same ids, then the recorded forwards."""
        again = pb.GenerateRequest()
        again.CopyFrom(request)
        again.attempt = self.attempt
        if self.prompt_ids:  # rendered once: a template may hold the date
            again.token_ids.CopyFrom(pb.TokenIds(ids=self.prompt_ids))
        again.replay.extend(self.rounds)
        # Or the last ones brought nothing new, and no runner was lost.
        again.alone = self._alone or (self._barren > 1 and self._as_it_was)
        return again

    def timings(self) -> dict[str, float]:
        """Of the whole answer as it was handed out, where no single attempt can tell."""
        tokens = sum(len(round_.tokens) for round_ in self.rounds)
        first = self._begun if self._first is None else self._first
        decoding = self._last - first
        behind = tokens - (len(self.rounds[0].tokens) if self.rounds else 0)
        return {
            "time_to_first_token_s": first - self._begun,
            "generation_tps": behind / decoding if decoding > 0 else 0.0,
        }
