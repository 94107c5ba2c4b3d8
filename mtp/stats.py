"""Counts what a generation did and turns it into `GenerationStats`."""

from collections import deque
from collections.abc import Callable

import mlx.core as mx

from .types import (
    TRACE_LENGTH,
    AcceptanceRule,
    DraftPolicy,
    GenerationStats,
    Round,
)


class StatsCollector:
    """Fed with an answer's steps in order; the clock is handed in (seconds)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = clock()
        self._first: float | None = None
        self._last = self._begun
        self._tokens = 0
        self._tokens_before = 0
        """Up to and with the first round of this attempt: the seconds of decoding begin there."""
        self._rounds = 0
        self._drafted = 0
        self._accepted = 0
        self._per_position: list[int] = []
        self._k_histogram: list[int] = []
        self._trace: deque[tuple[int, int]] = deque(maxlen=TRACE_LENGTH)
        self._batched = 0
        self._forwards = 0
        self._requests = 0

    def add(self, round_: Round, *, replayed: bool = False) -> None:
        """Call when the round's tokens are about to be handed out.

        `replayed`: an earlier attempt of the answer handed them out; they are counted, not timed.
        """
        self._tokens += len(round_.tokens)
        self._forwards += 1
        self._requests += round_.forward.batch
        if round_.forward.batch > 1:
            self._batched += len(round_.tokens)
        begins = self._forwards == 1
        if not replayed:
            self._last = self._clock()
            if self._first is None:
                self._first, self._tokens_before = self._last, self._tokens
        if begins and round_.drafted == 0:
            return  # the prefill's token
        _bump(self._k_histogram, round_.drafted)
        self._extend_trace(round_.drafted)
        if round_.drafted == 0:
            return
        self._rounds += 1
        self._drafted += round_.drafted
        self._accepted += round_.accepted
        for position in range(round_.accepted):
            _bump(self._per_position, position)

    @property
    def completion_tokens(self) -> int:
        return self._tokens

    def finish(
        self,
        *,
        prompt_tokens: int,
        rule: AcceptanceRule,
        policy: DraftPolicy,
        k: int,
        reason: str,
        resumes: int = 0,
        parked: bool = False,
        kernels: tuple[str, ...] = (),
        cached: int = 0,
        alone_because: str = "",
    ) -> GenerationStats:
        """`k` is what was asked for (0: none, because of `reason`); `parked`: or no more.

        `cached`: rows of the prompt that were not read, because another one begins alike.
        """
        first = self._last if self._first is None else self._first
        to_first, decoding = first - self._begun, self._last - first
        width = k if k else 0
        return GenerationStats(
            drafter_kind="native_mtp" if k else "none",
            num_draft_tokens=k,
            drafting_reason=reason,
            acceptance_rule=rule,
            prompt_tokens=prompt_tokens,
            completion_tokens=self._tokens,
            spec_decode_rounds=self._rounds,
            proposed_draft_tokens=self._drafted,
            accepted_draft_tokens=self._accepted,
            accepted_per_position=tuple(_padded(self._per_position, width)),
            acceptance_rate=_share(self._accepted, self._drafted),
            accepted_share_of_output=_share(self._accepted, self._tokens) if k else None,
            draft_policy=policy,
            draft_k_trace=tuple(self._trace),
            draft_k_histogram=tuple(_padded(self._k_histogram, width + 1)),
            head_parked=parked,
            prompt_tps=(prompt_tokens - cached) / to_first if to_first > 0 else 0.0,
            generation_tps=(
                (self._tokens - self._tokens_before) / decoding if decoding > 0 else 0.0
            ),
            time_to_first_token_s=to_first,
            peak_memory_bytes=mx.get_peak_memory(),
            resumes=resumes,
            kernels=kernels,
            cached_tokens=cached,
            batched_tokens=self._batched,
            batch_size=self._requests / self._forwards if self._forwards else 1.0,
            batching_reason=alone_because,
        )

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
