"""Prompts that begin alike, and answers to them by engines that read nothing before."""

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines import Answer, answer, engine_of, load_quietly, request
from models import DEMO
from pipelines import Pipeline
from shims import Key, by_rows, perturb
from small import small_spec
from zoo import VOCABULARY, tiny_config
from zoo_runs import small

from exo_node.mtp.types import Sampling
from exo_node.placement.config import hidden_size
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.prefixes.disk import PrefixDisk
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.text.codec import TextCodec

CHUNK = 160
ROOM = 256 << 20
END = 4095
"""The tokenizer's end token."""
TOKENS = 6
GREEDY = Sampling()


@functools.cache
def hybrid(number: int = 0) -> Loaded:
    """`number`: of one of several with the same weights, as two threads cannot share one."""
    del number
    loaded = load_quietly(small_spec(native_mtp=True))
    model: Any = loaded.model.model
    assert perturb(model, by_rows, size=0.1) > 4
    return loaded


def engine(loaded: Loaded | None = None, room: int = ROOM, **changes: Any) -> TextEngine:
    stage_spec = small_spec(
        native_mtp=True, prefill_chunk=CHUNK, **({"prefix_cache_bytes": room} | changes)
    )
    return engine_of(loaded or hybrid(), stage_spec)


@functools.cache
def _cold(prompt: tuple[int, ...], k: int, tokens: int, sampling: Sampling) -> tuple[object, ...]:
    return comparable(answer(engine(), request(prompt, k, tokens, sampling=sampling)))


def cold(
    prompt: Sequence[int], k: int, tokens: int = TOKENS, sampling: Sampling = GREEDY
) -> tuple[object, ...]:
    """The answer of an engine that never read anything before."""
    return _cold(tuple(prompt), k, tokens, sampling)


def turn(rows: int, seed: int) -> list[int]:
    """Rows of a turn, the last of which ends it."""
    return [*words(rows - 1, seed), END]


def words(rows: int, seed: int) -> list[int]:
    """Rows of a turn that does not end."""
    draw = random.Random(seed)
    return [draw.randrange(3, 4000) for _ in range(rows)]


def comparable(got: Answer) -> tuple[object, ...]:
    drafts = [(r.drafted, r.accepted, r.forward) for r in got.rounds]
    return got.ids, drafts


SYSTEM = turn(300, 1)
FIRST = [*SYSTEM, *words(40, 2), 7, 8]
SECOND = [*SYSTEM, *words(40, 2), 7, 8, *words(30, 3), *words(150, 4), 7, 8]
OTHER = [*SYSTEM, *words(90, 5), 7, 8]
ALIEN = [*turn(300, 6), *SECOND[300:]]


KINDS = ("llama", "gemma3_text", "gpt_oss", "nemotron_h", "deepseek_v3", "qwen3_next")
"""Full attention, windows whose rows are written over, recurrent states without tapes, latents."""


SHORT = 64
"""Rows of a chunk: more than a window has."""


def of_class(kind: str, room: int, folder: Path | None = None) -> TextEngine:
    """`folder`: of prefixes on disk; None: there are none."""
    model: Any = small(tiny_config(kind))
    assert perturb(model, by_rows, size=0.1) > 4
    stage = StageModel(model, 0, len(model.layers))
    options = EngineOptions("float32", 4096, SHORT, prefix_cache_bytes=room)
    limits = _limits(tiny_config(kind), 0)
    codec = TextCodec.load(DEMO)
    loaded = Loaded(stage, limits, codec, require_splittable=lambda _first, _end: None)
    return TextEngine(loaded, options, prefix_disk=_disk(folder, kind, stage))


def _disk(folder: Path | None, key: str, stage: StageModel) -> PrefixDisk | None:
    return None if folder is None else PrefixDisk(folder, key, ROOM, stage.make_caches)


def two_stages(
    kind: str, room: int, key: Key = by_rows, folders: tuple[Path, Path] | None = None
) -> Pipeline:
    """The same with half of the layers on another stage; `room` of each. `key`: see `perturb`.
    `folders`: of each stage's prefixes on disk."""
    config = tiny_config(kind)
    model: Any = small(config)
    assert perturb(model, key, size=0.1) > 4
    layers = len(model.layers)
    stages = StageModel(model, 0, layers // 2), StageModel(model, layers // 2, layers)
    codecs = TextCodec.load(DEMO), None
    parts = [Loaded(stages[i], _limits(config, i), codecs[i]) for i in (0, 1)]
    disks = [
        _disk(folder, kind, stage)
        for folder, stage in zip(folders or (None, None), stages, strict=True)
    ]
    options = EngineOptions("float32", 4096, SHORT, prefix_cache_bytes=room, num_stages=2)
    return Pipeline(parts, options, disks=disks)


def _limits(config: dict[str, Any], stage: int) -> StageLimits:
    return StageLimits("p", stage, "float32", hidden_size(config), SHORT, 4096, VOCABULARY)


IDS = [[id_ % VOCABULARY for id_ in prompt] for prompt in (FIRST, SECOND, OTHER)]
"""FIRST, SECOND and OTHER for a small vocabulary. Their turns have no end: SECOND continues FIRST,
and OTHER leaves both where there is no file."""


def plain(prompt: Sequence[int], **changes: Any) -> Any:
    return request(prompt, 0, TOKENS, top_logprobs=0, **changes)


def probabilities(got: Answer) -> tuple[object, ...]:
    """The answer with the log-probabilities of its tokens, which show states that differ."""
    return (*comparable(got), [round_.logprobs for round_ in got.rounds])
