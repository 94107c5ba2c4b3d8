"""Answers to prompts with images: what transformers' whole model answers, however they are read."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from engines import answer, load_quietly, request
from mlx import nn
from pictures import (
    DEEP,
    DEEP_MIXTURE,
    DENSE,
    MIXTURE,
    Conversation,
    conversations,
    loaded,
    picture_engine,
    picture_pipeline,
    picture_request,
    picture_spec,
    prepared,
    require_right,
)
from readers import Reader, together
from stored_prefixes import settle

from exo_node.mtp.families.qwen35 import Qwen35Family
from exo_node.mtp.placed_rope import PlacedRope
from exo_node.mtp.targets import FamilyTarget
from exo_node.mtp.types import Penalties, Sampling
from exo_node.shard.engine import prefill_forward
from exo_node.shard.engine.prefill_forward import PrefillForward
from exo_node.shard.engine.prefixes.disk import PrefixDisk
from exo_node.shard.engine.prompt_images import PromptImages
from exo_node.shard.engine.states.state import State
from exo_node.shard.engine.text_engine import TextEngine
from exo_node.shard.text.image_rows import digest_of
from exo_node.shard.tools.bare_engine import bare_request

CASES = range(len(conversations()))


def case(number: int, folder: Path = DENSE) -> Conversation:
    return conversations(folder)[number]


@pytest.mark.parametrize("folder", [DENSE, MIXTURE, DEEP, DEEP_MIXTURE])
@pytest.mark.parametrize("number", CASES)
def test_prompts_and_features_are_the_oracles(folder: Path, number: int) -> None:
    it, tower = case(number, folder), loaded(folder).tower
    assert tower is not None
    images = [prepared(file, folder) for file in it.files]
    assert [list(image.grid) for image in images] == it.grids
    features = mx.concatenate([tower.features(image).rows for image in images])
    assert mx.allclose(features, mx.array(it.features), rtol=0, atol=2e-5).item()
    placeholder = tower.vision.placeholder
    prompt = picture_request(it, folder=folder).prompt
    assert [placeholder if token < 0 else token for token in prompt] == it.prompt_ids


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize("folder", [DENSE, MIXTURE])
def test_answers_are_the_oracles_at_every_depth(folder: Path, number: int, k: int) -> None:
    it = case(number, folder)
    require_right(answer(picture_engine(folder), picture_request(it, k, folder)), it)


@pytest.mark.parametrize("chunk", [16, 40, 100])
@pytest.mark.parametrize("number", CASES)
def test_forwards_may_end_within_images(number: int, chunk: int) -> None:
    it = case(number)
    require_right(answer(picture_engine(prefill_chunk=chunk), picture_request(it, 2)), it)


@pytest.mark.parametrize("chunk", [16, 256])
@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize("bounds", [(0, 2, 4), (0, 1, 3, 4)])
def test_stages_answer_alike(bounds: tuple[int, ...], number: int, chunk: int) -> None:
    it = case(number)
    engine = picture_pipeline(bounds, prefill_chunk=chunk).engine
    require_right(answer(engine, picture_request(it)), it)


@pytest.mark.parametrize("chunk", [16, 40, 256])
@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize("folder", [DEEP, DEEP_MIXTURE])
def test_features_are_added_behind_the_first_layers(folder: Path, number: int, chunk: int) -> None:
    it = case(number, folder)
    engine = picture_engine(folder, prefill_chunk=chunk, prefix_cache_bytes=64 << 20)
    for _ in range(2):
        require_right(answer(engine, picture_request(it, folder=folder)), it)
    split = picture_pipeline((0, 2, 4), folder, prefill_chunk=chunk).engine
    require_right(answer(split, picture_request(it, folder=folder)), it)


@pytest.mark.parametrize("folder", [DEEP, DEEP_MIXTURE])
def test_a_generator_without_those_layers_reads_no_images(folder: Path) -> None:
    first = load_quietly(picture_spec(folder, end=1, num_stages=2, native_mtp=False))
    assert first.tower is None and "first 2 layers of this model read images" in first.images


@pytest.mark.parametrize("folder", [DEEP, DEEP_MIXTURE])
def test_deep_requests_share_forwards_with_text(folder: Path) -> None:
    engine = picture_engine(folder)
    text = request(case(0).prompt_ids[:9], 0, 24)
    readers = [Reader(picture_request(it, folder=folder)) for it in conversations(folder)]
    readers.append(Reader(text))
    together(engine, readers)
    alone = answer(picture_engine(folder), replace(text, request="alone"))
    expected = [*(it.greedy_ids for it in conversations(folder)), list(alone.ids)]
    assert [reader.ids for reader in readers] == expected


@pytest.mark.parametrize("k", [0, 2])
def test_requests_with_images_share_forwards_with_text(k: int) -> None:
    engine = picture_engine()
    text = request(case(0).prompt_ids[:9], k, 24, top_logprobs=0)
    readers = [Reader(picture_request(it, k)) for it in conversations()] + [Reader(text)]
    together(engine, readers)
    alone = answer(picture_engine(), replace(text, request="alone"))
    expected = [*(it.greedy_ids for it in conversations()), list(alone.ids)]
    for reader, ids in zip(readers, expected, strict=True):
        assert reader.fault is None and reader.ids == ids
        assert reader.end is not None and reader.end.stats.batched_tokens


@pytest.mark.parametrize("k", [0, 2])
def test_a_second_turn_begins_behind_the_first(k: int) -> None:
    first, second = case(0), case(2)
    engine = picture_engine(prefix_cache_bytes=64 << 20, prefill_chunk=32)
    require_right(answer(engine, picture_request(first, k)), first)
    got = answer(engine, picture_request(second, k))
    require_right(got, second)
    assert got.stats.cached_tokens == 32 and got.stats.cached_tier == "memory"
    again = answer(engine, picture_request(second, k))
    require_right(again, second)
    assert again.stats.cached_tokens == 128


def test_prefixes_on_disk_outlive_the_engine(tmp_path: Path) -> None:
    it = case(2)

    def engine() -> TextEngine:
        made = PrefixDisk(tmp_path, "k", 1 << 30, loaded().model.make_caches)
        return picture_engine(prefix_cache_bytes=64 << 20, prefill_chunk=128, prefix_disk=made)

    first = engine()
    require_right(answer(first, picture_request(it, 2)), it)
    settle(first)
    got = answer(engine(), picture_request(it, 2))
    require_right(got, it)
    assert got.stats.cached_tokens >= 128 and got.stats.cached_tier == "disk"


def test_another_image_is_no_prefix() -> None:
    """Same grid, same text, and a pixel of another colour."""
    it = case(0)
    engine = picture_engine(prefix_cache_bytes=64 << 20, prefill_chunk=16)
    require_right(answer(engine, picture_request(it)), it)
    image = prepared(it.files[0])
    changed = bytes([image.pixels[0] ^ 255]) + image.pixels[1:]
    other = replace(image, pixels=changed, digest=digest_of(changed, image.grid))
    prompt = list(picture_request(it).prompt)
    begin = next(row for row, token in enumerate(prompt) if token < 0)
    prompt[begin : begin + image.rows] = other.ids
    again = answer(engine, request(prompt, 0, 4, images=[other]))
    assert again.stats.cached_tokens <= begin
    alone = answer(picture_engine(prefill_chunk=16), request(prompt, 0, 4, images=[other]))
    assert again.ids == alone.ids


@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize("k", [0, 3])
def test_an_answer_is_resumed_after_a_loss(number: int, k: int) -> None:
    it = case(number)
    whole = answer(picture_engine(), picture_request(it, k))
    log = [replace(round_, logprobs=()) for round_ in whole.rounds[:3]]
    rest = answer(picture_engine(), picture_request(it, k, replay=log, attempt=2))
    delivered = [token for round_ in log for token in round_.tokens]
    assert [*delivered, *rest.ids] == it.greedy_ids


@pytest.mark.parametrize("number", CASES)
def test_stages_resume(number: int) -> None:
    it = case(number)
    engine = picture_pipeline((0, 2, 4)).engine
    whole = answer(engine, picture_request(it))
    engine = picture_pipeline((0, 2, 4), prefix_cache_bytes=64 << 20).engine
    log = [replace(round_, logprobs=()) for round_ in whole.rounds[:4]]
    rest = answer(engine, picture_request(it, replay=log, attempt=2))
    assert [*(t for r in log for t in r.tokens), *rest.ids] == it.greedy_ids


def test_stages_share_rounds_with_text() -> None:
    engine = picture_pipeline((0, 2, 4)).engine
    text = request(case(0).prompt_ids[:9], 0, 24)
    alone = answer(engine, replace(text, request="alone"))
    # Two of each, so that each of the two groups of a pipeline has both kinds.
    readers = [Reader(picture_request(it)) for it in conversations()[:2]]
    readers += [Reader(replace(text, request=f"t{n}")) for n in range(3)]
    together(engine, readers)
    for reader, ids in zip(readers, [case(0).greedy_ids, case(1).greedy_ids], strict=False):
        assert reader.ids == ids
    for reader in readers[2:]:
        assert tuple(reader.ids) == alone.ids
    assert all(r.end is not None and r.end.stats.batched_tokens for r in readers)


def test_prompts_of_text_read_together_begin_at_their_first_row() -> None:
    """Behind an answer whose rows have other positions than numbers."""
    engine = picture_engine()
    engine.measurements.batch_identity = "bitwise"
    texts = [request(case(3).prompt_ids[n : n + 60], 0, 12) for n in (0, 40)]
    alone = [answer(picture_engine(), replace(each, request="alone")) for each in texts]
    readers = [Reader(picture_request(case(1))), *(Reader(each, begins=9) for each in texts)]
    together(engine, readers)
    assert readers[0].ids == case(1).greedy_ids
    assert [tuple(reader.ids) for reader in readers[1:]] == [each.ids for each in alone]


def test_several_prompts_with_images_are_read_one_by_one() -> None:
    engine = picture_engine()
    engine.measurements.batch_identity = "bitwise"
    it = case(0)
    readers = [Reader(picture_request(it, 1)) for _ in range(3)]
    together(engine, readers)
    assert [reader.ids for reader in readers] == [it.greedy_ids] * 3


def test_an_image_may_follow_a_cached_prefix_of_text() -> None:
    """The head has not read the prefix's last row, whose next token is now a row of an image."""
    it = case(0)
    asked = picture_request(it, 3)
    begin = next(row for row, token in enumerate(asked.prompt) if token < 0)
    engine = picture_engine(prefix_cache_bytes=64 << 20, prefill_chunk=begin)
    _ = answer(engine, request([*asked.prompt[:begin], 5, 6, 7], 3, 4))
    got = answer(engine, asked)
    require_right(got, it)
    assert got.stats.cached_tokens == begin


def test_a_tower_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that answers in progress go on in between."""
    for least in ("MIN_PART_S", "MAX_PART_S"):
        monkeypatch.setattr(prefill_forward, least, 0.0)
    model, tower, parts = loaded().model, loaded().tower, dict[int, int]()
    assert tower is not None
    family: Any = Qwen35Family(cast("Any", model.model))
    target = FamilyTarget(family, model.rope_positions)
    for number in (0, 1):
        asked = picture_request(case(number))
        it = bare_request(asked.prompt, 1)
        it.images = PromptImages(asked.prompt, asked.images, tower, family.embed)
        states = {it: State(model.make_caches())}
        forward = PrefillForward(target, states, [len(asked.prompt)], time.monotonic)
        parts[number] = 1
        while not forward.advance():
            parts[number] += 1
    layers, depth = 4, 2
    assert parts == {0: layers + depth, 1: layers + 2 * depth}


def test_the_heads_rope_has_positions_too() -> None:
    head = loaded().head
    assert type(head.layers[0].self_attn.rope) is PlacedRope


def test_penalties_and_copies_pass_over_rows_of_images() -> None:
    it = case(1)
    penalties = Penalties(repetition=1.2, context_size=400)
    plain = picture_request(it, 0, sampling=Sampling(penalties=penalties))
    got = answer(picture_engine(), plain)
    text = [token for token in plain.prompt if token >= 0]
    assert got.ids and len(text) < len(plain.prompt)
    copied = answer(picture_engine(prompt_lookup=True), picture_request(it, 0, lookup=True))
    require_right(copied, it)


def test_text_is_bit_for_bit_what_it_was() -> None:
    """Without ropes that have positions: the class that mlx-lm has."""
    prompt = [5, 9, 77, 3, 120] * 12
    placed = loaded().model
    caches = placed.make_caches()
    placed.rope_positions.behind([0])
    ids = mx.array([prompt])
    with_ropes = placed.model(ids, cache=caches)
    ropes = [m for _, m in placed.model.named_modules() if type(m) is PlacedRope]
    assert len(ropes) == 2
    try:
        for rope in ropes:
            object.__setattr__(rope, "__class__", nn.RoPE)
        without = placed.model(ids, cache=placed.make_caches())
    finally:
        for rope in ropes:
            rope.__class__ = PlacedRope
    assert mx.array_equal(with_ropes, without).item()
