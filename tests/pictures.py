"""Conversations with images on the tiny checkpoints of `tests/oracle/images.py`."""

import base64
import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import Answer, engine_of, load_quietly, request, spec
from pipelines import Pipeline, stage_specs

from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.request import Parameters
from exo_node.shard.model.load import Loaded
from exo_node.shard.text.image_rows import PreparedImage, with_image_rows

ORACLE = Path(__file__).parent / "oracle"
DENSE, MIXTURE = ORACLE / "qwen3_5_images", ORACLE / "qwen3_5_moe_images"
DEEP, DEEP_MIXTURE = ORACLE / "qwen3_vl_images", ORACLE / "qwen3_vl_moe_images"
"""Without a draft head, and with features that are added after the first two layers."""
GEMMA = ORACLE / "gemma3_images"
"""Rows of an image see all of their image, which has more rows than a sliding window."""
MISTRAL = ORACLE / "mistral3_images"
"""The last row of each line of an image is no patch's."""
LAYERS = 4


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation, and what transformers answers it."""

    files: tuple[bytes, ...]
    messages: list[dict[str, Any]]
    prompt_ids: list[int]
    """With as many placeholders as an image has rows."""
    grids: list[list[int]]
    features: list[list[float]]
    greedy_ids: list[int]
    logprobs: list[float]


@functools.cache
def conversations(folder: Path = DENSE) -> list[Conversation]:
    answers = json.loads((folder / "oracle.json").read_text())["answers"]
    return [
        Conversation(tuple(map(base64.b64decode, each.pop("images"))), **each) for each in answers
    ]


def picture_spec(folder: Path = DENSE, **changes: Any) -> Any:
    fields = {"num_layers": LAYERS, "end": LAYERS, "native_mtp": True, "prefill_chunk": 256}
    return spec(folder, **(fields | {"context_length": 1024} | changes))


@functools.cache
def loaded(folder: Path = DENSE) -> Loaded:
    return load_quietly(picture_spec(folder))


def picture_engine(folder: Path = DENSE, **changes: Any) -> TextEngine:
    """Its clock counts calls, so that requests share forwards as they do on any machine."""
    disk, ticks = changes.pop("prefix_disk", None), itertools.count()
    stage_spec = picture_spec(folder, **changes)
    return engine_of(loaded(folder), stage_spec, prefix_disk=disk, clock=lambda: float(next(ticks)))


def picture_pipeline(bounds: Sequence[int], folder: Path = DENSE, **changes: Any) -> Pipeline:
    fields = {"prefill_chunk": 256, "context_length": 1024} | changes
    specs = stage_specs(folder, bounds, **fields)
    ticks = itertools.count()
    options, clock = EngineOptions.of(specs[0]), lambda: float(next(ticks))
    return Pipeline([load_quietly(each) for each in specs], options, clock=clock)


@functools.cache
def prepared(file: bytes, folder: Path = DENSE) -> PreparedImage:
    codec = loaded(folder).codec
    assert codec is not None
    return codec.pictures.prepare(file)


def picture_request(
    it: Conversation, k: int = 0, folder: Path = DENSE, **changes: Any
) -> Parameters:
    model = loaded(folder)
    assert model.codec is not None and model.tower is not None
    images = [prepared(file, folder) for file in it.files]
    ids = model.codec.encode_chat(it.messages)
    prompt = with_image_rows(ids, model.tower.vision.placeholder, images)
    fields: dict[str, Any] = {"images": images, "max_tokens": len(it.greedy_ids), "top_logprobs": 0}
    return request(prompt, k, **(fields | changes))


def require_right(got: Answer, it: Conversation) -> None:
    """Ids and log-probabilities are those of the oracle."""
    assert list(got.ids) == it.greedy_ids
    given = [entry.logprob for round_ in got.rounds for entry in round_.logprobs]
    assert max(abs(a - b) for a, b in zip(given, it.logprobs, strict=True)) < 2e-4
