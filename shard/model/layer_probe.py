"""Times a loaded stage's layers: what the planner knows of this model on this machine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...mtp.rollback import cache_arrays
from ...placement.chunk import MOST
from .stage_model import StageModel

REPEATS = 5
BUDGET_S = 0.3
"""For all of it, about: a first run of each shape counts where there is no time for more."""
PREFILL_LAYERS = 8
"""A chunk is timed on the last layers only: of a big stage it would take many times the budget."""
SAMPLE_ROWS = 32
"""What a chunk's time is estimated from where the budget has no room for it: rows cost alike."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer, the mean over the timed ones, at a short context.

    Each is the least of its repeats: other programs only ever add. `tail_s` is the final norm and
    lm_head for one row, 0 where the stage is not the generator's.
    """

    decode_s: float
    verify_s: float
    verify_rows: int
    prefill_s: float
    prefill_rows: int
    tail_s: float


@dataclass(frozen=True, slots=True)
class ProbeRows:
    """What is timed: a verify of K+1 rows, a prefill chunk."""

    verify: int
    prefill: int


def probe_layers(
    stage: StageModel,
    hidden_size: int,
    dtype: mx.Dtype,
    rows: ProbeRows,
    clock: Clock,
    *,
    tail: bool,
) -> LayerTimes:
    """Times layers [first, end) of a loaded stage; on the compute thread, before it serves.

    A single row is a decode step; the hidden states are random, so that a mixture's router spreads
    them over its experts as text would.
    """
    begun = clock()
    first = max(stage.first, stage.end - PREFILL_LAYERS)
    few = StageModel(stage.model, first, stage.end, stage.kv)

    def layers(part: StageModel, count: int, share: float) -> float:
        caches = part.make_caches()
        ids, hidden = _inputs(count, hidden_size, dtype)

        def forward() -> None:
            out = part.hidden(ids, hidden, caches)
            mx.eval(out, cache_arrays(caches))

        return _least(forward, clock, begun + share * BUDGET_S) / (part.end - part.first)

    decode = layers(stage, 1, 0.25)
    verify = layers(stage, rows.verify, 0.5)
    tail_s = _tail(stage, hidden_size, dtype, clock, begun + 0.6 * BUDGET_S) if tail else 0.0
    sample = min(SAMPLE_ROWS, rows.prefill)
    prefill = layers(few, sample, 0.9) * rows.prefill / sample
    if sample < rows.prefill and clock() + prefill * (few.end - few.first) < begun + BUDGET_S:
        prefill = layers(few, rows.prefill, 1.0)
    return LayerTimes(decode, verify, rows.verify, prefill, rows.prefill, tail_s)


def _tail(
    stage: StageModel, hidden_size: int, dtype: mx.Dtype, clock: Clock, deadline: float
) -> float:
    ids, hidden = _inputs(1, hidden_size, dtype)
    return _least(lambda: mx.eval(stage.logits(ids, hidden)), clock, deadline)


def _inputs(rows: int, hidden_size: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    hidden = mx.random.normal((1, rows, hidden_size), key=mx.random.key(rows)).astype(dtype)
    ids = mx.zeros((1, rows), mx.int32)
    mx.eval(hidden, ids)
    return ids, hidden


def _least(work: Callable[[], Any], clock: Clock, deadline: float) -> float:
    """The least of up to REPEATS runs after a first one, which alone counts past the deadline."""
    first = _timed(work, clock)
    seconds: list[float] = []
    while len(seconds) < REPEATS and clock() + first < deadline:
        seconds.append(_timed(work, clock))
    return min(seconds, default=first)


def _timed(work: Callable[[], Any], clock: Clock) -> float:
    begun = clock()
    work()
    return clock() - begun


def probed_rows(max_draft_tokens: int) -> ProbeRows:
    """What a stage is timed at; a model without drafts takes the K = 3 that others verify."""
    return ProbeRows(verify=(max_draft_tokens or 3) + 1, prefill=MOST)
