"""A prompt's forward in parts: how long one takes, and that nothing but its time changes."""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false

import itertools
from typing import Any

import mlx.core as mx
import pytest
from clocks import Clock
from engines import load_quietly
from mlx_lm.models.cache import KVCache
from small import small_spec

from exo_node.mtp.parts import LEAST_S, MOST_S, SHARE, Parts
from exo_node.mtp.rollback import cache_arrays, with_tapes

LAYERS = 12


def caches() -> list[KVCache]:
    """Of a prompt that was computed: what is tested is when a part ends."""
    made = [KVCache() for _ in range(LAYERS)]
    for cache in made:
        cache.update_and_fetch(mx.zeros((1, 1, 2, 4)), mx.zeros((1, 1, 2, 4)))
    return made


def parts_of(clock: Clock, others_s: float) -> int:
    """In how many parts the layers are computed, where the others take so long between two."""
    count = 1
    for wait in Parts(clock).computed([caches()]):
        assert wait.part and wait.reads and wait.future.done()
        clock.now += others_s
        count += 1
    return count


@pytest.mark.parametrize(
    ("layer_s", "others_s", "parts"),
    [
        (LEAST_S / 6, 0.0, 2),  # nobody else: a look every LEAST_S
        (0.01, 0.2, 2),  # 2 layers, then as many as SHARE of 0.2 s has: the ten that are left
        (0.01, 0.1, 3),
        (MOST_S, 1.0, LAYERS),
        (MOST_S / 2.5, 100.0, 5),  # two layers by LEAST_S: one; then MOST_S: three each
    ],
)
def test_a_part_takes_as_long_as_others_leave_it(
    layer_s: float, others_s: float, parts: int
) -> None:
    assert SHARE * 0.2 > 0.1 > SHARE * 0.1  # what the cases are about
    assert parts_of(Clock(step=layer_s), others_s) == parts


def test_a_forward_in_parts_is_the_forward_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_node.mtp.parts.MOST_S", 0.0)  # a part for each layer
    model: Any = load_quietly(small_spec()).model.model
    ids = mx.array([[7 * i % 4000 + 3 for i in range(90)]])

    def run(*, in_parts: bool) -> tuple[int, list[mx.array]]:
        made, looks = with_tapes(model.make_cache()), 0
        for chunk in (ids[:, :64], ids[:, 64:]):
            logits = model(chunk, cache=made)
            if in_parts:
                for _ in Parts(Clock()).computed([made]):
                    looks += 1
                    mx.eval(mx.random.normal((64, 64)) @ mx.random.normal((64, 64)))
        return looks, [logits, *cache_arrays(made)]

    (none, whole), (looks, parts) = run(in_parts=False), run(in_parts=True)
    assert none == 0 and looks >= 2 * (len(model.layers) - 1)
    assert len(whole) == len(parts) > len(model.layers)
    assert all(mx.array_equal(a, b).item() for a, b in zip(whole, parts, strict=True))


class Device:
    """mlx.core, which notes what is issued and what is waited for."""

    def __init__(self) -> None:
        self.seen = list[tuple[str, int]]()

    def async_eval(self, arrays: list[mx.array]) -> None:
        self.seen.append(("issued", id(arrays[0])))
        mx.async_eval(arrays)

    def eval(self, arrays: list[mx.array]) -> None:
        self.seen.append(("waited", id(arrays[0])))
        mx.eval(arrays)


def test_a_layer_is_issued_before_the_one_in_front_of_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, held = Device(), caches()
    monkeypatch.setattr("exo_node.mtp.parts.mx", device)
    for _ in Parts(Clock(step=1.0)).computed([held]):
        pass
    first: list[int] = [id(cache_arrays([cache])[0]) for cache in held]
    between = [
        each for a, b in itertools.pairwise(first) for each in (("issued", b), ("waited", a))
    ]
    assert device.seen == [("issued", first[0]), *between, ("waited", first[-1])]
