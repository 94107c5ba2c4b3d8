"""Images beside prefixes, prompts, penalties and copies; every family: test_image_families.py."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from engines import answer, changed, load_quietly, request
from pictures import (
    DEEP,
    DEEP_MIXTURE,
    DENSE,
    Conversation,
    conversations,
    loaded,
    picture_engine,
    picture_request,
    picture_spec,
    prepared,
    require_right,
)
from readers import Reader, together

from exo_node.mtp.families.qwen35 import Qwen35Family
from exo_node.mtp.targets import FamilyTarget
from exo_node.mtp.types import Sampling
from exo_node.shard.engine import prefill_forward
from exo_node.shard.engine.prefill_forward import PrefillForward
from exo_node.shard.engine.prompt_images import PromptImages
from exo_node.shard.engine.states.state import State
from exo_node.shard.text.image_rows import digest_of
from exo_node.shard.tools.bare_engine import bare_request


def case(number: int, folder: Path = DENSE) -> Conversation:
    return conversations(folder)[number]


@pytest.mark.parametrize("folder", [DEEP, DEEP_MIXTURE])
def test_a_generator_without_those_layers_reads_no_images(folder: Path) -> None:
    first = load_quietly(picture_spec(folder, end=1, num_stages=2, native_mtp=False))
    assert first.tower is None and "first 2 layers of this model read images" in first.images


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


def test_prompts_of_text_read_together_begin_at_their_first_row() -> None:
    """Behind an answer whose rows have other positions than numbers."""
    engine = picture_engine()
    engine.measurements.batch_identity = "bitwise"
    texts = [request(case(3).prompt_ids[n : n + 60], 0, 12) for n in (0, 40)]
    alone = [answer(picture_engine(), changed(each, name="alone")) for each in texts]
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
    parameters = picture_request(it, 3)
    begin = next(row for row, token in enumerate(parameters.prompt) if token < 0)
    engine = picture_engine(prefix_cache_bytes=64 << 20, prefill_chunk=begin)
    _ = answer(engine, request([*parameters.prompt[:begin], 5, 6, 7], 3, 4))
    got = answer(engine, parameters)
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
        parameters = picture_request(case(number))
        it = bare_request(parameters.prompt, 1)
        it.images = PromptImages(parameters.prompt, parameters.images, tower, family.embed)
        states = {it: State(model.make_caches())}
        forward = PrefillForward(target, states, [len(parameters.prompt)], time.monotonic)
        parts[number] = 1
        while not forward.advance():
            parts[number] += 1
    layers, depth = 4, 2
    assert parts == {0: layers + depth, 1: layers + 2 * depth}


def test_penalties_and_copies_pass_over_rows_of_images() -> None:
    it = case(1)
    penalised = Sampling(repetition_penalty=1.2, repetition_context_size=400)
    plain = picture_request(it, 0, sampling=penalised)
    got = answer(picture_engine(), plain)
    text = [token for token in plain.prompt if token >= 0]
    assert got.ids and len(text) < len(plain.prompt)
    copied = answer(picture_engine(prompt_lookup=True), picture_request(it, 0, prompt_lookup=True))
    require_right(copied, it)
