"""Measures which lengths of copied drafts one stage of a split model computes exactly."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import mlx.core as mx
from mlx import nn

from ...mtp.families.taped_gated_delta import row_state_bytes
from ...mtp.lookup_probe import measure_copies
from ...mtp.pieces import Pieces
from ...mtp.probe import Subject, exact_widths
from ...mtp.seams import ForwardOutput, Want
from ..model.open_model import MODEL_FAULTS, headline
from ..model.stage_limits import StageLimits
from ..model.stage_model import StageModel
from ..model.tensors import DTYPES
from ..pipeline.copy_query import ExactCopies
from .measuring import NOT_MEASURED, repeated

log = logging.getLogger(__name__)

LENGTHS: Final = (3, 7, 15)
"""Tokens that a round may copy."""
STATE_LENGTHS: Final = (3, 31)
"""The same where a layer's kernel keeps its state after each of up to 16 rows, for which the
planner's headroom has little room if the model is large; beyond 16 rows the inputs of the rows are
kept in place of states."""
REPEATS: Final = 3
"""Measurements of each cost; their median counts."""
_NOISE_ROWS: Final = 64


def lengths_of(model: nn.Module, max_rows: int | None = None) -> tuple[int, ...]:
    """The lengths to measure for a model whose rounds have at most `max_rows` rows."""
    lengths = STATE_LENGTHS if row_state_bytes(model.modules()) else LENGTHS
    return tuple(n for n in lengths if max_rows is None or n < max_rows)


class StageSubject:
    """The layers of one stage as a target that is measured.

    An id chooses the row of noise that the stage before would send. In place of logits it gives
    what leaves the stage. On the first one this is followed by the logits of these hidden states,
    since what comes after the last layer is computed there.
    """

    def __init__(self, model: StageModel, limits: StageLimits) -> None:
        self._model = model
        self.rope_positions = model.rope_positions
        shape, dtype = (_NOISE_ROWS, limits.hidden_size), DTYPES[limits.dtype]
        self._noise = mx.random.normal(shape, dtype, key=mx.random.key(0)) if model.first else None

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[object],
        *,
        want: Want,
        embeddings: mx.array | None = None,
    ) -> ForwardOutput:
        del want, embeddings  # what is not read is not computed; no image is measured
        logits, hidden = self.forward_batch(tokens[None], caches)
        return ForwardOutput(logits[0], hidden)

    def forward_batch(
        self, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array]:
        entering = None if self._noise is None else self._noise[tokens % _NOISE_ROWS]
        hidden = self._model.hidden(tokens, entering, caches)
        if self._model.first:
            return hidden, hidden
        return mx.concatenate([self._model.logits(tokens, hidden), hidden], axis=-1), hidden


class StageCopies:
    """The copies that a stage after the first one computes exactly."""

    def __init__(
        self,
        model: StageModel,
        limits: StageLimits,
        off_reason: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`off_reason`: why this stage verifies none; empty if it may."""
        self._model = model
        self._limits = limits
        self._off_reason = off_reason
        self._clock = clock
        self.exact = ExactCopies.none(self._named(off_reason or NOT_MEASURED))

    def refuse(self, reason: str) -> None:
        """Verifies no copies from now on."""
        self.exact = ExactCopies.none(self._named(reason))

    def probe(self) -> Pieces[None]:
        """Measures them after this load; a stage keeps no profile."""
        lengths = lengths_of(self._model.model, self._limits.max_rows)
        if self._off_reason or not lengths:
            return
        yield
        target = StageSubject(self._model, self._limits)
        limits, caches = self._limits, self._model.make_caches
        subject = Subject(target, caches, limits.vocabulary, limits.context_length, self._clock)
        try:
            exact = yield from repeated(lambda: exact_widths(subject, [n + 1 for n in lengths]))
            seconds = yield from repeated(lambda: measure_copies(subject, lengths, REPEATS))
        except MODEL_FAULTS as fault:  # only the probe's own state is lost
            self.refuse(f"this model cannot verify copied drafts ({headline(fault)})")
            log.warning("%s", self.exact.reason)
            return
        verify, removal = list(seconds.verify.values()), list(seconds.rollback.values())
        self.exact = ExactCopies.measured(lengths, [n - 1 for n in exact], verify, removal)
        if not exact:
            self.refuse(
                f"a verify of {lengths[0] + 1} rows or more does not compute what single steps do "
                "on its machine"
            )
            log.info("%s", self.exact.reason)

    def _named(self, reason: str) -> str:
        return f"stage {self._limits.stage}: {reason}"
