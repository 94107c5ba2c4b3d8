"""Tiny random models in memory, their weights a function of the seed alone."""

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3_5, qwen3_5_moe

from exo_node.mtp.families.qwen35 import Qwen35Family
from exo_node.mtp.families.table import prepare

VOCABULARY = 64
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def tiny_qwen(
    dtype: str = "float32", bits: int = 0, *, moe: bool = False, seed: int = 0, **changes: Any
) -> qwen3_5.Model:
    """Four layers, the last with full attention; quantised unless `bits` is 0."""
    mx.random.seed(seed)
    text: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "tie_word_embeddings": False,
    }
    if moe:
        text |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        }
    module: Any = qwen3_5_moe if moe else qwen3_5
    args = module.ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": text | changes})
    model: qwen3_5.Model = module.Model(args)
    _ = model.set_dtype(DTYPES[dtype])
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    _ = model.eval()
    mx.eval(model.parameters())
    return model


def taped_qwen(dtype: str = "float32", bits: int = 0, **changes: Any) -> qwen3_5.Model:
    """The same weights as `tiny_qwen`, its recurrent layers able to roll back."""
    model = tiny_qwen(dtype, bits, **changes)
    prepare(model)
    return model


def family(dtype: str = "float32", bits: int = 0, **changes: Any) -> Qwen35Family:
    return Qwen35Family(taped_qwen(dtype, bits, **changes))


def row_of_ids(rows: int, seed: int = 3) -> mx.array:
    """(rows,) arbitrary ids."""
    return mx.random.randint(0, VOCABULARY, (rows,), key=mx.random.key(seed))
