"""Images of families without a draft head: what transformers' whole model answers."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from engines import answer, request
from forced_copies import FixedLength, force
from pictures import (
    GEMMA,
    MISTRAL,
    Conversation,
    conversations,
    loaded,
    picture_engine,
    picture_pipeline,
    picture_request,
    prepared,
    require_right,
)
from readers import Reader, together
from stored_prefixes import settle

from exo_node.mtp.caches.batch_caches import can_batch
from exo_node.mtp.caches.rollback import can_roll_back
from exo_node.mtp.schedule import prefill_ends
from exo_node.mtp.targets import WholeTarget
from exo_node.shard.engine.prefill_forward import PrefillForward
from exo_node.shard.engine.prefixes.disk import PrefixDisk
from exo_node.shard.engine.prompt_images import PromptImages
from exo_node.shard.engine.states.state import State
from exo_node.shard.engine.text_engine import TextEngine
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.model.tower import embedding_of
from exo_node.shard.text.image_rows import PreparedImage
from exo_node.shard.tools.bare_engine import bare_request

CASES = range(4)
FAMILIES = [pytest.param(GEMMA, id="gemma3"), pytest.param(MISTRAL, id="mistral3")]
pytestmark = pytest.mark.parametrize("folder", FAMILIES)


def case(number: int, folder: Path) -> Conversation:
    return conversations(folder)[number]


@pytest.mark.parametrize("number", CASES)
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


@pytest.mark.parametrize("chunk", [8, 16, 40, 100, 256])
@pytest.mark.parametrize("number", CASES)
def test_answers_are_the_oracles_however_prompts_are_cut(
    folder: Path, number: int, chunk: int
) -> None:
    it = case(number, folder)
    got = answer(picture_engine(folder, prefill_chunk=chunk), picture_request(it, folder=folder))
    require_right(got, it)


@pytest.mark.parametrize("chunk", [8, 40, 256])
@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize("bounds", [(0, 1, 4), (0, 2, 3, 4)])
def test_stages_answer_alike(
    folder: Path, bounds: tuple[int, ...], number: int, chunk: int
) -> None:
    it = case(number, folder)
    engine = picture_pipeline(bounds, folder, prefill_chunk=chunk).engine
    require_right(answer(engine, picture_request(it, folder=folder)), it)


def test_requests_are_answered_beside_text(folder: Path) -> None:
    engine = picture_engine(folder)
    text = request(case(0, folder).prompt_ids[:9], 0, 24)
    readers = [Reader(picture_request(it, folder=folder)) for it in conversations(folder)]
    readers.append(Reader(text))
    together(engine, readers)
    alone = answer(picture_engine(folder), replace(text, request="alone"))
    expected = [*(it.greedy_ids for it in conversations(folder)), list(alone.ids)]
    assert [reader.ids for reader in readers] == expected
    shares = can_batch(loaded(folder).model.make_caches())
    assert all(r.end is not None and bool(r.end.stats.batched_tokens) == shares for r in readers)


def test_stages_answer_them_beside_text(folder: Path) -> None:
    engine = picture_pipeline((0, 2, 4), folder).engine
    text = request(case(0, folder).prompt_ids[:9], 0, 24)
    alone = answer(engine, replace(text, request="alone"))
    readers = [Reader(picture_request(it, folder=folder)) for it in conversations(folder)[:2]]
    readers += [Reader(replace(text, request=f"t{n}")) for n in range(3)]
    together(engine, readers)
    expected = [it.greedy_ids for it in conversations(folder)[:2]] + [list(alone.ids)] * 3
    assert [reader.ids for reader in readers] == expected


@pytest.mark.parametrize("split", [False, True])
def test_a_second_turn_begins_behind_the_first(folder: Path, split: bool) -> None:
    first, second = case(0, folder), case(2, folder)
    fields = {"prefix_cache_bytes": 64 << 20, "prefill_chunk": 32}
    engine = picture_engine(folder, **fields)
    if split:
        engine = picture_pipeline((0, 2, 4), folder, **fields).engine
    require_right(answer(engine, picture_request(first, folder=folder)), first)
    require_right(answer(engine, picture_request(second, folder=folder)), second)
    got = answer(engine, picture_request(second, folder=folder))
    require_right(got, second)
    ends = prefill_ends(
        picture_request(second, folder=folder).prompt, 32, whole_images=folder == GEMMA
    )
    assert got.stats.cached_tokens == ends[-2] and got.stats.cached_tier == "memory"


def test_prefixes_on_disk_outlive_the_engine(folder: Path, tmp_path: Path) -> None:
    it = case(1, folder)

    def engine() -> TextEngine:
        made = PrefixDisk(tmp_path, "k", 1 << 30, loaded(folder).model.make_caches)
        cache = 64 << 20
        return picture_engine(folder, prefix_cache_bytes=cache, prefill_chunk=64, prefix_disk=made)

    first = engine()
    require_right(answer(first, picture_request(it, folder=folder)), it)
    settle(first)
    got = answer(engine(), picture_request(it, folder=folder))
    require_right(got, it)
    assert got.stats.cached_tokens >= 128 and got.stats.cached_tier == "disk"


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("number", CASES)
def test_an_answer_is_resumed_after_a_loss(folder: Path, number: int, split: bool) -> None:
    it = case(number, folder)

    def engine() -> TextEngine:
        return picture_pipeline((0, 2, 4), folder).engine if split else picture_engine(folder)

    whole = answer(engine(), picture_request(it, folder=folder))
    log = [replace(round_, logprobs=()) for round_ in whole.rounds[:3]]
    rest = answer(engine(), picture_request(it, folder=folder, replay=log, attempt=2))
    delivered = [token for round_ in log for token in round_.tokens]
    assert [*delivered, *rest.ids] == it.greedy_ids


@pytest.mark.parametrize("number", CASES)
def test_copied_drafts_change_no_answer(folder: Path, number: int) -> None:
    it = case(number, folder)
    engine = picture_engine(folder, prompt_lookup=True)
    rolls_back = can_roll_back(loaded(folder).model.make_caches())
    if rolls_back:
        force(engine.lookup, FixedLength(3))
    got = answer(engine, picture_request(it, folder=folder, lookup=True))
    require_right(got, it)
    assert rolls_back or got.stats.lookup_reason
    if number == 2:  # a longer answer repeats itself
        asked = picture_request(it, folder=folder, max_tokens=80, lookup=True, request="long")
        got = answer(engine, asked)
        assert got.ids == answer(picture_engine(folder), replace(asked, lookup=False)).ids
        assert bool(got.stats.lookup_accepted_tokens) == rolls_back


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


def test_text_is_bit_for_bit_what_it_was(folder: Path) -> None:
    """With layers of mlx-lm's own classes."""
    model, ids = loaded(folder).model, mx.array([[5, 9, 77, 3, 120] * 12])
    model.rope_positions.behind([0])
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
    """Of several rows, of some behind them, and of one."""
    caches, bounds = model.make_caches(), [0, 40, 59, 60]
    parts = [ids[:, a:b] for a, b in itertools.pairwise(bounds)]
    return mx.concatenate([cast("Any", model.model)(p, cache=caches) for p in parts], axis=1)
