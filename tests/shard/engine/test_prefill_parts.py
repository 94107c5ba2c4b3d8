"""A forward over prompts in parts: how long one takes, and that nothing but its time changes."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from clocks import Clock
from engines import load_quietly
from mlx_lm.models.cache import KVCache
from small import small_spec

from exo_node.mtp.caches.rollback import cache_arrays, with_tapes
from exo_node.mtp.families.placed_rope import RopePositions
from exo_node.mtp.seams import ForwardOutput, Want, as_row
from exo_node.mtp.targets import WholeTarget
from exo_node.shard.engine.prefill_forward import MAX_PART_S, MIN_PART_S, PART_SHARE, PrefillForward
from exo_node.shard.engine.states.state import State
from exo_node.shard.tools.bare_engine import bare_request

LAYERS = 12


class Layers:
    """A `Target` of layers that are computed at once: what is tested is when a part ends."""

    def __init__(self) -> None:
        self.rope_positions = RopePositions()

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[Any],
        *,
        want: Want,
        embeddings: mx.array | None = None,
    ) -> ForwardOutput:
        del want, embeddings
        for cache in caches:
            cache.update_and_fetch(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))
        return ForwardOutput(mx.zeros((1, tokens.shape[0])), None)

    def forward_batch(self, tokens: mx.array, caches: Sequence[Any]) -> Any:
        raise AssertionError("prompts alone")


def reading(clock: Clock, caches: list[KVCache]) -> PrefillForward:
    states = {bare_request([5], 1): State(caches)}
    return PrefillForward(Layers(), states, [1], clock)


def parts_of(clock: Clock, others_s: float) -> int:
    """In how many parts the layers are computed, where the others take so long between two."""
    forward, count = reading(clock, [KVCache() for _ in range(LAYERS)]), 1
    while not forward.advance():
        clock.now += others_s
        count += 1
    return count


@pytest.mark.parametrize(
    ("layer_s", "others_s", "parts"),
    [
        (MIN_PART_S / 6, 0.0, 2),  # nobody else: a look every MIN_PART_S
        (0.01, 0.2, 2),  # 2 layers, then as many as PART_SHARE of 0.2 s has: the ten that are left
        (0.01, 0.1, 3),
        (MAX_PART_S, 1.0, LAYERS),
        (MAX_PART_S / 2.5, 100.0, 5),  # two layers by MIN_PART_S: one; then MAX_PART_S: three each
    ],
)
def test_a_part_takes_as_long_as_others_leave_it(
    layer_s: float, others_s: float, parts: int
) -> None:
    assert PART_SHARE * 0.2 > 0.1 > PART_SHARE * 0.1  # what the cases are about
    assert parts_of(Clock(step=layer_s), others_s) == parts


def test_a_forward_in_parts_is_the_forward_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "exo_node.shard.engine.prefill_forward.MAX_PART_S", 0.0
    )  # a part for each layer
    model: Any = load_quietly(small_spec()).model.model
    target, ids = WholeTarget(model), [7 * i % 4000 + 3 for i in range(90)]

    def whole() -> list[mx.array]:
        caches = with_tapes(model.make_cache())
        _ = target.forward(as_row(ids[:64]), caches, want="none")
        logits = target.forward(as_row(ids[64:]), caches, want="last").logits
        return [logits, *cache_arrays(caches)]

    def in_parts() -> tuple[int, list[mx.array]]:
        request = bare_request(ids, 1, 64)
        state, looks = State(with_tapes(model.make_cache())), 0
        for end in (64, 90):
            forward = PrefillForward(target, {request: state}, [end], Clock())
            while not forward.advance():
                looks += 1
                mx.eval(mx.random.normal((64, 64)) @ mx.random.normal((64, 64)))
            request.rows = end
        (block,) = forward.outputs
        return looks, [block.logits, *cache_arrays(state.caches)]

    looks, parts = in_parts()
    assert looks >= 2 * (len(model.layers) - 1)
    assert len(whole()) == len(parts) > len(model.layers)
    assert all(mx.array_equal(a, b).item() for a, b in zip(whole(), parts, strict=True))
