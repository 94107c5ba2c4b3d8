"""Families with their oracle's checkpoints and numbers, as a runner holds them."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from models import Family as Name

from exo_node.mtp.families.family import Family, draft_logits
from exo_node.mtp.families.head import HeadSource, HiddenKind
from exo_node.mtp.families.table import family_of
from exo_node.mtp.families.weights import load_head
from exo_node.mtp.targets import FamilyTarget
from exo_node.mtp.types import Round
from exo_node.shard.engine.drafter import DraftModel
from exo_node.shard.model.open_model import open_model, read_layers
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.tools.bare_engine import bare_engine, bare_request, rounds_of

ORACLE = Path(__file__).parent / "oracle"
FED: dict[str, tuple[HiddenKind, ...]] = {
    "qwen3_5": ("post_norm",),
    "qwen3_5_moe": ("post_norm",),
    "qwen3_next": ("post_norm",),
    "deepseek_v3": ("post_norm", "pre_norm"),
    "glm4_moe": ("post_norm", "pre_norm"),
}
CASES = [(name, fed) for name, kinds in FED.items() for fed in kinds]
NEXTN: tuple[Name, ...] = ("deepseek_v3", "glm4_moe")
ATOL = 5e-5
"""The tolerance of logits up to 30 in float32, summed in another order than by transformers."""

Tensors = dict[str, mx.array]


@dataclass(frozen=True)
class Opened:
    """A checkpoint as a runner holds it, and its expected numbers."""

    stage: StageModel
    family: Family
    head: Any
    prompts: Sequence[list[int]]
    expected: Sequence[Mapping[str, Any]]


def head_tensors(folder: Path) -> Tensors:
    """The head's tensors by what stands after their prefix, whichever of the two it has."""
    weights = cast(Tensors, mx.load(str(folder / "model.safetensors")))
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    nextn = f"model.layers.{config.get('num_hidden_layers')}."
    prefixes = ("mtp.", "language_model.mtp.", nextn)
    return {k.removeprefix(p): v for k, v in weights.items() for p in prefixes if k.startswith(p)}


def stage_of(folder: Path, layers: int, dtype: mx.Dtype = mx.float32) -> StageModel:
    model = open_model(folder)
    _ = read_layers(model, 0, layers, dtype, outer=True, progress=lambda _part, _total: None)
    return StageModel(model, 0, layers)


def made_family(stage: StageModel, fed: HiddenKind) -> Family:
    family = family_of(stage.model, fed)
    assert family is not None
    return family


@functools.cache
def opened(name: str, fed: HiddenKind) -> Opened:
    folder = ORACLE / name
    return with_head(folder, name, fed, HeadSource(head_tensors(folder), True))


def with_head(folder: Path, name: str, fed: HiddenKind, source: HeadSource) -> Opened:
    """A checkpoint of the oracle's model of that name, wherever its head comes from."""
    oracle: dict[str, Any] = json.loads((ORACLE / name / "oracle.json").read_text())
    layers: int = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    stage = stage_of(folder, layers)
    family = made_family(stage, fed)
    head = load_head(family, source, mx.float32)
    return Opened(stage, family, head, oracle["prompts"], oracle[fed])


def row(ids: Sequence[int]) -> mx.array:
    return mx.array([list(ids)])


def generated(it: Opened, prompt: list[int], k: int, chunk: int) -> list[Round]:
    model = DraftModel(it.head, it.family.embed, draft_logits(it.family, it.head))
    engine = bare_engine(FamilyTarget(it.family), it.stage.make_caches, model)
    tokens = len(it.expected[0]["greedy_ids"])
    (rounds,) = rounds_of(engine, [bare_request(prompt, tokens, chunk, k)])
    return list(rounds)
