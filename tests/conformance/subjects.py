"""The models of the corpus: tiny random checkpoints, and the demo, loaded whole or in stages."""

import functools
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from cases import CHUNK, MOST, Dtype, Model
from engines import DEMO, load_quietly, spec
from models import Family, make_checkpoint
from plain_gated_delta import give_kernels
from shims import by_rows, perturb
from small import LAYERS, fit_head, small_checkpoint

from exo_node.proto import peer_pb2 as pb
from exo_node.shard.model.load import Loaded

UNEVENNESS: Final = 0.4
CONTEXT: Final = 0.8
"""The size of what layers add, so that stale rows show; a third of the drafts of 3 still stand."""
_FOLDERS = tempfile.TemporaryDirectory(prefix="exo-conformance-")
_LAYERS: Final[Mapping[Model, int]] = MappingProxyType(
    {"full": 3, "window": 3, "latent": 3, "demo": 16}
)
_MADE: Final[Mapping[Model, tuple[Family, Mapping[str, Any]]]] = MappingProxyType(
    {
        "full": ("glm4_moe", {"first_k_dense_replace": 99}),
        "latent": ("deepseek_v3", {"first_k_dense_replace": 99}),
        "experts": ("qwen3_next", {}),
        "window": (
            "llama",
            {
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            },
        ),
    }
)


def layers_of(model: Model) -> int:
    """The number of the model's layers."""
    return _LAYERS.get(model, LAYERS)


def bounds_of(model: Model, stages: int) -> tuple[int, ...]:
    """The first layer of each stage, and the number of layers."""
    layers = layers_of(model)
    return tuple(round(layers * stage / stages) for stage in range(stages + 1))


@functools.cache
def folder_of(model: Model) -> Path:
    """The model's checkpoint; it is made once a process and removed with it."""
    if model == "demo":
        return DEMO
    if model not in _MADE:
        return small_checkpoint(hidden=128 if model == "quantised" else 64, context=CONTEXT)
    family, changes = _MADE[model]
    folder = Path(_FOLDERS.name) / model
    _ = make_checkpoint(
        folder,
        family,
        dtype="float32",
        layers=layers_of(model),
        vocab=4096,
        raw=False,
        seed=7,
        changes=changes,
    )
    fit_head(folder, CONTEXT)
    return folder


def spec_of(model: Model, dtype: Dtype, stages: int = 1, stage: int = 0) -> pb.StageSpec:
    """The specification of one stage."""
    bounds = bounds_of(model, stages)
    stage_spec = spec(
        folder_of(model),
        bounds[stage],
        bounds[stage + 1],
        stage,
        num_stages=stages,
        num_layers=bounds[-1],
        dtype=dtype,
        prefill_chunk=CHUNK,
        native_mtp=stages == 1 and model != "window",
        max_draft_tokens=MOST,
    )
    if model == "quantised":
        stage_spec.kv_bits, stage_spec.kv_group_size = 8, 32
    return stage_spec


@functools.cache
def loaded(model: Model, dtype: Dtype, stages: int = 1) -> Sequence[Loaded]:
    """The model's stages; requests leave nothing in them."""
    parts = [load_quietly(spec_of(model, dtype, stages, stage)) for stage in range(stages)]
    if model == "kernels":
        assert give_kernels(parts[0].model.model) == LAYERS - 1
    if model == "uneven":
        assert all(perturb(part.model.model, by_rows, size=UNEVENNESS) > 4 for part in parts)
    if stages == 1 and model != "window":
        assert parts[0].head is not None, parts[0].head_state
    return parts


def room_of(parts: Sequence[Loaded]) -> list[int]:
    """Bytes for prefixes on each stage."""
    return list(itertools.repeat(64 << 20, len(parts)))
