"""Engines of models with random weights in published shapes, for ids without text."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from exo_node.shard.model import loader_import  # before MLX, so that products of our own may be

# isort: split
import mlx.core as mx
from mlx import nn
from shapes import SHAPES, ShapeModel

from exo_node.mtp.types import FinishReason
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.prefixes.disk import PrefixDisk
from exo_node.shard.kernels.chunked_delta import use_chunks
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.stage_model import StageModel

LOADER = loader_import.__name__


class NoText:
    """A codec without a tokenizer: the interface that an engine needs, for meaningless ids."""

    special_tokens: tuple[int, ...] = ()
    token_bytes = prompt_bytes = answer_format = grammars = call_grammar = None
    has_call_grammar = False
    stopped_by = None
    ends: tuple[int, ...] = ()

    def __init__(self, turn_ends: frozenset[int] = frozenset()) -> None:
        """`turn_ends` end turns of prompts, but no answer."""
        self.turn_ends = turn_ends

    def stream(self, *_: object, **__: object) -> "NoText":
        return NoText()

    def push(self, token: int) -> FinishReason | None:
        del token
        return None

    def take(self) -> str:
        return ""

    finish = take


def shape_engine(
    shape: str,
    options: EngineOptions,
    layers: float,
    *,
    codec: NoText | None = None,
    make_disk: Callable[[StageModel], PrefixDisk] | None = None,
) -> TextEngine:
    """An engine of a shape; see `load_shape`. `make_disk`: its prefixes on disk."""
    loaded = load_shape(shape, options, layers, codec=codec)
    return TextEngine(loaded, options, prefix_disk=make_disk(loaded.model) if make_disk else None)


def load_shape(
    shape: str, options: EngineOptions, layers: float, *, codec: NoText | None = None
) -> Loaded:
    """A model with its head, `NAME:BITS` of bench/shapes.py.

    `layers` scales the layers against the embedding: the less, the more does the last token alone
    decide the next one. The head drafts from that token alone.
    """
    name, _, bits = shape.partition(":")
    subject = ShapeModel(name, int(bits or 16), 5, 64)
    hidden, vocabulary = SHAPES[name]["hidden_size"], SHAPES[name]["vocab_size"]
    table = subject.model.language_model.model.embed_tokens
    _scale(table, hidden**0.5)  # to 1 in the mean square
    _weaken(subject.model.layers, layers)
    _weaken([subject.head.layer], 0.0)
    selection = mx.concatenate([mx.eye(hidden), mx.zeros((hidden, hidden))], axis=1)
    subject.head.eh_proj.weight = selection.astype(subject.head.eh_proj.weight.dtype)
    kernels = subject.choose("auto")
    _ = use_chunks([subject.model])
    stage = StageModel(subject.model, 0, len(subject.model.layers))
    rows_and_ids = options.prefill_chunk, options.context_length, vocabulary
    limits = StageLimits(name, 0, options.dtype, hidden, *rows_and_ids)
    text = cast(Any, codec or NoText())
    return Loaded(stage, limits, text, subject.head, kernels=kernels)


def _weaken(layers: Sequence[nn.Module], factor: float) -> None:
    """Scales each layer's output before it is added to the layer's input."""
    for layer in layers:
        for path, module in layer.named_modules():
            if path.endswith(("o_proj", "out_proj", "down_proj")):
                _scale(module, factor)
        mx.eval(layer.parameters())


def _scale(module: nn.Module, factor: float) -> None:
    for weight in ("scales", "biases") if hasattr(module, "bits") else ("weight",):
        module[weight] = module[weight] * factor
