"""Images of Qwen3.8-Flash-Next: logits and ids of mlx-vlm's own forward, its tower's output and its
positions in three dimensions."""

import copy
import dataclasses
import functools
import itertools
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
import qwen4
from engines import answer, changed, engine_of, load_quietly, request
from mlx.utils import tree_flatten
from pictures import (
    DENSE,
    Conversation,
    conversations,
    loaded,
    picture_pipeline,
    picture_request,
    picture_spec,
    prepared,
    require_right,
)
from readers import Reader, together

from exo_node.mtp.caches.rollback import cache_arrays, rollback
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.prompt_images import PromptImages, set_places
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.tower import embedding_of

_KEPT = tempfile.TemporaryDirectory(prefix="exo-qwen4-images-")
LAYERS = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
each_case = pytest.mark.parametrize("number", range(4))


def config() -> dict[str, Any]:
    """The tower, ids and vocabulary of Qwen3.5's fixture."""
    dense = json.loads((DENSE / "config.json").read_text())
    text = dense["text_config"]
    own = qwen4.config_of(
        vocabulary=text["vocab_size"],
        num_hidden_layers=len(LAYERS),
        layer_types=LAYERS,
        eos_token_id=text["eos_token_id"],
    )
    ids = {name: dense[name] for name in ("image_token_id", "vision_start_token_id")}
    tower = dense["vision_config"] | {"out_hidden_size": 64}
    return own | ids | {"eos_token_id": text["eos_token_id"], "vision_config": tower}


@functools.cache
def parts() -> tuple[Any, Any, Any]:
    """mlx-vlm's model, head and tower."""
    model, head = qwen4.theirs(config()), qwen4.their_head(config())
    qwen4.fit(model, head)
    return model, head, qwen4.their_tower(config())


@functools.cache
def folder() -> Path:
    model, head, tower = parts()
    named = cast("list[tuple[str, mx.array]]", tree_flatten(tower.parameters()))
    seen = {f"vision_tower.{name}": value for name, value in named}
    made = Path(_KEPT.name) / "model"
    _ = qwen4.save(made, config(), qwen4.published(model, head) | seen)
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        _ = shutil.copyfile(DENSE / name, made / name)
    return made


class Theirs:
    """mlx-vlm's forward of one request, row by row: it sums a recurrence of several in chunks."""

    def __init__(self, it: Conversation) -> None:
        self._model, _, tower = parts()
        self.cache = self._model.make_cache()
        images = [prepared(file, folder()) for file in it.files]
        ids, grids = mx.array([it.prompt_ids]), mx.array([list(image.grid) for image in images])
        rows = [tower(_patches(image), mx.array([list(image.grid)]))[0] for image in images]
        self.features = mx.concatenate(rows)
        embeddings = self._model.model.embed_tokens(ids)[0]
        at = [i for i, token in enumerate(it.prompt_ids) if token == config()["image_token_id"]]
        embeddings[mx.array(at)] = self.features
        places, deltas = self._model.get_rope_index(ids, grids)
        self.prompt = list[mx.array]()
        for row in range(ids.shape[1]):
            one = slice(row, row + 1)
            fields = {"inputs_embeds": embeddings[None, one], "position_ids": places[..., one]}
            self.prompt.append(self._forward(ids[:, one], **fields))
        self._deltas = deltas

    def next(self, token: int) -> mx.array:
        """The logits (V,) after one more id."""
        self._model._rope_deltas = self._deltas
        return self._forward(mx.array([[token]]))

    def _forward(self, ids: mx.array, **fields: Any) -> mx.array:
        logits = self._model(ids, cache=self.cache, **fields).logits[0, -1]
        mx.eval(logits)
        return logits


def _patches(image: Any) -> mx.array:
    """The pixels as mlx-vlm's processor gives them: normal, by patch and colour."""
    pixels = mx.array(cast("Any", memoryview(image.pixels)))
    shaped = pixels.reshape(image.grid[0] * image.grid[1] * image.grid[2], 3, -1)
    mean, std = (mx.array(each).reshape(3, 1) for each in (image.mean, image.std))
    return ((shaped.astype(mx.float32) / 255 - mean) / std).flatten(1)


@functools.cache
def case(number: int) -> Conversation:
    """A conversation of the fixture with mlx-vlm's answer."""
    it = conversations(DENSE)[number]
    theirs = Theirs(it)
    logits, ids, chances = theirs.prompt[-1], list[int](), list[float]()
    for _ in range(24):
        ids.append(cast("int", logits.argmax().item()))
        chances.append(cast("float", (logits[ids[-1]] - mx.logsumexp(logits)).item()))
        logits = theirs.next(ids[-1])
    return dataclasses.replace(it, greedy_ids=ids, logprobs=chances)


def ask(it: Conversation, k: int = 0, **fields: Any) -> Any:
    return picture_request(it, k, folder(), ignore_eos=True, **fields)


def own_spec(**fields: Any) -> pb.StageSpec:
    return picture_spec(folder(), mtp_hidden="pre_norm", max_draft_tokens=7, **fields)


@functools.cache
def with_head() -> Loaded:
    model = load_quietly(own_spec())
    assert (model.head_state, model.images) == ("loaded", "read")
    return model


def engine(**fields: Any) -> TextEngine:
    """Its clock counts calls, so that requests share forwards as they do on any machine."""
    ticks = itertools.count()
    return engine_of(with_head(), own_spec(**fields), clock=lambda: float(next(ticks)))


class Ours:
    """This project's forward of one request."""

    def __init__(self, it: Conversation) -> None:
        self.model, tower = loaded(folder()).model, loaded(folder()).tower
        assert tower is not None
        self.prompt = ask(it).prompt
        images = [prepared(file, folder()) for file in it.files]
        self.images = PromptImages(self.prompt, images, tower, embedding_of(self.model.model))
        self.caches = self.model.make_caches()

    def read(self, begin: int, end: int) -> mx.array:
        """The logits (n, V) of rows of the prompt."""
        embeddings = set_places(self.model.rope_positions, self.images, begin, end)
        more = {} if embeddings is None else {"input_embeddings": embeddings}
        return self._forward(self.prompt[begin:end], **more)

    def next(self, *ids: int) -> mx.array:
        """The logits (n, V) after more ids."""
        self.model.rope_positions.set_deltas([self.images.delta])
        return self._forward(ids)

    def _forward(self, ids: Sequence[int], **more: Any) -> mx.array:
        logits = cast("Any", self.model.model)(mx.array([list(ids)]), cache=self.caches, **more)[0]
        mx.eval(logits, cache_arrays(self.caches))
        return logits


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.smoke), 1, 2, 3])
def test_single_rows_have_the_bits_of_mlx_vlm(number: int) -> None:
    """Of the tower's features, of prompts with images, and of what follows them."""
    it = conversations(DENSE)[number]
    theirs, ours = Theirs(it), Ours(it)
    tower = loaded(folder()).tower
    assert tower is not None and any(token < 0 for token in ours.prompt)
    features = [tower.features(prepared(file, folder())).rows for file in it.files]
    assert mx.array_equal(mx.concatenate(features), theirs.features)
    for row, expected in enumerate(theirs.prompt):
        assert mx.array_equal(ours.read(row, row + 1)[0], expected), row
    for token in (5, 9, 33, 77, 101, 4, 250):
        assert mx.array_equal(ours.next(token)[0], theirs.next(token)), token


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_blocks_after_an_image_have_the_bits_of_single_rows(cut: int) -> None:
    """Rows that a rollback takes back were never written, and positions of images stay."""
    it = conversations(DENSE)[0]
    read = Ours(it)
    last = max(row for row, token in enumerate(read.prompt) if token < 0)
    _ = read.read(0, last + cut)
    singles, block = copy.copy(read), copy.copy(read)
    singles.caches, block.caches = copy.deepcopy(read.caches), copy.deepcopy(read.caches)
    ids = [5, 9, 33, 77]
    rows = mx.concatenate([singles.next(token) for token in ids])
    assert mx.array_equal(block.next(*ids), rows)
    rollback(block.caches, 3)
    assert mx.array_equal(block.next(*ids[1:]), rows[1:])


@pytest.mark.parametrize(
    ("k", "chunk"), [*((k, 256) for k in range(8)), *((2, chunk) for chunk in (1, 7, 16, 40))]
)
@each_case
def test_answers_are_mlx_vlms_however_prompts_are_cut(number: int, k: int, chunk: int) -> None:
    """Forwards may end within images. Twice, the second time behind a cached prefix."""
    it = case(number)
    served = engine(prefill_chunk=chunk, prefix_cache_bytes=64 << 20)
    for name in ("first", "second"):
        got = answer(served, ask(it, k, name=name))
        require_right(got, it)
        assert not k or got.stats.proposed_draft_tokens
    assert got.stats.cached_tokens or len(it.prompt_ids) <= chunk


@pytest.mark.parametrize(
    ("bounds", "chunk"), [((0, 2, 4), 16), ((0, 2, 4), 256), ((0, 1, 3, 4), 40)]
)
@each_case
def test_stages_answer_alike(bounds: tuple[int, ...], number: int, chunk: int) -> None:
    it = case(number)
    served = picture_pipeline(bounds, folder(), prefill_chunk=chunk).engine
    require_right(answer(served, ask(it)), it)


@pytest.mark.parametrize("k", [0, 2, 7])
def test_requests_share_forwards_beside_text(k: int) -> None:
    served = engine()
    text = request(case(0).prompt_ids[:9], k, 24, top_logprobs=0, ignore_eos=True)
    asked = [Reader(ask(case(number), k)) for number in range(4)]
    together(served, [*asked, Reader(text)])
    alone = answer(engine(), changed(text, name="alone"))
    assert [reader.ids for reader in asked] == [case(number).greedy_ids for number in range(4)]
    assert all(r.end is not None and r.end.stats.batched_tokens for r in asked)
    assert alone.ids


def test_an_answer_about_an_image_is_resumed_from_its_log() -> None:
    it = case(1)
    first = answer(engine(), ask(it))
    log = first.rounds[:7]
    resumed = answer(engine(), ask(it, replay=log, attempt=2))
    assert resumed.ids == first.ids[7:]
