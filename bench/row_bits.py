"""Which blocks of rows have the bits of single steps: published sizes of heads and layers, random
weights, few layers.

    python bench/row_bits.py [MODEL ...] [--bits 4] [--layers 3]

Prints for each model how its attention and products are computed, the numbers of rows of which
blocks equal single steps after 24, 1,100 and 4,200 rows, and whether batches do. MLX's attention
by cuDNN is off, as in runners.
"""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false

import argparse
import importlib
import sys
import time
from typing import Any, Final

import mlx.core as mx
from mlx import nn

from exo_node.mtp.batch_probe import batch_identity
from exo_node.mtp.pieces import result_of
from exo_node.mtp.probe import Subject, exact_widths
from exo_node.mtp.targets import WholeTarget
from exo_node.shard.kernels.install import install
from exo_node.shard.model.stage_model import StageModel

VOCABULARY: Final = 8192
WIDTHS: Final = (2, 3, 4, 5, 8, 16)
CONTEXT: Final = 9000


def _sizes(heads: int, key_heads: int, size: int, hidden: int, mlp: int) -> dict[str, Any]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": size,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }


MODELS: Final[dict[str, dict[str, Any]]] = {
    "gemma3-4b": {
        "model_type": "gemma3_text",
        **_sizes(8, 4, 256, 2560, 10240),
        "sliding_window": 1024,
        "sliding_window_pattern": 3,
    },
    "gemma3-27b": {
        "model_type": "gemma3_text",
        **_sizes(32, 16, 128, 5376, 21504),
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
        "sliding_window_pattern": 3,
    },
    "llama-8b": {"model_type": "llama", **_sizes(32, 8, 128, 4096, 14336)},
    "qwen3-8b": {"model_type": "qwen3", **_sizes(32, 8, 128, 4096, 12288)},
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        **_sizes(64, 8, 64, 2880, 2880),
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
}


def built(config: dict[str, Any], layers: int, bits: int, dtype: mx.Dtype) -> Any:
    """A model of random weights."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    fields = {**config, "num_hidden_layers": layers}
    if config["model_type"] == "gpt_oss":
        fields["layer_types"] = ["sliding_attention", "full_attention"] * layers
        fields["layer_types"] = fields["layer_types"][:layers]
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(fields))
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    mx.eval(model.parameters())
    return model


def measure(name: str, layers: int, bits: int, dtype: mx.Dtype) -> bool:
    """Whether blocks of every width, and batches, have the bits of single steps."""
    started_at, model = time.monotonic(), built(MODELS[name], layers, bits, dtype)
    stage = StageModel(model, 0, layers)

    def two_rows() -> mx.array:
        return model(mx.zeros((1, 2), mx.int32), cache=stage.make_caches())

    modules = stage.own_modules(outer=True)
    choices = install(model, [model], "auto", lambda _: None, modules, dtype, two_rows=two_rows)
    print(f"\n{name}, {layers} layers, {bits or dtype} bits: installed", flush=True)
    for choice in choices:
        print(f"  {choice}")
    subject = Subject(WholeTarget(model), stage.make_caches, VOCABULARY, CONTEXT, time.monotonic)
    exact = result_of(exact_widths(subject, WIDTHS))
    batches = result_of(batch_identity(subject, 3))
    seconds = time.monotonic() - started_at
    print(f"  exact widths {exact} of {list(WIDTHS)}; batches {batches}; {seconds:.0f} s")
    return exact == list(WIDTHS) and batches == "bitwise"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--bits", type=int, default=0, help="0: bfloat16")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    arguments = parser.parse_args()
    dtype: mx.Dtype = getattr(mx, arguments.dtype)
    each = [measure(name, arguments.layers, arguments.bits, dtype) for name in arguments.models]
    print("\nAll exact." if all(each) else "\nNot all exact.")
    return 0 if all(each) else 1


if __name__ == "__main__":
    sys.exit(main())
