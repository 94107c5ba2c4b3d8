"""Times a loaded stage's layers: the planner's figures for this model on this machine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...mtp.caches.rollback import cache_arrays
from ...placement.chunk import MOST
from .stage_model import StageModel

REPEATS = 5
BUDGET_S = 0.3
"""Seconds for all runs, roughly: each shape runs twice at least, as its first run compiles."""
PREFILL_LAYERS = 8
"""A chunk is timed on the last layers only: of a big stage it would take many times the budget."""
SAMPLE_ROWS = 32
"""Rows from which a CPU's time for a chunk is estimated if the budget is too short: there rows cost
the same. On a GPU a few cost nearly as much as a chunk."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer, the mean over the timed ones, at a short context.

    Each is the minimum of its repeats: other programs can only add time. `tail_s` is the final norm
    and lm_head for one row, 0 where the stage is not the generator's.
    """

    decode_s: float
    verify_s: float
    verify_rows: int
    prefill_s: float
    prefill_rows: int
    tail_s: float


def probe_layers(
    stage: StageModel,
    hidden_size: int,
    dtype: mx.Dtype,
    clock: Clock,
    *,
    drafts: int,
    tail: bool,
    chunk: int = MOST,
) -> LayerTimes:
    """Times layers [first, end) of a loaded stage; on the compute thread, before it serves.

    `drafts`: the most of a verify, or 0 to time 3. `chunk`: rows of a prompt's forward.

    A single row is a decode step; the hidden states are random, so that a mixture's router spreads
    them over its experts as text would.
    """
    start, verify_rows = clock(), (drafts or 3) + 1
    first = max(stage.first, stage.end - PREFILL_LAYERS)
    last_layers = StageModel(stage.model, first, stage.end, stage.kv)

    def time_layers(part: StageModel, count: int, share: float) -> float:
        caches = part.make_caches()
        ids, hidden = random_rows(count, hidden_size, dtype)

        def forward() -> None:
            out = part.hidden(ids, hidden, caches)
            mx.eval(out, cache_arrays(caches))

        return _fastest(forward, clock, start + share * BUDGET_S) / (part.end - part.first)

    decode = time_layers(stage, 1, 0.25)
    verify = time_layers(stage, verify_rows, 0.5)
    tail_s = _time_tail(stage, hidden_size, dtype, clock, start + 0.6 * BUDGET_S) if tail else 0.0
    sample = min(SAMPLE_ROWS, chunk) if mx.default_device() == mx.Device(mx.cpu) else chunk
    prefill = time_layers(last_layers, sample, 0.9) * chunk / sample
    more_s = 2 * prefill * (last_layers.end - last_layers.first)
    if sample < chunk and clock() + more_s < start + BUDGET_S:
        prefill = time_layers(last_layers, chunk, 1.0)
    return LayerTimes(decode, verify, verify_rows, prefill, chunk, tail_s)


def _time_tail(
    stage: StageModel, hidden_size: int, dtype: mx.Dtype, clock: Clock, deadline: float
) -> float:
    ids, hidden = random_rows(1, hidden_size, dtype)
    return _fastest(lambda: mx.eval(stage.logits(ids, hidden)), clock, deadline)


def random_rows(rows: int, hidden_size: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    hidden = mx.random.normal((1, rows, hidden_size), key=mx.random.key(rows)).astype(dtype)
    ids = mx.zeros((1, rows), mx.int32)
    mx.eval(hidden, ids)
    return ids, hidden


def _fastest(work: Callable[[], Any], clock: Clock, deadline: float) -> float:
    """The minimum of up to REPEATS runs after a warm-up, of one at least."""
    work()
    seconds = list[float]()
    while not seconds or (len(seconds) < REPEATS and clock() + seconds[0] < deadline):
        start = clock()
        work()
        seconds.append(clock() - start)
    return min(seconds)
