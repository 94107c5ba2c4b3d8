"""Forwards that several requests of a stage share, and their caches meanwhile.

The caches stay together from forward to forward, as a batch's do (`mtp/batch_caches.py`), and are
only copied where other requests than before share one. Whoever needs a request's own caches asks
its state for them: `RequestState.alone`.
"""

import copy
import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ...mtp.batch_caches import BatchCache, BatchTapedCache, Positions, batched, can_batch, own
from ...mtp.probe import lengthen, probe_ids
from ...mtp.rollback import TapedCache, cache_arrays
from ...mtp.seams import FORWARD_FAULTS
from ...placement.errors import StateLost
from ..model.stage_model import MODEL_FAULTS, StageModel, said
from ..model.tensors import to_bytes
from .request_state import RequestState

log = logging.getLogger(__name__)

SHARED: Final = "a forward that several requests shared failed"
PROBED: Final = (3, 9, 5)
"""Rows behind which requests are probed: each load pays for them."""
LONG: Final = 1100
"""The same of one of them: MLX changes its kernels at 1,024."""


@dataclass(slots=True, eq=False)
class Group:
    """Requests whose caches are together."""

    model: StageModel
    members: list[RequestState | None]
    """None: it was taken out, or ended."""
    positions: Positions
    caches: list[BatchCache]
    """Of the stage's own layers."""
    broken: bool = False
    """A forward did not come to its end: nobody knows what the caches hold."""

    def view(self, state: RequestState) -> RequestState:
        """Its state, in views of the caches; StateLost."""
        self._check()
        index = self._index(state)
        mine = self.model.own_caches(state.caches)
        taken = {id(m): cache.of(index) for m, cache in zip(mine, self.caches, strict=True)}
        caches = [taken.get(id(cache), cache) for cache in state.caches]
        return replace(state, caches=caches, group=None)

    def take_out(self, state: RequestState) -> None:
        """Its caches are its own again; StateLost."""
        self._check()
        index, mine = self._index(state), self.model.own_caches(state.caches)
        for shell, together in zip(mine, self.caches, strict=True):
            cache = together.of(index)
            own(cache)
            vars(shell).update(vars(cache))
            if isinstance(together, BatchTapedCache) and isinstance(shell, TapedCache):
                together.lend_tape(shell, index)
        mx.eval(cache_arrays(mine))
        self.drop(state)

    def drop(self, state: RequestState) -> None:
        """It is over, or holds its rows itself."""
        self.members[self._index(state)] = None
        state.group = None

    @property
    def live(self) -> list[RequestState]:
        return [state for state in self.members if state is not None]

    def _index(self, state: RequestState) -> int:
        return next(i for i, member in enumerate(self.members) if member is state)

    def _check(self) -> None:
        if self.broken:
            raise StateLost(SHARED)


@dataclass(slots=True)
class Merged:
    """The merged forwards of one stage. All methods run on the compute thread."""

    model: StageModel
    dtype: mx.Dtype
    same: bool = True
    """Whether rows were found to be, bit for bit, those of forwards alone; see `probe`."""
    refused: str = ""
    """Why nothing is merged here."""
    _groups: list[Group] = field(default_factory=list[Group])

    def takes(self, state: RequestState) -> bool:
        """Whether its caches can be others' as well."""
        return not self.refused and can_batch(self.model.own_caches(state.caches))

    def rows(
        self, states: Sequence[RequestState], tokens: Sequence[int], entering: mx.array | None
    ) -> list[bytes]:
        """Appends a row to each state; what leaves the stage, by request. Raises StateLost.

        `entering` (B, 1, H); None on the first stage.
        """
        try:
            return self._rows(states, tokens, entering)
        except FORWARD_FAULTS as fault:
            log.error("%s", SHARED, exc_info=fault)
            raise StateLost(SHARED) from fault

    def _rows(
        self, states: Sequence[RequestState], tokens: Sequence[int], entering: mx.array | None
    ) -> list[bytes]:
        """As `rows`; raises what the forward raises, and leaves the group broken then."""
        group = self._group_of(states)
        group.broken = True
        ids = mx.array([[token] for token in tokens], dtype=mx.int32)
        caches = self._for_model(states[0], group)
        data = to_bytes(self.model.hidden(ids, entering, caches))
        group.broken = False
        group.positions.moved([1] * len(states))
        for state in states:
            state.wrote((1,))
        size = len(data) // len(states)
        return [data[i * size : (i + 1) * size] for i in range(len(states))]

    def drop(self, state: RequestState) -> None:
        """It is over."""
        if state.group is not None:
            state.group.drop(state)
        self._prune()

    def arrays(self) -> list[mx.array]:
        self._prune()
        return [array for group in self._groups for array in cache_arrays(group.caches)]

    def probe(self, hidden_size: int, vocabulary: int, context_length: int) -> None:
        """Measures `same`; `refused` where the model's layers compute no batch."""
        try:
            self.same = self._same(hidden_size, vocabulary, context_length)
        except MODEL_FAULTS as fault:
            self.refused = f"this model cannot be computed in batches ({said(fault)})"
            log.warning("%s: its requests take turns", self.refused)

    def _same(self, hidden_size: int, vocabulary: int, context_length: int) -> bool:
        bases = [
            self._behind(rows, number, hidden_size, vocabulary)
            for number, rows in enumerate(PROBED)
        ]
        if context_length > LONG + 8:
            lengthen(self.model.own_caches(bases[0].caches), LONG, LONG + 8)
            bases[0].position = LONG
        tokens = probe_ids(vocabulary, 7, 7 + len(bases))
        noise = [self._noise(1, number + 9, hidden_size) for number in range(len(bases))]
        wanted = list[mx.array]()
        for base, token, row in zip(bases, tokens, noise, strict=True):
            caches = copy.deepcopy(base.caches)
            wanted.append(self.model.hidden(mx.array([[token]]), row, caches))
        alone = [to_bytes(each) for each in wanted]
        # Of the many none has a long past, for which each would need room.
        for chosen in ([0, 1, 2], [1, 2] * 8):
            states = [replace(bases[i], caches=copy.deepcopy(bases[i].caches)) for i in chosen]
            rows = [noise[i] for i in chosen]
            entering = None if self._outer else mx.concatenate(cast("list[mx.array]", rows))
            got = self._rows(states, [tokens[i] for i in chosen], entering)
            for state in states:
                self.drop(state)
            if got != [alone[i] for i in chosen]:
                return False
        return not self._outer or self._same_logits(wanted)

    @property
    def _outer(self) -> bool:
        """Whether ids come in, and the norm and lm_head are here."""
        return self.model.first == 0

    def _behind(self, rows: int, number: int, hidden_size: int, vocabulary: int) -> RequestState:
        state = RequestState(self.model.make_caches())
        ids = mx.array([probe_ids(vocabulary, number, number + rows)], dtype=mx.int32)
        mx.eval(self.model.hidden(ids, self._noise(rows, number, hidden_size), state.caches))
        state.wrote((rows,))
        return state

    def _same_logits(self, rows: list[mx.array]) -> bool:
        ids = mx.zeros((len(rows), 1), mx.int32)
        got = self.model.logits(ids, mx.concatenate(rows))
        alone = [self.model.logits(ids[:1], row)[0] for row in rows]
        return all(mx.array_equal(a, b).item() for a, b in zip(got, alone, strict=True))

    def _noise(self, rows: int, key: int, hidden_size: int) -> mx.array | None:
        """(1, rows, H) as if of the stage before; None on the first."""
        if self._outer:
            return None
        return mx.random.normal((1, rows, hidden_size), self.dtype, key=mx.random.key(key))

    def _for_model(self, state: RequestState, group: Group) -> list[Any]:
        """As the model takes caches: those of layers elsewhere are aliases, or never read."""
        mine = self.model.own_caches(state.caches)
        together = {id(m): cache for m, cache in zip(mine, group.caches, strict=True)}
        return [together.get(id(cache), cache) for cache in state.caches]

    def _group_of(self, states: Sequence[RequestState]) -> Group:
        held = states[0].group
        if held is not None and _are(held.members, states):
            return held
        views = [state.view() for state in states]
        positions = Positions([state.position for state in states])
        caches = batched([self.model.own_caches(view.caches) for view in views], positions)
        mx.eval(cache_arrays(caches))
        before = {id(state.group): state.group for state in states if state.group is not None}
        for state in states:
            if state.group is not None:
                state.group.drop(state)
        for group in before.values():
            for other in group.live:
                group.take_out(other)
        made = Group(self.model, list(states), positions, caches)
        for state in states:
            state.group = made
            for shell in self.model.own_caches(state.caches):
                _empty(shell)
        self._prune()
        self._groups.append(made)
        return made

    def _prune(self) -> None:
        self._groups = [group for group in self._groups if group.live]


def _are(members: Sequence[object], states: Sequence[object]) -> bool:
    return len(members) == len(states) and all(map(operator.is_, members, states))


def _empty(shell: Any) -> None:
    """Its rows are a group's now."""
    if isinstance(shell, ArraysCache):
        shell.cache = [None] * len(shell.cache)
        if isinstance(shell, TapedCache):
            shell.forget()
    else:
        shell.keys = shell.values = None
