"""The layers [a, b) of any mlx-lm model, reading only their tensors.

The model itself is not changed. Its list of layers is replaced by one in which other stages' layers
pass their input on, the first own layer takes the received hidden states and the last one's output
is sent on. The operations around them (embedding, norm, lm_head) are lazy and only evaluated if
this stage needs them.
"""

import contextlib
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    make_prompt_cache,
)

from ...mtp.caches.rollback import takes_tapes, with_tapes
from ...mtp.caches.window import with_windows
from ...mtp.families.family import Family
from ...mtp.families.placed_rope import RopePositions
from ...mtp.targets import FamilyTarget, WholeTarget
from ...placement.errors import InvalidCheckpoint, LoadFailed
from ...placement.kv_bits import Source, load_refusal
from ...placement.split_refusal import SplitRefusal
from ..kernels import row_groups
from .layer_view import (
    LayerCalls,
    LayerRecords,
    Slot,
    recorded_layers,
    stage_view,
    watched_layers,
)
from .open_model import MODEL_FAULTS, headline

log = logging.getLogger(__name__)

REFUSED: Final = SplitRefusal("it cannot be split").param
"""The `param` of the error: this model may run on one node only."""
ONE_NODE: Final = "; place it on one node"
_ROUNDING: Final = 0.02
"""The most that logits may differ by rounding, as a share of the largest."""


@dataclass(frozen=True, slots=True)
class KvQuantisation:
    """How keys and values are quantised, by mlx-lm's cache.

    Each row is quantised by itself, so rollback works as with a plain cache, and a block of rows
    writes the same as single steps. Answers differ a little from those without quantisation, so
    comparisons bit for bit always have it on both sides.
    """

    bits: int
    group_size: int
    """Numbers that share a scale and a bias."""


class StageModel:
    """A loaded model seen as layers [first, end): hidden in (or ids), hidden out (or logits)."""

    def __init__(
        self,
        model: nn.Module,
        first: int,
        end: int,
        kv: KvQuantisation | None = None,
        rope_positions: RopePositions | None = None,
    ) -> None:
        """`kv`: how attention's caches are quantised, or None. `rope_positions`: what the ropes of
        `model` were given, or None if all of its positions are those of text."""
        self.model = model
        self.kv = kv
        self.rope_positions = rope_positions or RopePositions()
        self.first = first
        self.end = end
        self._owner, self._key, self._layers = _find_layers(model)
        self.num_layers = len(cast(Any, model).layers)
        self._takes_tapes = takes_tapes(model)
        self._slot = Slot()

    @property
    def own_layers(self) -> list[nn.Module]:
        """The layers that are computed here."""
        return self._layers[self.first : self.end]

    def own_modules(self, *, outer: bool) -> list[nn.Module]:
        """The modules in the own layers, and if `outer` those around all layers, each once."""
        own = {id(m): m for layer in self.own_layers for _, m in layer.named_modules()}
        if outer:
            layered = {id(m) for layer in self._layers for _, m in layer.named_modules()}
            own |= {id(m): m for _, m in self.model.named_modules() if id(m) not in layered}
        return list(own.values())

    def make_caches(self) -> list[Any]:
        """One request's caches, without those that only other stages write."""
        caches = self._fresh_caches()
        return caches if self._is_whole else [caches[i] for i in self._own_caches]

    def hidden(
        self,
        tokens: mx.array,
        entering: mx.array | None,
        caches: Sequence[Any],
        embeddings: mx.array | None = None,
        *,
        is_lazy: bool = False,
    ) -> mx.array:
        """Runs the own layers: ids (B, n) and, unless the first layer is own, hidden (B, n, H).

        `embeddings`: in place of those of the ids. `is_lazy`: whether it only builds the graph.
        Returns hidden (B, n, H).
        """
        self._slot.is_lazy = is_lazy
        _ = self._call(self._body, tokens, entering, self._all_caches(caches), embeddings)
        output = self._slot.output
        assert output is not None
        return output

    def record(self, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, LayerRecords]:
        """The whole model's logits, and the inputs and outputs of its layers."""
        records = LayerRecords()
        return self._call(recorded_layers(self._layers, records), tokens, None, caches), records

    def require_width(self, hidden_size: int) -> None:
        """Checks on one row that hidden states have `hidden_size` numbers. Raises LoadFailed."""
        row, shape = mx.zeros((1, 1, hidden_size)), ()
        with contextlib.suppress(*MODEL_FAULTS):
            shape = self.hidden(mx.zeros((1, 1), mx.int32), row, self.make_caches()).shape
        if shape != row.shape:
            raise LoadFailed(
                f"the model's layers do not pass on hidden states of {hidden_size} numbers; set "
                "hidden_size in its card to that of its config.json",
                param="hidden_size",
            )

    def check_quantised(self, hidden_size: int, dtype: mx.Dtype, source: Source = "card") -> None:
        """Checks that the model computes with caches quantised by `kv`. Raises LoadFailed.

        `source`: whose `kv_bits` that is, for the remedy. Only the graph of one row is built;
        nothing is computed.
        """
        if self.kv is None:
            return
        caches = self.make_caches()
        try:
            if kinds := _unquantised(caches):
                raise TypeError(f"a cache of kind {kinds[0]} cannot be")
            _ = self.hidden(
                mx.zeros((1, 1), mx.int32), mx.zeros((1, 1, hidden_size), dtype), caches
            )
        except MODEL_FAULTS as fault:
            module = type(self.model).__module__
            reason = f"the caches of {module} cannot be quantised ({headline(fault)})"
            raise load_refusal(reason, source) from fault

    def logits(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Logits (1, n, V) of the last stage's hidden (1, n, H) of ids (1, n).

        Needs the outer weights.
        """
        return self._call(self._tail, tokens, hidden, None)

    @contextlib.contextmanager
    def after_layers(self, hidden: mx.array) -> Generator[None]:
        """Within it calls of the model compute only what comes after its layers, of their `hidden`
        (B, n, H). Needs the outer weights."""
        self._slot.input, self._owner[self._key] = hidden, self._tail
        try:
            yield
        finally:
            self._owner[self._key] = self._layers
            self._slot.input = None

    @property
    def cache_indices(self) -> Sequence[int]:
        """Indices, in the whole model's caches, of those of the own layers."""
        return range(len(self._fresh_caches())) if self._is_whole else self._own_caches

    @property
    def shares_caches(self) -> bool:
        """Whether layers of other stages write to any of its caches."""
        caches = [indices for _, indices in self._layer_calls.caches_by_call]
        own = frozenset[int]().union(*caches[self.first : self.end])
        return own != frozenset(self._own_caches) or any(
            not own.isdisjoint(indices)
            for layer, indices in enumerate(caches)
            if not self.first <= layer < self.end
        )

    @property
    def reads_ends(self) -> bool:
        """Whether a whole model reads a prompt's end as stages do: its layers, then the rest.

        Not on CPUs, where rows have the same bits in any block; nor where what comes after the
        layers needs more than their output, so that other logits come out.
        """
        if not (self._is_whole and row_groups.may_depend_on_rows()):
            return False
        ids = mx.zeros((1, 2), mx.int32)
        self.rope_positions.set_deltas([0])
        try:
            hidden = self.hidden(ids, None, self.make_caches())
            apart = self.logits(ids[:, -1:], hidden[:, -1:])
            whole = cast(Any, self.model)(ids, cache=self.make_caches())[:, -1:]
            deviation = mx.abs(apart - whole).max() / mx.abs(whole).max()
            why = "" if (deviation < _ROUNDING).item() else "its logits are others"
        except (*MODEL_FAULTS, LoadFailed) as fault:
            why = headline(fault)
        if why:
            log.info("a prompt's last row is read apart, as no split of the model would: %s", why)
        return not why

    def _call(
        self,
        layers: list[nn.Module],
        tokens: mx.array,
        entering: mx.array | None,
        caches: Sequence[Any] | None,
        embeddings: mx.array | None = None,
    ) -> mx.array:
        self._slot.input, self._slot.output = entering, None
        self._owner[self._key] = layers
        try:
            extra = {} if embeddings is None else {"input_embeddings": embeddings}
            return cast(Any, self.model)(tokens, cache=caches, **extra)
        finally:
            self._owner[self._key] = self._layers
            self._slot.input = None

    @property
    def _is_whole(self) -> bool:
        return self.first == 0 and self.end == self.num_layers

    def _fresh_caches(self) -> list[Any]:
        caches = with_windows(make_prompt_cache(self.model))
        caches = with_tapes(caches) if self._takes_tapes else caches
        return caches if self.kv is None else _quantised(caches, self.kv)

    @cached_property
    def _layer_calls(self) -> LayerCalls:
        """How the model calls its layers. Raises LoadFailed unless they are called in order."""
        caches = self._fresh_caches()
        calls = LayerCalls(len(caches))
        try:
            _ = self._call(
                watched_layers(self._layers, caches, calls),
                mx.zeros((1, 1), mx.int32),
                None,
                caches,
            )
            why = calls.fault(self.num_layers)
        except MODEL_FAULTS as fault:
            why = f"its layers cannot be passed over ({headline(fault)})"
        if why:
            name = type(self.model).__module__.rpartition(".")[2]
            raise LoadFailed(f"a {name} model cannot be split: {why}{ONE_NODE}", param=REFUSED)
        return calls

    @cached_property
    def _foreign_caches(self) -> frozenset[int]:
        """Indices of the caches that only layers of other stages use."""
        caches = [indices for _, indices in self._layer_calls.caches_by_call]
        own = frozenset[int]().union(*caches[self.first : self.end])
        return frozenset[int]().union(*caches) - own

    def _all_caches(self, caches: Sequence[Any]) -> Sequence[Any]:
        """The own caches with entries for all others, as the model expects them.

        Entries of other stages' layers are aliases of own caches of the same kind: models take a
        mask's offset from the first attention layer, which may not be own.
        """
        if self._is_whole:
            return caches
        own = dict(zip(self._own_caches, caches, strict=True))
        return [
            own.get(self._aliases.get(j, j), cache) for j, cache in enumerate(self._placeholders)
        ]

    @cached_property
    def _placeholders(self) -> list[Any]:
        """Entries for other stages' layers whose kind of cache no own layer has."""
        return self._fresh_caches()

    @cached_property
    def _aliases(self) -> dict[int, int]:
        """The first own cache of the same kind, for each of the others' caches that has one."""
        kinds = [_kind(cache) for cache in self._placeholders]
        same = {
            j: [i for i in self._own_caches if kinds[i] == kinds[j]] for j in self._foreign_caches
        }
        return {j: indices[0] for j, indices in same.items() if indices}

    @cached_property
    def _own_caches(self) -> list[int]:
        """Indices of the other caches; all stages write those without a layer (an embedding's)."""
        return [j for j in range(self._layer_calls.caches) if j not in self._foreign_caches]

    @cached_property
    def _body(self) -> list[nn.Module]:
        return self._layers_of(self.first, self.end)

    @cached_property
    def _tail(self) -> list[nn.Module]:
        return self._layers_of(self.num_layers, self.num_layers)

    def _layers_of(self, first: int, end: int) -> list[nn.Module]:
        if end - first == self.num_layers:
            return stage_view(self._layers, 0, len(self._layers), self._slot, -1)
        extra_outputs = self._layer_calls.extra_outputs
        return stage_view(self._layers, first, end, self._slot, extra_outputs)


def target_of(stage: StageModel, family: Family | None) -> FamilyTarget | WholeTarget:
    """A whole model as answers are computed by it; one without a family drafts nothing."""
    if family is not None:
        return FamilyTarget(family, stage.rope_positions)
    return WholeTarget(stage.model, stage.rope_positions, stage if stage.reads_ends else None)


def _find_layers(model: nn.Module) -> tuple[Any, str, list[nn.Module]]:
    """The module that owns the list of decoder layers, the list's name there, and the list."""
    layers = cast(Any, model).layers
    for _, module in model.named_modules():
        for name, value in module.items():
            if isinstance(value, list) and any(item is layers[0] for item in value):
                return module, name, value
    raise InvalidCheckpoint(f"{type(model).__name__} has no list of decoder layers")


def _kind(cache: object) -> tuple[object, ...]:
    sizes = (getattr(cache, name, None) for name in ("max_size", "chunk_size"))
    parts = map(_kind, cache.caches) if isinstance(cache, CacheList) else ()
    return (type(cache), *sizes, *parts)


def _quantised(caches: Sequence[object], kv: KvQuantisation) -> list[Any]:
    """A fresh cache list in which the plain entries are quantised ones."""
    return [QuantizedKVCache(kv.group_size, kv.bits) if type(c) is KVCache else c for c in caches]


def _unquantised(caches: Sequence[object]) -> list[str]:
    """Names of the cache classes that grow with the context and are not quantised."""
    kinds = {type(c) for c in caches if not isinstance(c, QuantizedKVCache | ArraysCache)}
    return sorted(kind.__name__ for kind in kinds)
