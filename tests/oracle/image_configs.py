"""The texts of tiny checkpoints as the publishers of Qwen, Gemma 3 and Mistral 3 have them."""

# pyright: basic, reportMissingImports=false

from typing import Any

from generate import COMMON, QWEN

VOCABULARY = 264
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
START, END, VISION_START, VISION_END, IMAGE, VIDEO = range(256, 262)
ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
TEXT = (
    COMMON
    | QWEN
    | {
        "vocab_size": VOCABULARY,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": ROPE,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": END,
        "max_position_embeddings": 4096,
    }
)
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}
PROCESSOR = {
    "size": {"shortest_edge": 4096, "longest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.45, 0.4],
    "image_std": [0.5, 0.4, 0.3],
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
TEMPLATE = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}\
{% endif %}{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
DEEP = COMMON | {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": END,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "rope_parameters": {k: v for k, v in ROPE.items() if k != "partial_rotary_factor"},
}
DEEP_EXPERTS = DEEP | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    # Not half the hidden size: experts are published with their axes the other way round, which
    # squares would hide.
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GEMMA_SPECIAL = [
    *("<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
]
GEMMA_TEMPLATE = """{{ bos_token }}{%- for m in messages -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content -%}
{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text | trim }}\
{% endif %}{%- endfor %}{% endif %}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif -%}"""
GEMMA_ROWS = 16
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "boi_token_index": 261,
    "eoi_token_index": 262,
    "image_token_index": 263,
    "mm_tokens_per_image": GEMMA_ROWS,
    "vocab_size": VOCABULARY,
    "eos_token_id": [260],
    # Published ones are tied: each token would then be followed by itself. The window has fewer
    # rows than an image.
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "gemma3_text",
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 112,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
GEMMA_PROCESSOR = {
    "do_pan_and_scan": None,
    "size": {"height": 112, "width": 112},
    "resample": 2,
    "image_seq_length": GEMMA_ROWS,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "Gemma3ImageProcessor",
}

MISTRAL_SPECIAL = ["<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
MISTRAL_IMAGE = 260
MISTRAL_TEMPLATE = """{{ bos_token }}{%- for m in messages -%}
{%- if m.role == 'assistant' %}{{ m.content if m.content is string else m.content[0].text }}</s>
{%- else %}[INST]{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{% if part.type == 'image' %}[IMG]{% else %}{{ part.text }}{% endif %}{%- endfor %}{% endif %}\
[/INST]
{%- endif %}{%- endfor -%}"""
MISTRAL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": MISTRAL_IMAGE,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
    "tie_word_embeddings": False,
    "eos_token_id": 257,
    "text_config": {
        "model_type": "mistral",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "sliding_window": None,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 32,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 14,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    },
}
MISTRAL_PROCESSOR = {
    "size": {"longest_edge": 224},
    "patch_size": {"height": 14, "width": 14},
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "PixtralImageProcessor",
}
MISTRAL_MARKS = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
    "patch_size": 14,
    "spatial_merge_size": 2,
    "processor_class": "PixtralProcessor",
}
