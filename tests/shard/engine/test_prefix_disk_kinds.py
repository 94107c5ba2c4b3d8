"""Every kind of cache comes back from disk and from a peer, bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engines import answer, engine_of, load_quietly, request, spec
from prefixes import (
    CHUNK,
    FIRST,
    IDS,
    KINDS,
    ROOM,
    SECOND,
    TOKENS,
    comparable,
    of_class,
    plain,
    probabilities,
    two_stages,
)
from small import LAYERS, small_checkpoint
from stored_prefixes import MIB, files, settle
from transfers import handed_over
from zoo import VOCABULARY, tiny_config
from zoo_runs import small

from exo_node.mtp.caches.rollback import cache_arrays
from exo_node.mtp.caches.window import WindowCache
from exo_node.shard.engine.prefixes.disk import PrefixDisk
from exo_node.shard.engine.prefixes.memory import PrefixCache
from exo_node.shard.engine.prefixes.prompt_path import PromptPath
from exo_node.shard.engine.states.state import State
from exo_node.shard.model.stage_model import StageModel


@pytest.mark.parametrize("kind", KINDS)
def test_two_restarted_stages_give_the_answers_of_cold_ones(kind: str, tmp_path: Path) -> None:
    folders = tmp_path / "first", tmp_path / "second"
    for number, prompt in enumerate((*IDS, *IDS)):
        stages = two_stages(kind, ROOM, folders=folders)
        got = answer(stages.engine, plain(prompt))
        assert probabilities(got) == probabilities(
            answer(two_stages(kind, ROOM).engine, plain(prompt))
        )
        cached = got.stats.cached_tokens
        assert (cached > 0) == (number not in (0, 2)), number
        assert got.stats.cached_tier == ("disk" if cached else "")
        for hits in (stages.engine.prefix_hits, stages.workers[0].prefix_hits):
            assert hits == ({"disk": cached} if cached else {})
        settle(stages.engine, *stages.workers)
    assert {path.parents[1] for path in tmp_path.glob("*/*/*.safetensors")} == set(folders)


def _lost(folder: Path) -> None:
    shutil.rmtree(folder)


def _damaged(folder: Path) -> None:
    for path in files(folder):
        data = bytearray(path.read_bytes())
        data[8 + int.from_bytes(data[:8], "little") + 50] ^= 1
        _ = path.write_bytes(data)


def _without_the_last(folder: Path) -> None:
    max(files(folder), key=lambda path: path.stat().st_size).unlink()


@pytest.mark.parametrize(
    ("stage", "change"),
    [
        (0, _lost),
        pytest.param(1, _damaged, marks=pytest.mark.smoke),
        (1, _lost),
        (0, _without_the_last),
    ],
)
def test_a_stage_without_its_files_fails_no_answer(stage: int, change: Any, tmp_path: Path) -> None:
    """Whatever one stage lost, the request begins after a prefix that both have, or after none;
    afterwards both have all of it."""
    folders = tmp_path / "first", tmp_path / "second"
    cached: list[int] = []
    expected = probabilities(answer(two_stages("llama", ROOM).engine, plain(IDS[1])))
    for number in range(4):
        stages = two_stages("llama", ROOM, folders=folders)
        got = answer(stages.engine, plain(IDS[1]))
        assert probabilities(got) == expected
        cached.append(got.stats.cached_tokens)
        settle(stages.engine, *stages.workers)
        if number == 1:
            change(folders[stage])
    assert cached[0] == 0 < cached[1] == cached[3] > cached[2]


@pytest.mark.parametrize(("bits", "k"), [(8, 3), (4, 0)])
def test_a_quantised_cache_comes_back(bits: int, k: int, tmp_path: Path) -> None:
    folder = small_checkpoint(hidden=128)
    fields: dict[str, Any] = {"native_mtp": True, "kv_bits": bits, "kv_group_size": 32}
    room = {"prefill_chunk": CHUNK, "prefix_cache_bytes": ROOM}
    stage_spec = spec(folder, 0, LAYERS, num_layers=LAYERS, **fields, **room)
    loaded = load_quietly(stage_spec)
    cached = list[int]()
    for prompt in (FIRST, FIRST, SECOND, SECOND):
        disk = PrefixDisk(tmp_path, "quantised", 64 * MIB, loaded.model.make_caches)
        restarted = engine_of(loaded, stage_spec, prefix_disk=disk)
        got = answer(restarted, request(prompt, k, TOKENS))
        expected = answer(engine_of(loaded, stage_spec), request(prompt, k, TOKENS))
        assert comparable(got) == comparable(expected)
        cached.append(got.stats.cached_tokens)
        settle(restarted)
    assert cached == [0, 300, 300, 460]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_arrays_of_a_cache_come_back_bit_for_bit(
    kind: str, dtype: mx.Dtype, tmp_path: Path
) -> None:
    if dtype != mx.float32 and kind in ("gpt_oss", "deepseek_v3", "qwen3_next"):
        pytest.skip("experts need float32 on a CPU")
    model: Any = small(tiny_config(kind))
    model.set_dtype(dtype)
    stage = StageModel(model, 0, len(model.layers))
    ids = [(37 * i + 11) % (VOCABULARY - 2) + 1 for i in range(340)]
    caches, memory = stage.make_caches(), PrefixCache(ROOM, stage.make_caches)
    path = PromptPath(ids, [160, 300, 340])
    writer = PrefixDisk(tmp_path, kind, 64 * MIB, stage.make_caches)
    for begin, end in ((0, 160), (160, 300)):
        _ = model(mx.array([ids[begin:end]]), cache=caches)
        mx.eval(*cache_arrays(caches))  # pyright: ignore[reportUnknownMemberType]
        node = memory.insert(path.up_to(end), State(caches, end), 0)
        assert node is not None
        writer.put(node)
        while writer.save_next(memory.holds):
            pass
    assert len(files(tmp_path)) == 2
    reader = PrefixDisk(tmp_path, kind, 64 * MIB, stage.make_caches)
    prefix = reader.find(path, 160)
    assert prefix is not None and prefix.rows == 300
    assert [type(cache) for cache in prefix.caches] == [type(cache) for cache in caches]
    # A window comes back without the rows that nothing reads any more.
    trimmed = [c.trimmed() if isinstance(c, WindowCache) else c for c in caches]
    pairs = list(zip(cache_arrays(prefix.caches), cache_arrays(trimmed), strict=True))
    assert len(pairs) >= len(caches)
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    rest = mx.array([ids[300:]])
    mine, theirs = (model(rest, cache=each) for each in (prefix.caches, caches))
    assert mx.array_equal(mine, theirs).item()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache_moves(kind: str, tmp_path: Path) -> None:
    source, target = of_class(kind, ROOM), of_class(kind, ROOM)
    _ = answer(source, plain(IDS[0]))
    got = handed_over(source, target, plain(IDS[1]))
    assert got.stats.cached_tier == "peer" and got.stats.cached_tokens > 128
    assert probabilities(got) == probabilities(answer(of_class(kind, ROOM), plain(IDS[1])))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache_moves_from_the_files_of_several_turns(
    kind: str, tmp_path: Path
) -> None:
    for prompt in IDS[:2]:
        source = of_class(kind, ROOM, tmp_path)
        _ = answer(source, plain(prompt))
        settle(source)
    assert len(files(tmp_path)) == 2
    got = handed_over(of_class(kind, ROOM, tmp_path), of_class(kind, ROOM), plain(IDS[1]))
    assert got.stats.cached_tier == "peer"
    assert probabilities(got) == probabilities(answer(of_class(kind, ROOM), plain(IDS[1])))
