"""On chips whose attention depends on rows and keys, blocks and batches have the bits of single
steps once each row attends by itself, and none of it is there on a CPU.

The single steps are computed by MLX's attention over caches of their own.
"""

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
import pytest
from chips import CHIPS, M1, M3_MAX, Chip, on_chip
from mlx import nn
from mlx_lm.models import base, gemma3_text, llama, qwen3_next
from mlx_lm.models.cache import KVCache
from zoo import tiny_config
from zoo_runs import small

from exo_node.mtp.caches.batch_caches import left_aligned
from exo_node.mtp.caches.positions import Positions
from exo_node.mtp.caches.window import WindowCache
from exo_node.mtp.families.placed_rope import RopePositions
from exo_node.shard.kernels import cuda, own_keys
from exo_node.shard.kernels.own_keys import NAME, OwnKeys, group_keys, hidden_from_cudnn, one_row
from exo_node.shard.kernels.trial import random_rows
from exo_node.shard.model.stage_model import StageModel

SIZE = 16
GROUPS = (2, 4, 6, 8)
ROWS = 4
CONTEXTS = (24, 200, 1021, 1100, 4093, 4200, 8190, 8200)
WINDOWS = (40, 1024)


class Attention(nn.Module):
    """A layer's attention, as mlx-lm's classes call it: by the name in its module."""

    def __init__(self, group: int, sinks: mx.array | None = None) -> None:
        super().__init__()
        self._group, self._sinks = group, sinks

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        """x (B, rows, heads + 2 key heads, SIZE) -> (B, heads, rows, SIZE)."""
        q, k, v = mx.split(x.swapaxes(1, 2), [2 * self._group, 2 * self._group + 2], axis=1)
        mask = cache.make_mask(x.shape[1], return_array=False, window_size=None)
        k, v = cache.update_and_fetch(k, v)
        return scaled_dot_product_attention(q, k, v, cache, SIZE**-0.5, mask, self._sinks)


scaled_dot_product_attention: Any = base.scaled_dot_product_attention
SEAM = scaled_dot_product_attention.__name__


def rows_of(group: int, count: int, number: int) -> mx.array:
    return random_rows((1, count, 2 * group + 4, SIZE), mx.bfloat16, number)


def cache_of(group: int, count: int, window: int, number: int = 1) -> Any:
    """A cache after `count` rows."""
    cache: Any = WindowCache(window) if window else KVCache()
    rows = rows_of(group, count, number).swapaxes(1, 2)
    _ = cache.update_and_fetch(rows[:, -4:-2], rows[:, -2:])
    return cache


@pytest.fixture(params=CHIPS.values(), ids=list(CHIPS))
def chip(request: pytest.FixtureRequest) -> Iterator[Chip]:
    with on_chip(request.param):
        yield request.param


def layer_of(group: int, window: int, *, remedy: bool, sinks: bool = False) -> Attention:
    layer = Attention(group, random_rows((2 * group,), mx.bfloat16, 5) if sinks else None)
    if remedy:

        def two_rows() -> mx.array:
            cache: Any = WindowCache(window) if window else KVCache()
            return layer(rows_of(group, 2, 0), cache)

        assert all(each.used for each in group_keys([layer], two_rows))
    return layer


def differing(layer: Attention, group: int, window: int, context: int, rows: int = ROWS) -> int:
    """How many of a block's rows are not those of single steps, alone and in a batch."""
    alone = cache_of(group, context, window)
    other = cache_of(group, 9, window, number=2)
    new = mx.concatenate([rows_of(group, rows, 3), rows_of(group, rows, 4)])
    block = layer(new[:1], copy.deepcopy(alone))
    [together] = left_aligned([[copy.deepcopy(c)] for c in (alone, other)], Positions([context, 9]))
    batch = layer(new, together)
    count = 0
    for b, cache in enumerate((alone, other)):
        for i in range(rows):
            step = layer(new[b : b + 1, i : i + 1], cache)
            count += not mx.array_equal(step, batch[b : b + 1, :, i : i + 1]).item()
            count += b == 0 and not mx.array_equal(step, block[:, :, i : i + 1]).item()
    return count


@pytest.mark.parametrize("group", GROUPS)
def test_rows_are_those_of_single_steps_across_every_border(chip: Chip, group: int) -> None:
    layer = layer_of(group, 0, remedy=True, sinks=group == 8)
    cases = [(context, rows) for context in CONTEXTS for rows in (1, ROWS)]
    assert {case: differing(layer, group, 0, *case) for case in cases} == dict.fromkeys(cases, 0)


@dataclass(frozen=True, slots=True)
class WithoutBlocks(Chip):
    """A chip without a kernel for blocks: products of every size, some with the bits of one row."""

    def attention(
        self, rows: int, keys: int, group: int, size: int, *, masked: bool, sinks: bool
    ) -> tuple[str, int]:
        if rows == 1 or keys % 200 in range(24, 41):
            return "one pass", 32
        return f"unfused, {rows} rows of {keys} keys", 1


@pytest.mark.parametrize("window", [0, 512])
def test_blocks_that_agree_at_some_keys_by_chance_are_not_believed(window: int) -> None:
    contexts = 5, 17, 24, 100, 224
    with on_chip(WithoutBlocks("without blocks", 15, "g")):
        layer = layer_of(2, window, remedy=True)
        found = {context: differing(layer, 2, window, context) for context in contexts}
    assert found == dict.fromkeys(contexts, 0)


@dataclass(frozen=True, slots=True)
class OfMasks(Chip):
    """A chip on which masked rows, as beside a longer request, have a kernel of their own."""

    def attention(
        self, rows: int, keys: int, group: int, size: int, *, masked: bool, sinks: bool
    ) -> tuple[str, int]:
        return ("masked", 8) if masked else ("one pass", 32)


def test_rows_beside_a_longer_request_are_compared_too() -> None:
    with on_chip(OfMasks("of masks", 15, "g")):
        assert differing(layer_of(2, 0, remedy=False), 2, 0, 24)
        assert not differing(layer_of(2, 0, remedy=True), 2, 0, 24)


@pytest.mark.parametrize("group", [2, 8])
@pytest.mark.parametrize("window", WINDOWS)
def test_rows_of_windows_too(chip: Chip, group: int, window: int) -> None:
    layer = layer_of(group, window, remedy=True)
    contexts = (24, window - 2, window + 30, window + 62, window + 126)
    for context in contexts:
        assert (context, differing(layer, group, window, context)) == (context, 0)


@pytest.mark.parametrize("group", [2, 4])
def test_without_the_remedy_they_are_not(chip: Chip, group: int) -> None:
    layer = layer_of(group, 0, remedy=False)
    assert any(differing(layer, group, 0, context) for context in CONTEXTS[2:])


def test_a_block_below_the_first_border_stays_one_call() -> None:
    # Undone before the chip's own function is, or other tests would compute as on the chip.
    with on_chip(M3_MAX), pytest.MonkeyPatch.context() as patch:
        layer, calls = layer_of(4, 0, remedy=True), list[int]()
        plain, counted = mx.fast.scaled_dot_product_attention, calls

        def attend(q: mx.array, *rest: Any, **options: Any) -> mx.array:
            counted.append(q.shape[2])
            return plain(q, *rest, **options)

        patch.setattr(mx.fast, "scaled_dot_product_attention", attend)
        for context in (200, 1100):
            cache = cache_of(4, context, 0)
            calls.clear()
            _ = layer(rows_of(4, ROWS, 3), cache)
            assert calls == ([ROWS] if context == 200 else [1] * ROWS)


def test_more_rows_than_one_kernel_takes_are_computed_singly() -> None:
    with on_chip(M1):
        layer = layer_of(8, 0, remedy=True)
        cache = cache_of(8, 24, 0)
        block = layer(rows_of(8, 16, 3), copy.deepcopy(cache))
        for i in range(16):
            step = layer(rows_of(8, 16, 3)[:, i : i + 1], cache)
            assert mx.array_equal(step, block[:, :, i : i + 1]).item()


@pytest.mark.parametrize(
    ("name", "module"), [("llama", llama), ("gemma3_text", gemma3_text), ("qwen3_next", qwen3_next)]
)
def test_a_models_own_module_is_changed_where_rows_differ_and_no_other(
    name: str, module: ModuleType
) -> None:
    model: Any = small({**tiny_config(name), "vocab_size": 160})
    stage = StageModel(model, 0, len(model.layers))

    def two_rows() -> object:
        return model(mx.zeros((1, 2), mx.int32), cache=stage.make_caches())

    def never() -> object:
        raise AssertionError("nothing is measured on a CPU")

    modules = stage.own_modules(outer=True)
    assert group_keys(modules, never) == () and vars(module)[SEAM] is vars(base)[SEAM]
    with on_chip(M3_MAX):
        choices = group_keys(modules, two_rows)
        assert {each.kernel for each in choices} == {NAME}
        attending = [each for each in stage.make_caches() if isinstance(each, KVCache)]
        assert sum(each.layers for each in choices) == len(attending)
        assert any("1000 keys" in each.reason for each in choices)
        assert isinstance(vars(module)[SEAM], OwnKeys)
        others = {gemma3_text, llama, qwen3_next, base} - {module}
        assert not any(isinstance(vars(other)[SEAM], OwnKeys) for other in others)


def test_rows_of_an_image_still_see_all_of_it() -> None:
    """Eight of the sixteen rows see keys after them, which no single step would read."""
    positions, x = RopePositions(joins_images=True), rows_of(4, 16, 3)
    positions.join([*range(4), *[-1] * 8, *range(4)])

    def rows_with(layer: Attention) -> mx.array:
        cache = cache_of(4, 24, 0)
        q, k, v = mx.split(x.swapaxes(1, 2), [8, 10], axis=1)
        mask = positions.joined(16, "causal", cache)
        read = cache.update_and_fetch(k, v)
        attend: Any = vars(sys.modules[type(layer).__module__])[SEAM]
        return attend(q, *read, cache, SIZE**-0.5, mask)

    with on_chip(M3_MAX):
        expected = rows_with(layer_of(4, 0, remedy=False))
        assert mx.array_equal(expected, rows_with(layer_of(4, 0, remedy=True))).item()


@pytest.mark.parametrize(("heads", "key_heads"), [(8, 2), (6, 6), (4, 1)])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_a_row_around_cudnn_has_the_numbers_of_mlx(
    monkeypatch: pytest.MonkeyPatch, heads: int, key_heads: int, sinks: bool
) -> None:
    q = random_rows((1, heads, 1, SIZE), mx.float32, 1)
    k, v = (random_rows((1, key_heads, 300, SIZE), mx.float32, i) for i in (2, 3))
    sink = random_rows((heads,), mx.float32, 4) if sinks else None
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, sinks=sink)

    attend, taken = mx.fast.scaled_dot_product_attention, list[mx.array]()

    def noted(queries: mx.array, keys: mx.array, *rest: Any, **named: Any) -> mx.array:
        taken.append(keys)
        return attend(queries, keys, *rest, **named)

    monkeypatch.setattr(cuda, "available", lambda: True)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    out = one_row(q, k, v, 0.25, sinks=sink)
    assert out.shape == expected.shape
    assert mx.array_equal(out, expected).item()
    assert [each.shape[0] for each in taken] == [2 if sinks else key_heads]


def is_taken_by_cudnn(view: mx.array, buffer: mx.array) -> bool:
    """Whether MLX would take a view of `buffer` for the rows of a cache that cuDNN may read."""
    mx.eval(view)
    _, of_head, of_row, _ = cast("tuple[int, ...]", memoryview(cast("Any", view)).strides)
    rows = of_head // of_row
    return view.size // view.shape[2] * rows == buffer.size and rows % 256 == 0


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("key_heads", [1, 2, 4, 8])
def test_cudnn_takes_no_row_of_any_batch(key_heads: int, slots: int) -> None:
    buffer = mx.zeros((slots, key_heads, 512, SIZE))
    keys = buffer[slots - 1 :, :, :300]
    for has_sinks in (False, True):
        view = hidden_from_cudnn(keys, slots, has_sinks=has_sinks)
        assert view.shape[2:] == keys.shape[2:]
        assert not is_taken_by_cudnn(view, buffer)
    # What it would take: a cache's own rows, heads along the batch's axis, a request repeated.
    assert is_taken_by_cudnn(keys, buffer) == (slots == 1)
    if key_heads > 1:
        assert is_taken_by_cudnn(keys.swapaxes(0, 1), buffer) == (slots == key_heads)
        twice = mx.broadcast_to(keys, (2, *keys.shape[1:]))
        assert is_taken_by_cudnn(twice, buffer) == (slots == 2)


def test_a_single_step_of_any_cache_goes_around_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    around = list[int]()

    def noted(
        q: mx.array, k: mx.array, v: mx.array, scale: float, sinks: None, slots: int
    ) -> mx.array:
        around.append(k.shape[2])
        assert slots == 1
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, sinks=sinks)

    monkeypatch.setattr(cuda, "available", lambda: True)
    monkeypatch.setattr(own_keys, "around_cudnn", noted)
    for window in (0, 1024):
        layer = Attention(2)
        monkeypatch.setitem(globals(), SEAM, OwnKeys())
        _ = layer(rows_of(2, 1, 2), cache_of(2, 300, window))
    assert around == [301, 301]
