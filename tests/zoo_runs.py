"""A tiny model of one class, decoded by mlx-lm, on one node and as two stages in this process."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from pipelines import Link
from zoo import VOCABULARY

from exo_node.mtp.families.table import family_of
from exo_node.mtp.types import Round
from exo_node.placement.config import hidden_size
from exo_node.shard.engine.engine import Engine
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.pipeline_executor import PipelineExecutor
from exo_node.shard.engine.prefixes.store import PrefixStore
from exo_node.shard.engine.scheduler import Scheduler
from exo_node.shard.engine.stage import StageWorker
from exo_node.shard.model.split_check import small_model
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.stage_model import StageModel, target_of
from exo_node.shard.tools.bare_engine import bare_engine, bare_request, ids_of, rounds_of

PROMPT: Final = [(37 * i + 11) % (VOCABULARY - 1) + 1 for i in range(21)]
"""Longer than a window, and no multiple of a chunk."""
TOKENS: Final = 5
CHUNK: Final = 8


def small(config: Mapping[str, Any], *, stock: bool = False) -> nn.Module:
    """Weights are a function of the config; `stock`: as mlx-lm has it, nothing of ours in it."""
    mx.random.seed(0)  # biases begin as random numbers
    model = small_model(config, stock=stock)
    # Lazy until here: of one config the numbers, which cost most, are drawn once.
    key = json.dumps(config, sort_keys=True)
    if key in _drawn:
        _ = model.update(tree_unflatten([(name, mx.array(v)) for name, v in _drawn[key]]))
    mx.eval(model.parameters())
    if key not in _drawn:
        _drawn.clear()
        _drawn[key] = [(name, mx.array(v)) for name, v in _flat(model)]
    return model


_drawn: dict[str, list[tuple[str, mx.array]]] = {}
"""The weights of the last config."""


def _flat(model: nn.Module) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))


def mlx_lms(model: nn.Module, tokens: int = TOKENS) -> list[int]:
    """The ids of mlx-lm's own `generate_step`."""
    steps = generate_step(mx.array(PROMPT), model, max_tokens=tokens)
    return [int(cast(Any, token)) for token, _ in steps]


def on_one_node(
    model: nn.Module, chunk: int = CHUNK, tokens: int = TOKENS, prompt: Sequence[int] = PROMPT
) -> list[int]:
    """The ids of one request."""
    [ids] = together_on_one_node(model, [prompt], chunk, tokens)
    return ids


def together_on_one_node(
    model: nn.Module, prompts: Sequence[Sequence[int]], chunk: int, tokens: int
) -> list[list[int]]:
    """The ids of requests that share forwards."""
    family = family_of(model)
    stage = StageModel(model, 0, len(cast(Any, model).layers))
    target = target_of(stage, family)
    requests = [bare_request(each, tokens, chunk) for each in prompts]
    rounds = rounds_of(bare_engine(target, stage.make_caches), requests)
    return [list(ids_of(each)) for each in rounds]


def as_two_stages(
    model: nn.Module,
    config: Mapping[str, Any],
    at: int,
    chunk: int = CHUNK,
    tokens: int = TOKENS,
    prompt: Sequence[int] = PROMPT,
) -> list[int]:
    """The ids of a request; see `rounds_of_two_stages`."""
    return list(ids_of(rounds_of_two_stages(model, config, at, chunk, tokens, prompt)))


def rounds_of_two_stages(
    model: nn.Module,
    config: Mapping[str, Any],
    at: int,
    chunk: int,
    tokens: int,
    prompt: Sequence[int],
    dtype: str = "float32",
    **fields: Any,
) -> tuple[Round, ...]:
    """The answer to one request. Frames are cut, checked and joined as between two machines."""
    layers = len(cast(Any, model).layers)
    first, second = StageModel(model, 0, at), StageModel(model, at, layers)
    rows, vocabulary = max(4096, 2 * len(prompt)), max(prompt) + 1
    expected = StageLimits(
        "p", 1, dtype, hidden_size(config), chunk, rows, max(VOCABULARY, vocabulary)
    )
    worker = StageWorker(second, expected, time.monotonic)
    link = Link([worker], [expected])
    options = EngineOptions(dtype, rows, chunk, num_stages=2)
    prefixes = PrefixStore(0, first.make_caches)
    executor = PipelineExecutor(first, link, options, prefixes, frozenset(), lambda: 0.0)
    engine = Engine(executor, Scheduler(rows, chunk, stages=2), lambda: 0.0)
    (rounds,) = rounds_of(engine, [bare_request(prompt, tokens, chunk, name="r", **fields)])
    return rounds
