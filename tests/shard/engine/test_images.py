"""Answers to prompts with images, in every family: what transformers' whole model answers."""

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from engines import answer, changed, load_quietly, request
from forced_copies import FixedLength, force
from pictures import (
    DEEP,
    DEEP_MIXTURE,
    DENSE,
    GEMMA,
    MISTRAL,
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

from exo_node.mtp.caches.batch_caches import can_batch
from exo_node.mtp.caches.rollback import can_roll_back
from exo_node.mtp.families.qwen35 import Qwen35Family
from exo_node.mtp.schedule import prefill_ends
from exo_node.mtp.targets import FamilyTarget, WholeTarget
from exo_node.mtp.types import Sampling
from exo_node.shard.engine import prefill_forward
from exo_node.shard.engine.answers import model_measurements
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.prefill_forward import PrefillForward
from exo_node.shard.engine.prefixes.disk import PrefixDisk
from exo_node.shard.engine.prompt_images import PromptImages
from exo_node.shard.engine.states.state import State
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.model.tower import Features, Tower, embedding_of
from exo_node.shard.text.image_rows import PreparedImage, digest_of
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
    engine.measurements.shares_prompts = True
    texts = [request(case(3).prompt_ids[n : n + 60], 0, 12) for n in (0, 40)]
    alone = [answer(picture_engine(), changed(each, name="alone")) for each in texts]
    readers = [Reader(picture_request(case(1))), *(Reader(each, begins=9) for each in texts)]
    together(engine, readers)
    assert readers[0].ids == case(1).greedy_ids
    assert [tuple(reader.ids) for reader in readers[1:]] == [each.ids for each in alone]


def test_several_prompts_with_images_are_read_one_by_one() -> None:
    engine = picture_engine()
    engine.measurements.batch_identity = "bitwise"
    engine.measurements.shares_prompts = True
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


@pytest.mark.parametrize("folder", (DENSE, DEEP, GEMMA, MISTRAL), ids=lambda folder: folder.name)
def test_a_gpu_reads_images_of_its_own_before_the_first_ones_of_people(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first one waits for kernels. Answers stay as they are."""
    encoded = list[tuple[int, ...]]()
    features = Tower.features

    def noted(self: Tower, image: PreparedImage) -> Features:
        encoded.append(image.grid)
        return features(self, image)

    monkeypatch.setattr(Tower, "features", noted)
    for is_gpu in (False, True):
        monkeypatch.setattr(model_measurements, "available", lambda is_gpu=is_gpu: is_gpu)
        served = picture_engine(folder)
        served.measurements.measure()
        assert len(set(encoded)) == len(encoded) and bool(encoded) == is_gpu
    require_right(answer(served, picture_request(case(0, folder), 0, folder)), case(0, folder))


def test_penalties_and_copies_pass_over_rows_of_images() -> None:
    it = case(1)
    penalised = Sampling(repetition_penalty=1.2, repetition_context_size=400)
    plain = picture_request(it, 0, sampling=penalised)
    got = answer(picture_engine(), plain)
    text = [token for token in plain.prompt if token >= 0]
    assert got.ids and len(text) < len(plain.prompt)
    copied = answer(picture_engine(prompt_lookup=True), picture_request(it, 0, prompt_lookup=True))
    require_right(copied, it)


DEEPS, HEADLESS = (DEEP, DEEP_MIXTURE), (GEMMA, MISTRAL)
FAMILIES = (DENSE, MIXTURE, *DEEPS, *HEADLESS)
ROOM = 64 << 20
each_case = pytest.mark.parametrize("number", range(4))
no_head = pytest.mark.parametrize("folder", HEADLESS, ids=lambda folder: folder.name)


def pieces(*cases: tuple[Path, *tuple[object, ...]]) -> list[Any]:
    return [pytest.param(*each, id="-".join([each[0].name, *map(str, each[1:])])) for each in cases]


@pytest.mark.parametrize("folder", FAMILIES, ids=lambda folder: folder.name)
@each_case
def test_prompts_and_features_are_the_oracles(folder: Path, number: int) -> None:
    it, model = case(number, folder), loaded(folder)
    assert model.tower is not None, model.images
    images = [prepared(file, folder) for file in it.files]
    assert [list(image.grid) for image in images] == it.grids
    features = mx.concatenate([model.tower.features(image).rows for image in images])
    # mlx-lm's Gemma multiplies what stands in place of embeddings by the root of 64.
    features *= 8 if folder == GEMMA else 1
    assert mx.allclose(features, mx.array(it.features), rtol=0, atol=2e-5).item()
    prompt, placeholder = picture_request(it, folder=folder).prompt, model.tower.vision.placeholder
    standing = iter([token for image in images for token in row_tokens(image, placeholder)])
    assert [next(standing) if token < 0 else token for token in prompt] == it.prompt_ids
    assert next(standing, None) is None


def row_tokens(image: PreparedImage, placeholder: int) -> list[int]:
    """The ids in a prompt of transformers for the rows of an image."""
    if not image.line_ends:
        return [placeholder] * image.rows
    (line, last), (_, height, width) = image.line_ends, image.grid
    lines = [*[placeholder] * (width // 2), line] * (height // 2)
    return [*lines[:-1], last]


@pytest.mark.parametrize(
    ("folder", "chunk", "k"),
    pieces(
        *((folder, 256, k) for folder in (DENSE, MIXTURE) for k in range(4)),
        *((DENSE, chunk, 2) for chunk in (16, 40, 100)),
        *((folder, chunk, 0) for folder in DEEPS for chunk in (16, 40, 256)),
        *((folder, chunk, 0) for folder in HEADLESS for chunk in (8, 16, 40, 100, 256)),
    ),
)
@each_case
def test_answers_are_the_oracles_however_prompts_are_cut(
    folder: Path, number: int, chunk: int, k: int
) -> None:
    """Forwards may end within images. Twice, so that the second time some of it is cached."""
    it = case(number, folder)
    room = ROOM if folder in DEEPS else 0
    engine = picture_engine(folder, prefill_chunk=chunk, prefix_cache_bytes=room)
    for _ in range(2 if room else 1):
        require_right(answer(engine, picture_request(it, k, folder)), it)


@pytest.mark.parametrize(
    ("folder", "bounds", "chunk"),
    pieces(
        *((DENSE, bounds, chunk) for bounds in ((0, 2, 4), (0, 1, 3, 4)) for chunk in (16, 256)),
        *((folder, (0, 2, 4), chunk) for folder in DEEPS for chunk in (16, 40, 256)),
        *(
            (folder, bounds, chunk)
            for folder in HEADLESS
            for bounds in ((0, 1, 4), (0, 2, 3, 4))
            for chunk in (8, 40, 256)
        ),
    ),
)
@each_case
def test_stages_answer_alike(
    folder: Path, bounds: tuple[int, ...], number: int, chunk: int
) -> None:
    it = case(number, folder)
    engine = picture_pipeline(bounds, folder, prefill_chunk=chunk).engine
    require_right(answer(engine, picture_request(it, folder=folder)), it)


@pytest.mark.parametrize(
    ("folder", "k"), pieces((DENSE, 0), (DENSE, 2), *((each, 0) for each in (*DEEPS, *HEADLESS)))
)
def test_requests_are_answered_beside_text(folder: Path, k: int) -> None:
    engine = picture_engine(folder)
    text = request(case(0, folder).prompt_ids[:9], k, 24, top_logprobs=0)
    readers = [Reader(picture_request(it, k, folder)) for it in conversations(folder)]
    readers.append(Reader(text))
    together(engine, readers)
    alone = answer(picture_engine(folder), changed(text, name="alone"))
    expected = [*(it.greedy_ids for it in conversations(folder)), list(alone.ids)]
    assert [reader.ids for reader in readers] == expected
    shares = can_batch(loaded(folder).model.make_caches())
    assert all(r.end is not None and bool(r.end.stats.batched_tokens) == shares for r in readers)


@pytest.mark.parametrize(
    ("folder", "k", "split"),
    pieces(
        *((DENSE, k, False) for k in (0, 2)),
        (DENSE, 0, True),
        *((folder, 0, split) for folder in HEADLESS for split in (False, True)),
    ),
)
def test_a_second_turn_begins_after_the_first(folder: Path, k: int, split: bool) -> None:
    first, second = case(0, folder), case(2, folder)
    fields = {"prefix_cache_bytes": ROOM, "prefill_chunk": 32}
    engine = picture_engine(folder, **fields)
    if split:
        engine = picture_pipeline((0, 2, 4), folder, **fields).engine
    query = picture_request(second, k, folder)
    require_right(answer(engine, picture_request(first, k, folder)), first)
    got = [answer(engine, replace(query, name=f"{number}")) for number in range(2)]
    for each in got:
        require_right(each, second)
    cached = [each.stats.cached_tokens for each in got]
    ends = prefill_ends(query.prompt, 32, whole_images=folder == GEMMA)
    assert cached[1] == ends[-2] and {each.stats.cached_tier for each in got} == {"memory"}
    assert folder != DENSE or cached == [32, 128]


@pytest.mark.parametrize(
    ("folder", "number", "k", "chunk"),
    pieces((DENSE, 2, 2, 128), *((each, 1, 0, 64) for each in HEADLESS)),
)
def test_prefixes_on_disk_outlive_the_engine(
    folder: Path, number: int, k: int, chunk: int, tmp_path: Path
) -> None:
    it = case(number, folder)

    def engine() -> TextEngine:
        disk = PrefixDisk(tmp_path, "k", 1 << 30, loaded(folder).model.make_caches)
        fields = {"prefix_cache_bytes": ROOM, "prefill_chunk": chunk}
        return picture_engine(folder, prefix_disk=disk, **fields)

    first = engine()
    require_right(answer(first, picture_request(it, k, folder)), it)
    settle(first)
    got = answer(engine(), picture_request(it, k, folder))
    require_right(got, it)
    assert got.stats.cached_tokens >= 128 and got.stats.cached_tier == "disk"


@no_head
@each_case
def test_copied_drafts_change_no_answer(folder: Path, number: int) -> None:
    it = case(number, folder)
    engine = picture_engine(folder, prompt_lookup=True)
    rolls_back = can_roll_back(loaded(folder).model.make_caches())
    if rolls_back:
        force(engine.lookup, FixedLength(3))
    got = answer(engine, picture_request(it, folder=folder, prompt_lookup=True))
    require_right(got, it)
    assert rolls_back or got.stats.lookup_reason
    if number == 2:  # a longer answer repeats itself
        query = picture_request(it, folder=folder, max_tokens=80, prompt_lookup=True, name="long")
        got = answer(engine, query)
        assert got.ids == answer(picture_engine(folder), changed(query, prompt_lookup=False)).ids
        assert bool(got.stats.lookup_accepted_tokens) == rolls_back


@no_head
def test_a_prompts_last_forward_gives_the_logits_of_one_row(folder: Path) -> None:
    """The vocabulary is large, and an image has hundreds of rows."""
    it, model = picture_request(case(0, folder), folder=folder), loaded(folder)
    assert model.tower is not None
    target = WholeTarget(model.model.model, model.model.rope_positions)
    one = bare_request(it.prompt, 1)
    one.images = PromptImages(it.prompt, it.images, model.tower, embedding_of(model.model.model))
    states = {one: State(model.model.make_caches())}
    forward = PrefillForward(target, states, [len(it.prompt)], time.monotonic)
    (output,) = forward.outputs
    assert output.logits.shape[0] == 1


@no_head
def test_text_is_bit_for_bit_what_it_was(folder: Path) -> None:
    """With layers of mlx-lm's own classes."""
    model, ids = loaded(folder).model, mx.array([[5, 9, 77, 3, 120] * 12])
    model.rope_positions.set_deltas([0])
    ours = logits(model, ids)
    changed = [(layer, type(layer)) for layer in model.own_layers]
    try:
        for layer, kind in changed:
            layer.__class__ = next(k for k in kind.__mro__ if k.__module__.startswith("mlx_lm."))
        assert mx.array_equal(ours, logits(model, ids)).item()
    finally:
        for layer, kind in changed:
            layer.__class__ = kind


def logits(model: StageModel, ids: mx.array) -> mx.array:
    """Of several rows, of some after them, and of one."""
    caches, bounds = model.make_caches(), [0, 40, 59, 60]
    parts = [ids[:, a:b] for a, b in itertools.pairwise(bounds)]
    return mx.concatenate([cast("Any", model.model)(p, cache=caches) for p in parts], axis=1)
