"""A tiny random model that tells a token in a sixth of the demo's time, and whose head fits it.

For claims that hold whatever the weights are. The embedding of the last token decides most of the
next one: a head that sees it alone drafts right about every second time.
"""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from engines import CHUNK, STORY, Answer, answer, engine_of, load_quietly, request, spec
from models import make_checkpoint

from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.text_engine import TextEngine

PROMPT: list[int] = STORY["prompt_ids"]
LAYERS = 4
"""Three that are recurrent, and one with attention."""
CONTEXT = 0.5
"""Scales what layers add to an embedding. Near 0 answers go in circles; at 2 no draft fits."""


def small_spec(**changes: Any) -> pb.StageSpec:
    """Layers of the whole model."""
    return spec(small_checkpoint(), 0, LAYERS, num_layers=LAYERS, **changes)


def small_engine(**changes: Any) -> TextEngine:
    """Whole, with the head."""
    stage_spec = small_spec(**({"native_mtp": True} | changes))
    return engine_of(load_quietly(stage_spec), stage_spec)


@functools.cache
def _plain(chunk: int) -> TextEngine:
    return small_engine(native_mtp=False, prefill_chunk=chunk)


def expected(prompt: Sequence[int], tokens: int, *, chunk: int = CHUNK) -> Answer:
    """The answer of one engine in this process without drafts: the oracle of processes and stages.

    `chunk`: rows of a prompt's forward.
    """
    return answer(_plain(chunk), request(prompt, 0, tokens))


@functools.cache
def small_checkpoint(layers: int = LAYERS, hidden: int = 64, context: float = CONTEXT) -> Path:
    """Once a process, with the demo's tokenizer; the folder goes with the process."""
    folder = make_checkpoint(
        Path(_KEPT.name) / f"small-{layers}-{hidden}-{context:g}",
        "qwen3_5",
        dtype="float32",
        layers=layers,
        hidden=hidden,
        vocab=4096,
        raw=False,
        seed=7,
    )
    fit_head(folder, context)
    return folder


def fit_head(folder: Path, context: float = CONTEXT) -> None:
    """Rewrites a checkpoint in mlx-lm's layout so that an embedding decides most of what follows.

    A head then drafts right about every second time.
    """
    file = folder / "model.safetensors"
    stored = cast("dict[str, mx.array]", mx.load(str(file)))
    weights = {name: _agreeing(name, value, context) for name, value in stored.items()}
    norm = next(value for name, value in weights.items() if name.endswith(_LAST_NORMS))
    last = "mtp.norm.weight", "shared_head.norm.weight", "final_layernorm.weight"
    heads = [name for name in weights if name.endswith(last)]
    weights |= dict.fromkeys(heads, norm)
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, {"format": "mlx"})


_LAST_NORMS = "model.norm.weight", "backbone.norm_f.weight"
_EMBEDDING_NORMS = "pre_fc_norm_embedding.", "enorm.", "token_layernorm.", "mtp_emb_norm."


def _agreeing(name: str, value: mx.array, context: float) -> mx.array:
    if name.endswith(("mtp.fc.weight", "eh_proj.weight", "mtp_linear_proj.0.weight")):
        # The embedding alone, as it is.
        rows = value.shape[0]
        return mx.concatenate([mx.eye(rows), mx.zeros((rows, rows))], axis=1)
    if name.endswith("input_proj.weight"):  # the same, where it stands after the hidden states
        rows = value.shape[0]
        return mx.concatenate([mx.zeros((rows, rows)), mx.eye(rows)], axis=1)
    if any(each in name for each in _EMBEDDING_NORMS):
        return mx.ones_like(value)
    if "embed_tokens" in name or "backbone.embeddings" in name:
        return value * 8  # of 1 in the mean square, which is what the head's norm makes of it
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        return value * context
    return mx.array(value)


_KEPT = tempfile.TemporaryDirectory(prefix="exo-small-")
