"""The files of the model beside this one: its sizes, tokenizer, template and weights."""

# pyright: basic, reportMissingImports=false

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
START, END, VISION_START, VISION_END, IMAGE, VIDEO = range(256, 262)
HIDDEN = 64
PATCH, MERGE = 8, 2
TEXT = {
    "vocab_size": 264,
    "hidden_size": HIDDEN,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "partial_rotary_factor": 0.5,
    "eos_token_id": END,
}
VISION = {
    "depth": 4,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "out_hidden_size": HIDDEN,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": True,
}
PROCESSOR = {
    "size": {"shortest_edge": 6400, "longest_edge": 6400},
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
TEMPLATE = """{%- for m in messages if m.role in ['user', 'assistant'] -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content[-50:] }}{% else %}{% for part in m.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% else %}{{ part.text[-50:] }}{% endif %}{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


def tokenizer_of_bytes() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write(folder: Path, lm: Any, mtp: Any, tokenizer: Tokenizer) -> None:
    """The files of a publisher's repository."""
    folder.mkdir(exist_ok=True, parents=True)
    tensors = {f"mtp.{name}": value for name, value in mtp.state_dict().items()}
    tensors |= {k: v for k, v in lm.state_dict().items() if k != "lm_head.weight"}
    tensors = {
        name: value.to(torch.float32 if name.endswith("A_log") else torch.bfloat16).contiguous()
        for name, value in tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    text = TEXT | {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "dtype": "bfloat16"}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        **IDS,
        "text_config": text,
        "vision_config": VISION | {"model_type": "qwen3_5"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    for name, value in (
        ("config.json", config),
        ("preprocessor_config.json", PROCESSOR),
        ("tokenizer_config.json", settings),
    ):
        _ = (folder / name).write_text(json.dumps(value, indent=1) + "\n")
