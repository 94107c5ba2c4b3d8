"""The log of an answer, from which another attempt continues it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..machine.timing import Timing

MAX_BARREN = 3
"""Losses within `stall_s` that an answer survives, without a new token between them: more of them
are its own doing, or nothing here works."""
MAX_BARREN_EVER = 9
"""The same in any time: other faults than its own may take one runner after another."""


@dataclass(slots=True)
class AnswerLog:
    """The rounds that reached this node, with the forwards that produced them.

    The client has the text and ids of these rounds, so the next attempt starts after them.
    """

    request: str
    timing: Timing
    clock: Callable[[], float] = time.monotonic
    attempt: int = 1
    prompt_ids: tuple[int, ...] = ()
    rounds: list[pb.Round] = field(default_factory=list[pb.Round])
    embedded: dict[int, int] = field(default_factory=dict[int, int])
    """The tokens of each input whose embedding reached this node, by its index."""
    exact: bool = True
    """Whether all attempts ran with the same kernels and chunks, hence with the same bits, and what
    may decide near ties in them was the same."""
    _kernels: tuple[str, ...] | None = None
    _near_ties: tuple[int, bool] | None = None
    """The K of drafts that may decide near ties, and whether it is adaptive; None before the first
    attempt began."""
    _runners: tuple[tuple[NodeId, int], ...] = ()
    _as_it_was: bool = False
    """Whether the current attempt has the runners of the previous one."""
    _alone: bool = False
    """Whether the next attempt shares no forward with other requests."""
    _announced: bool = False
    load_s: float | None = None
    """Seconds of the model's load, for which this answer waited; None where it was loaded."""
    _started_at: float = 0.0
    """When the answer was made, or its wait for a load ended."""
    _first: float | None = None
    _last: float = 0.0
    _scored_tokens: int = 0
    """Tokens of the prompt with a log-probability in the current attempt."""
    _delivered_scores: int = 0
    """The same of all attempts, which is what the client has."""
    _barren: list[float] = field(default_factory=list[float])
    """When attempts were lost since the last new token."""
    _flowing_since: float | None = None
    """When the current attempt produced its first token."""

    def __post_init__(self) -> None:
        self._started_at = self._last = self.clock()

    @property
    def resumes(self) -> int:
        return self.attempt - 1

    def waits_for_load(self) -> None:
        """Records that the load, which the answer waits for at first, is not over yet."""
        if not self.resumes:
            now = self.clock()
            self.load_s = (self.load_s or 0.0) + now - self._started_at
            self._started_at = self._last = now

    def runs_on(self, placed: pb.Placed) -> None:
        """Records where an attempt starts."""
        kernels = tuple(placed.kernels)
        self.exact = self.exact and self._kernels in (None, kernels)
        self._kernels = kernels
        runners = tuple((NodeId(stage.node), stage.ready.pid) for stage in placed.stages)
        self._as_it_was, self._runners = runners == self._runners, runners
        self._flowing_since = None
        self._scored_tokens = 0

    @property
    def steady(self) -> bool:
        """Whether the current attempt has run well for `steady_s`; earlier failures are void."""
        since = self._flowing_since
        return since is not None and self._last - since >= self.timing.steady_s

    def new_prompt_logprobs(self, entries: Sequence[pb.TokenLogprob]) -> Sequence[pb.TokenLogprob]:
        """The entries of the current attempt that no earlier attempt delivered."""
        begin = self._scored_tokens
        self._scored_tokens += len(entries)
        new = entries[max(0, self._delivered_scores - begin) :]
        self._delivered_scores = max(self._delivered_scores, self._scored_tokens)
        return new

    def announce(self) -> bool:
        """Whether to report to the client that its prompt was read; true only once."""
        first, self._announced = not self._announced, True
        return first

    def saw(self, event: pb.GenerateEvent) -> None:
        match event.WhichOneof("event"):
            case "started":
                self.prompt_ids = tuple(event.started.prompt_ids)
                near_ties = event.started.near_tie_drafts, event.started.adaptive_draft
                # Adaptive K begins anew after a loss.
                if self._near_ties not in (None, near_ties) or (self.resumes and near_ties[1]):
                    self.exact = False
                self._near_ties = near_ties
                self.exact = self.exact and not event.started.reads_any
            case "delta":
                self.rounds.append(event.delta.round)
                self._last = self.clock()
                self._first = self._first or self._last
                self._flowing_since = self._flowing_since or self._last
                self._barren, self._alone = [], False
            case "embedded":
                self.embedded[event.embedded.index] = event.embedded.tokens
                self._barren = []
            case _:
                pass

    def begin_alone(self) -> None:
        """Makes the next attempt share no forward, after a shared forward failed."""
        self._alone = True

    def lost(self) -> bool:
        """Records the loss of the attempt and returns whether another one may start."""
        now = self.clock()
        self._barren.append(now)
        recent = sum(now - at <= self.timing.stall_s for at in self._barren)
        if recent > MAX_BARREN or len(self._barren) > MAX_BARREN_EVER:
            return False
        self.attempt += 1
        return True

    def continues(self, request: pb.GenerateRequest) -> pb.GenerateRequest:
        """The request of the current attempt: the same ids, then the recorded forwards."""
        again = pb.GenerateRequest()
        again.CopyFrom(request)
        again.attempt = self.attempt
        if self.prompt_ids:  # rendered once: a template may hold the date
            again.token_ids.CopyFrom(pb.TokenIds(ids=self.prompt_ids))
        again.replay.extend(self.rounds)
        if self.embedded:
            del again.embeddings.inputs[:]
            again.embeddings.inputs.extend(
                each for each in request.embeddings.inputs if each.index not in self.embedded
            )
        # Or the last ones brought nothing new, and no runner was lost.
        if self._alone or (len(self._barren) > 1 and self._as_it_was):
            again.sharing.alone = True
        return again

    def timings(self) -> dict[str, float]:
        """Timings of the whole answer as the client received it, over all attempts."""
        tokens = sum(len(round_.tokens) for round_ in self.rounds)
        first = self._started_at if self._first is None else self._first
        decoding = self._last - first
        later = tokens - (len(self.rounds[0].tokens) if self.rounds else 0)
        return {
            "time_to_first_token_s": first - self._started_at,
            "generation_tps": later / decoding if decoding > 0 else 0.0,
        }
