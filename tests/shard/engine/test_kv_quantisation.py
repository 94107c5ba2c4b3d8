"""Caches of 4 and 8 bits: drafts, prefixes, splits and rollback give what they give without."""

import functools
from typing import Any

import mlx.core as mx
import pytest
from engines import answer, engine_of, load_quietly, request, spec
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from shims import by_rows, perturb
from small import LAYERS, PROMPT, small_checkpoint
from zoo import tiny_config
from zoo_runs import small

from exo_node.placement.errors import LoadFailed
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.states.cache_parts import row_bytes
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.stage_model import KvQuantisation, StageModel
from exo_node.shard.runner.generator_wire import event_to_wire

HIDDEN = 128
"""So that a head has the 32 numbers of the smallest group."""


def form(bits: int) -> dict[str, Any]:
    return {"kv_bits": bits, "kv_group_size": 32 if bits else 0}


@functools.cache
def loaded(bits: int) -> Loaded:
    stage_spec = spec(
        small_checkpoint(hidden=HIDDEN), 0, LAYERS, num_layers=LAYERS, native_mtp=True
    )
    stage_spec.kv_bits, stage_spec.kv_group_size = bits, 32
    return load_quietly(stage_spec)


def engine(bits: int, **changes: Any) -> TextEngine:
    folder = small_checkpoint(hidden=HIDDEN)
    fields: dict[str, Any] = {"num_layers": LAYERS, "native_mtp": True}
    return engine_of(loaded(bits), spec(folder, 0, LAYERS, **(fields | form(bits) | changes)))


def test_numbers_that_depend_on_the_row_count_are_seen_after_quantised_caches_too() -> None:
    stage_spec = spec(
        small_checkpoint(hidden=HIDDEN), 0, LAYERS, num_layers=LAYERS, native_mtp=True
    )
    stage_spec.kv_bits, stage_spec.kv_group_size = 8, 32
    shaken = load_quietly(stage_spec)
    model: Any = shaken.model.model
    assert perturb(model, by_rows)
    subject = engine_of(shaken, stage_spec)
    subject.measurements.measure()
    assert subject.measurements.identity == "near_tie"


def no_bytes(_: int) -> bytes:
    return b""


def test_numbers_are_those_of_quantised_caches_and_the_stats_say_so() -> None:
    whole, eight, four = (
        loaded(bits).model.hidden(mx.array([PROMPT]), None, loaded(bits).model.make_caches())
        for bits in (0, 8, 4)
    )
    far, near = (float(mx.abs(each - whole).max()) for each in (four, eight))
    assert far > 2 * near > 0
    end = answer(engine(4), request(PROMPT, 0, 2)).end
    for bits in (4, 0):
        wire = event_to_wire(end, (), no_bytes, no_bytes, pb.Stats(kv_bits=bits))
        assert wire.finished.stats.kv_bits == bits


@pytest.mark.parametrize(("bits", "share"), [(8, 10 / 32), (4, 6 / 32)])
def test_a_row_takes_its_bits_and_its_scales(bits: int, share: float) -> None:
    """32 numbers share a scale and a bias of 32 bits each, in float32."""
    sizes: list[int] = []
    for each in (0, bits):
        caches = loaded(each).model.make_caches()
        _ = loaded(each).model.hidden(mx.array([[5, 6, 7]]), None, caches)
        attention = [c for c in caches if isinstance(c, KVCache | QuantizedKVCache)]
        assert len(attention) == 1
        assert isinstance(attention[0], QuantizedKVCache) == bool(each)
        sizes.append(row_bytes(attention[0]))
    assert sizes[1] == sizes[0] * share


def numbers(rows: int, seed: int) -> tuple[mx.array, mx.array]:
    keys, values = (mx.random.normal((1, 2, rows, 32), key=mx.random.key(seed + i)) for i in (0, 9))
    return keys, values


@pytest.mark.parametrize(
    "name", ["gpt_oss", pytest.param("gemma3_text", marks=pytest.mark.smoke), "deepseek_v3"]
)
def test_a_model_that_cannot_is_refused_with_what_to_change(name: str) -> None:
    model: Any = small(tiny_config(name))
    layers = len(model.layers)
    stage = StageModel(model, 0, layers, KvQuantisation(8, 32))
    reason = "" if name == "deepseek_v3" else r".*a cache of kind WindowCache"
    with pytest.raises(LoadFailed, match=f"cannot be quantised{reason}"):
        stage.check_quantised(int(tiny_config(name)["hidden_size"]), mx.float32)


def test_a_head_that_no_group_divides_is_refused_at_load() -> None:
    stage_spec = spec(small_checkpoint(), 0, LAYERS, num_layers=LAYERS, kv_bits=8, kv_group_size=64)
    with pytest.raises(LoadFailed, match="remove kv_bits"):
        _ = load_quietly(stage_spec)
