"""Forwards of one stage's layers: shared ones over a row of each request, and repeated ones."""

import copy
import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final, Generic

import mlx.core as mx

from ...mtp.caches.batch_caches import can_batch
from ...mtp.caches.rollback import cache_arrays, rollback
from ...mtp.pieces import Pieces
from ...mtp.probe import lengthen, probe_ids
from ..model.open_model import MODEL_FAULTS, headline
from ..model.stage_model import StageModel
from ..model.tensors import to_bytes
from ..pipeline.frames import Replayed
from .measuring import NOT_MEASURED, repeated
from .states.groups import Groups, K, StageGroup
from .states.state import State
from .step_times import StepTimes

log = logging.getLogger(__name__)

PROBED: Final = (3, 9, 5)
"""Context lengths of the probed requests; short, since the first after each load wait for them."""
LONG: Final = 1100
"""A longer context of one of them, since MLX changes its kernels at 1,024."""


class StageRounds(Generic[K]):
    """The states of a stage's requests, and their rounds. Runs on the compute thread."""

    def __init__(
        self,
        model: StageModel,
        dtype: mx.Dtype,
        is_live: Callable[[K], bool],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`is_live`: whether a request still needs its state."""
        self._model = model
        self._dtype = dtype
        self._clock = clock
        self.step_times = StepTimes()
        """Seconds of these layers alone."""
        self.groups = Groups[K, StageGroup[K]](StageGroup, is_live)
        self.is_same = True
        """Whether shared forwards compute the same bits as those of single requests; see `probe`.
        """
        self.batching_reason = ""
        """Why no forwards are shared; empty where they may be."""
        self._can_share = can_batch(model.make_caches())

    def row(
        self,
        requests: Sequence[K],
        tokens: Sequence[int],
        entering: mx.array | None,
        deltas: Sequence[int],
        *,
        shares: bool = True,
    ) -> bytes:
        """Appends a row to each request's state. Returns the hidden (B, 1, H) in wire format.

        `entering`: hidden (B, 1, H) of the stage before; None on the first stage. `deltas`: see
        `RopePositions`. `shares`: whether one forward may compute the rows.
        """
        if self.computes_together(requests, shares=shares):
            return self._row(requests, tokens, entering, deltas)
        inputs = [None if entering is None else entering[i : i + 1] for i in range(len(requests))]
        singles = zip(requests, tokens, inputs, deltas, strict=True)
        return b"".join(
            self._row([request], [token], rows, [delta]) for request, token, rows, delta in singles
        )

    def computes_together(self, requests: Sequence[K], *, shares: bool) -> bool:
        """Whether `row` computes the rows of these requests in one forward."""
        return len(requests) == 1 or (shares and self._can_share and not self.batching_reason)

    def _row(
        self,
        requests: Sequence[K],
        tokens: Sequence[int],
        entering: mx.array | None,
        deltas: Sequence[int],
    ) -> bytes:
        group, began_at = self.groups.of(requests), self._clock()
        places = [requests.index(request) for request in group.requests]
        ids = mx.array([[tokens[place]] for place in places], dtype=mx.int32)
        is_ordered = places == list(range(len(places)))
        if entering is not None and not is_ordered:
            entering = entering[mx.array(places)]
        self._model.rope_positions.set_deltas([deltas[place] for place in places])
        leaving = self._model.hidden(ids, entering, group.caches.caches)
        if not is_ordered:
            leaving = leaving[mx.array([places.index(i) for i in range(len(places))])]
        data = to_bytes(leaving)
        group.caches.keep(1, [1] * len(requests))
        if len(requests) == 1:
            rows, seconds = group.caches.rows[0], self._clock() - began_at
            self.step_times.add(requests[0], rows, seconds)
        return data

    def block(
        self, request: K, tokens: Sequence[int], entering: mx.array | None, delta: int
    ) -> bytes:
        """Appends a row for each of `tokens` to one request's state, until `keep` says how many of
        them stay. Returns the hidden (1, n, H) in wire format; see `row`."""
        group = self.groups.of([request])
        self._model.rope_positions.set_deltas([delta])
        ids = mx.array([list(tokens)], dtype=mx.int32)
        return to_bytes(self._model.hidden(ids, entering, group.caches.caches))

    def keep(self, request: K, rows: int, kept_rows: int) -> None:
        """Keeps the first `kept_rows` of the `rows` that `block` appended; lazy."""
        self.groups.of([request]).caches.keep(rows, [kept_rows])

    def release(self, request: K) -> None:
        """Frees a request's state."""
        self.groups.release(request)
        self.step_times.end(request)

    def refuse_sharing(self, reason: str) -> None:
        """Computes each request alone from now on."""
        self.batching_reason = reason

    def probe(self, hidden_size: int, vocabulary: int, context_length: int) -> Pieces[None]:
        """Measures `is_same`, without which no forwards are shared; sets `batching_reason` if the
        model's layers compute no batch."""
        self.batching_reason, reason = NOT_MEASURED, ""
        yield
        try:
            probe = _Probe(self._model, self._dtype, hidden_size, vocabulary)
            self.is_same = yield from repeated(lambda: probe.is_same(context_length))
        except MODEL_FAULTS as fault:
            reason = f"this model cannot be computed in batches ({headline(fault)})"
            log.warning("%s: its requests take turns", reason)
        self.batching_reason = reason


class _Probe:
    """Compares rows of requests in shared and in single forwards, after random hidden states."""

    def __init__(
        self, model: StageModel, dtype: mx.Dtype, hidden_size: int, vocabulary: int
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._hidden_size = hidden_size
        self._vocabulary = vocabulary

    def is_same(self, context_length: int) -> Pieces[bool]:
        """Whether the hidden states are bit for bit the same, and on the first stage the logits."""
        bases = list[State]()
        for number, rows in enumerate(PROBED):
            yield
            bases.append(self._behind(rows, number))
        if context_length > LONG + 8:
            yield from lengthen(bases[0].caches, LONG, LONG + 8)
            bases[0].rows = LONG
        tokens = probe_ids(self._vocabulary, 7, 7 + len(bases))
        noise = [self._noise(1, number + 9) for number in range(len(bases))]
        rows_alone = list[mx.array]()
        for base, token, row in zip(bases, tokens, noise, strict=True):
            yield
            caches = copy.deepcopy(base.caches)
            rows_alone.append(self._model.hidden(mx.array([[token]]), row, caches))
            mx.eval(rows_alone[-1], cache_arrays(caches))
        bytes_alone = [to_bytes(each) for each in rows_alone]
        # No long context in the large batch: each of its requests would need as much room.
        for chosen in ([0, 1, 2], [1, 2] * 8):
            yield
            states = [State(copy.deepcopy(bases[i].caches), bases[i].rows) for i in chosen]
            caches = StageGroup(dict(enumerate(states))).caches.caches
            ids = mx.array([[tokens[i]] for i in chosen], dtype=mx.int32)
            rows = [row for i in chosen if (row := noise[i]) is not None]
            entering = mx.concatenate(rows) if rows else None
            together = to_bytes(self._model.hidden(ids, entering, caches))
            if together != b"".join(bytes_alone[i] for i in chosen):
                return False
        yield
        return self._model.first > 0 or self._same_logits(rows_alone)

    def _behind(self, rows: int, number: int) -> State:
        caches = self._model.make_caches()
        ids = mx.array([probe_ids(self._vocabulary, number, number + rows)], dtype=mx.int32)
        mx.eval(self._model.hidden(ids, self._noise(rows, number), caches))
        return State(caches, rows)

    def _same_logits(self, rows: list[mx.array]) -> bool:
        ids = mx.zeros((len(rows), 1), mx.int32)
        together = self._model.logits(ids, mx.concatenate(rows))
        single = [self._model.logits(ids[:1], row)[0] for row in rows]
        return all(mx.array_equal(a, b).item() for a, b in zip(together, single, strict=True))

    def _noise(self, rows: int, key: int) -> mx.array | None:
        """Random hidden states (1, rows, H) of the stage before; None on the first stage."""
        if self._model.first == 0:
            return None
        shape = (1, rows, self._hidden_size)
        return mx.random.normal(shape, self._dtype, key=mx.random.key(key))


def replay_forwards(
    model: StageModel,
    tokens: mx.array,
    entering: mx.array | None,
    caches: Sequence[Any],
    replayed: Sequence[Replayed],
) -> mx.array:
    """Repeats the forwards of an earlier attempt over ids (1, rows). Returns hidden (1, rows, H).

    The number of rows chooses kernels, and so the bits: repeating it repeats them. The ids of
    rejected rows do not matter.
    """
    leaving = list[mx.array]()
    for end, (rows, kept_rows) in zip(accumulate(f.rows for f in replayed), replayed, strict=True):
        part = slice(end - rows, end)
        incoming = None if entering is None else entering[:, part]
        leaving.append(model.hidden(tokens[:, part], incoming, caches))
        if kept_rows < rows:
            rollback(caches, rows - kept_rows)
        mx.async_eval(leaving[-1])  # computed while the next graph is built
    return mx.concatenate(leaving, axis=1)
