"""Counts the rounds of an answer and makes `GenerationStats` of them."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from .types import TRACE_LENGTH, DrafterKind, GenerationStats, Round


class StatsCollector:
    """Counts the rounds of one answer, which are added in order."""

    def __init__(self, clock: Callable[[], float], elapsed_s: float = 0.0) -> None:
        """`clock` gives seconds. `elapsed_s`: how long the answer has been in progress already."""
        self._clock = clock
        self._started_at = clock() - elapsed_s
        self._first_at: float | None = None
        self._last_at = self._started_at
        self._tokens = 0
        self._tokens_before = 0
        """Tokens up to the first round of this attempt, which begins the seconds of decoding."""
        self._rounds = 0
        self._drafted = 0
        self._accepted = 0
        self._copies = [0, 0, 0]
        """Rounds, drafts and accepted drafts that were copied."""
        self._per_position: list[int] = []
        self._k_histogram: list[int] = []
        self._trace: deque[tuple[int, int]] = deque(maxlen=TRACE_LENGTH)
        self._batched = 0
        self._forwards = 0
        self._requests = 0

    def add(self, round_: Round, *, replayed: bool = False) -> None:
        """Counts a round whose tokens are delivered next.

        `replayed`: an earlier attempt of the answer delivered them; they are counted, not timed.
        """
        self._tokens += len(round_.tokens)
        self._forwards += 1
        self._requests += round_.forward.batch
        if round_.forward.batch > 1:
            self._batched += len(round_.tokens)
        begins = self._forwards == 1
        if not replayed:
            self._last_at = self._clock()
            if self._first_at is None:
                self._first_at, self._tokens_before = self._last_at, self._tokens
        if begins and round_.drafted == 0:
            return  # the prefill's token
        _bump(self._k_histogram, round_.drafted)
        self._extend_trace(round_.drafted)
        if round_.drafted == 0:
            return
        self._rounds += 1
        self._drafted += round_.drafted
        self._accepted += round_.accepted
        if round_.is_copied:
            counts = (1, round_.drafted, round_.accepted)
            self._copies = [a + b for a, b in zip(self._copies, counts, strict=True)]
        for position in range(round_.accepted):
            _bump(self._per_position, position)

    @property
    def completion_tokens(self) -> int:
        return self._tokens

    @property
    def shares_without_copies(self) -> bool:
        """Whether it shared steps with other requests, and none of its rounds copied."""
        return self._batched > 0 and not self._copies[0]

    def finish(self, base: GenerationStats) -> GenerationStats:
        """`base` with the fields that the rounds and the clock determine. Its `drafter_kind` is
        that of what may draft."""
        first_at = self._last_at if self._first_at is None else self._first_at
        to_first, decoding = first_at - self._started_at, self._last_at - first_at
        k, read = base.num_draft_tokens, base.prompt_tokens - base.cached_tokens
        decoded = self._tokens - self._tokens_before
        copies, copied, stood = self._copies
        return replace(
            base,
            drafter_kind=self._kind(k, base.drafter_kind),
            completion_tokens=self._tokens,
            spec_decode_rounds=self._rounds,
            proposed_draft_tokens=self._drafted,
            accepted_draft_tokens=self._accepted,
            accepted_per_position=tuple(_padded(self._per_position, k)),
            acceptance_rate=_share(self._accepted, self._drafted),
            accepted_share_of_output=_share(self._accepted, self._tokens) if k or copies else None,
            draft_k_trace=tuple(self._trace),
            draft_k_histogram=tuple(_padded(self._k_histogram, k + 1)),
            prompt_tps=read / to_first if to_first > 0 else 0.0,
            generation_tps=decoded / decoding if decoding > 0 else 0.0,
            time_to_first_token_s=to_first,
            peak_memory_bytes=mx.get_peak_memory(),
            batched_tokens=self._batched,
            batch_size=self._requests / self._forwards if self._forwards else 1.0,
            lookup_rounds=copies,
            lookup_proposed_tokens=copied,
            lookup_accepted_tokens=stood,
        )

    def _kind(self, k: int, own: DrafterKind) -> DrafterKind:
        """The drafter of most accepted drafts; without copies, `own` if it might draft."""
        copies, _, stood = self._copies
        if copies and (not k or stood > self._accepted - stood):
            return "prompt_lookup"
        return own if k else "none"

    def _extend_trace(self, k: int) -> None:
        before = self._trace.pop() if self._trace and self._trace[-1][0] == k else (k, 0)
        self._trace.append((k, before[1] + 1))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _bump(counts: list[int], index: int) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += 1


def _padded(counts: list[int], width: int) -> list[int]:
    return counts + [0] * (width - len(counts))
