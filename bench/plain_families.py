"""Plain decoding of models that draft nothing, against mlx-lm's own loop on the same weights.

    python bench/plain_families.py [--repeats 15] [--models gpt_oss,gemma3_text,nemotron_h]

Layers of published kinds (sliding windows, experts, recurrent layers) at small widths with random
weights. Every repeat runs both arms, in turns; figures are medians of the ratio within a repeat.
Both arms must give the same ids; mlx-lm's gives no text.
"""

import argparse
import importlib
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from exo_node.mtp.types import Sampling
from exo_node.shard.engine.events import Delta
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.request import EngineRequest
from exo_node.shard.engine.text_engine import TextEngine
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.text.codec import TextCodec

DEMO = Path(str(files("exo_node.shard"))) / "models" / "demo"
VOCABULARY = 4096
PROMPT = [(7 * i + 3) % VOCABULARY for i in range(64)]
TOKENS = 48

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {
        "num_hidden_layers": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "rope_scaling": {"rope_type": "default"},
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 32, "sliding_window_pattern": 3},
    "nemotron_h": {
        "hybrid_override_pattern": list("M-M*-M"),
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
    },
}


def main() -> None:
    options = _options()
    where = f"{platform.machine()} {platform.system()}, {mx.default_device()}"
    print(f"{where}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}")
    print(f"{TOKENS} tokens behind {len(PROMPT)}, {options.repeats} repeats, medians\n")
    print("| model | caches | mlx-lm, tok/s | ours, tok/s | ours / mlx-lm (least to most) |")
    print("|---|---|---|---|---|")
    for name in options.models:
        _bench(name, options.repeats)


def _bench(name: str, repeats: int) -> None:
    model = _model(name)
    stage = StageModel(model, 0, len(model.layers))
    engine = _engine(stage)
    kinds = sorted({type(cache).__name__ for cache in stage.make_caches()})
    if _theirs(model)[1] != _ours(engine)[1]:  # which warms both up
        raise SystemExit(f"{name}: the two loops gave different ids")
    pairs: list[tuple[float, float]] = []
    for repeat in range(repeats):
        if repeat % 2:
            ours, theirs = _ours(engine)[0], _theirs(model)[0]
        else:
            theirs, ours = _theirs(model)[0], _ours(engine)[0]
        pairs.append((theirs, ours))
    ratios = [ours / theirs for theirs, ours in pairs]
    rates = [f"{statistics.median(column):.1f}" for column in zip(*pairs, strict=True)]
    spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
    print(f"| {name} | {', '.join(kinds)} | {rates[0]} | {rates[1]} | {spread} |", flush=True)


def _model(name: str) -> Any:
    mx.random.seed(0)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    args = module.ModelArgs.from_dict({**_COMMON, **SHAPES[name], "model_type": name})
    model = module.Model(args)
    model.eval()
    mx.eval(model.parameters())
    return model


def _engine(stage: StageModel) -> TextEngine:
    options = EngineOptions("float32", 4096)
    limits = StageLimits(
        "", 0, "float32", _COMMON["hidden_size"], options.prefill_chunk, 4096, VOCABULARY
    )
    return TextEngine(Loaded(stage, limits, TextCodec.load(DEMO)), options)


def _theirs(model: Any) -> tuple[float, Sequence[int]]:
    """Tokens a second after the first, and the ids."""
    ids: list[int] = []
    first = last = 0.0
    for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=TOKENS):
        last = time.perf_counter()
        first = first or last
        ids.append(int(token))
    return (len(ids) - 1) / (last - first), ids


def _ours(engine: TextEngine) -> tuple[float, Sequence[int]]:
    request = EngineRequest(
        *("bench", 1, PROMPT, Sampling(), TOKENS, (), 0, "the benchmark"), ignore_end=True
    )
    ids: list[int] = []
    first = last = 0.0
    for event in engine.generate(request):
        if isinstance(event, Delta):
            last = time.perf_counter()
            first = first or last
            ids += event.round.tokens
    return (len(ids) - 1) / (last - first), ids


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    _ = parser.add_argument("--repeats", type=int, default=15)
    _ = parser.add_argument("--models", type=lambda text: text.split(","), default=list(SHAPES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
