"""Writes tiny checkpoints with vision towers and their expected numbers beside this file.

    VENV/bin/pip install torch==2.13.0 torchvision transformers==5.23.0 safetensors pillow
    VENV/bin/python tests/oracle/images.py [FOLDER ...]

Not run by the tests, which need no torch; see `generate.py`. Each folder gets what a publisher's
repository has: config.json, preprocessor_config.json, a tokenizer and a chat template of its own,
and the weights under the published names. `oracle.json` has conversations with images, the features
of each image, and greedy ids that transformers' whole model computes in float32 without caches.
"""

# pyright: basic, reportMissingImports=false

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import generate
import torch
from generate import COMMON, QWEN, QWEN_EXPERTS, filled, rounded
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).parent
TOKENS = 24
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
START, END, VISION_START, VISION_END, IMAGE, VIDEO = range(256, 262)
VOCABULARY = 264
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
MODELS = {
    "qwen3_vl_images": ("qwen3_vl", DEEP, 23, 0.5),
    "qwen3_vl_moe_images": ("qwen3_vl_moe", DEEP_EXPERTS, 24, 0.5),
    "qwen3_5_images": ("qwen3_5", TEXT, 21, 0.4),
    "qwen3_5_moe_images": ("qwen3_5_moe", TEXT | QWEN_EXPERTS, 22, 0.4),
}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names or MODELS:
        kind, text, seed, gain = MODELS[name]
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        write_texts(folder, kind, text)
        write_weights(folder, seed, gain)
        with torch.no_grad():
            facts = expected(folder)
        _ = (folder / "oracle.json").write_text(json.dumps(facts, separators=(",", ":")) + "\n")
        for answer in facts["answers"]:
            print(name, len(answer["prompt_ids"]), answer["greedy_ids"])


def is_deep(name: str) -> bool:
    return name.startswith("qwen3_vl")


def write_texts(folder: Path, kind: str, text: dict[str, Any]) -> None:
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": kind,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": False,
        "text_config": text | {"model_type": f"{kind}_text"},
        "vision_config": VISION
        | {"model_type": kind}
        | ({"depth": 3, "deepstack_visual_indexes": [0, 2]} if is_deep(kind) else {}),
    }
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
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


def write_weights(folder: Path, seed: int, gain: float) -> None:
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    shapes = {
        name: published(name, value.shape, folder.name)
        for name, value in model.state_dict().items()
    }
    text = {
        name.replace("model.language_model.", "model."): shape
        for name, shape in shapes.items()
        if "visual" not in name
    }
    has_head = not is_deep(folder.name)
    head = generate.head_shapes(text, nextn=False) if has_head else {}
    shapes |= {name: shape for name, shape in head.items() if "rotary" not in name}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(shapes):
        is_tower = ".visual." in name
        tensors[name] = filled(
            name, shapes[name], generator, zero_centred=has_head and not is_tower
        )
        if "patch_embed.proj.weight" in name:
            fan_in = shapes[name][1:].numel()
            tensors[name] = (tensors[name] * shapes[name][-1] ** 0.5 / fan_in**0.5 * 4).bfloat16()
        if name == "lm_head.weight":
            tensors[name][START:] = 0  # never the most likely: answers have text alone
        if not is_tower and any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            tensors[name] *= gain
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def published(name: str, shape: torch.Size, folder: str) -> torch.Size:
    """The shape of a tensor in a publisher's file."""
    is_turned = is_deep(folder) and ".mlp.experts." in name
    return torch.Size([shape[0], shape[2], shape[1]]) if is_turned else shape


# Expected numbers


def picture(number: int, width: int, height: int) -> bytes:
    """Squares and a gradient, as a PNG file."""
    image = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(image)
    for x in range(width):
        draw.line([(x, 0), (x, height)], fill=((x * 3) % 256, 40 * number % 256, 255 - x % 256))
    for i in range(4):
        corner = (37 * (i + number)) % width, (53 * i + 11 * number) % height
        colour = ((90 * i) % 256, (70 * number) % 256, (200 * i + 31) % 256)
        draw.rectangle([corner, (corner[0] + 30, corner[1] + 20)], fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def conversations() -> list[tuple[list[bytes], list[dict[str, Any]]]]:
    def says(role: str, *parts: str) -> dict[str, Any]:
        content = [{"type": "text", "text": p} if p else {"type": "image"} for p in parts]
        return {"role": role, "content": content}

    first, second, third = picture(1, 160, 96), picture(2, 64, 128), picture(3, 300, 200)
    long = "Look at every square there is, and at the order of them, before you answer. " * 2
    one = says("user", "What is this?", "")
    return [
        ([first], [one]),
        ([second, first], [says("user", "Compare ", "", " and ", "", "; " + long)]),
        ([first, third], [one, says("assistant", "A square."), says("user", "", "And this?")]),
        ([third], [says("user", long + long, "", "How many?")]),
    ]


def expected(folder: Path) -> dict[str, Any]:
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    answers = []
    for files, messages in conversations():
        images = [Image.open(io.BytesIO(file)) for file in files]
        made = processor(images, return_tensors="pt")
        grids = made["image_grid_thw"]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = list[int]()
        left = [int(t * h * w) // 4 for t, h, w in grids]
        for token in tokenizer.encode(text, add_special_tokens=False):
            ids += [IMAGE] * left.pop(0) if token == IMAGE else [token]
        seen = model.model.visual(made["pixel_values"], grid_thw=grids)
        features = getattr(seen, "pooler_output", None)
        features = seen[0] if features is None else features
        answer, logprobs = list(ids), list[float]()
        for _ in range(TOKENS):
            rows = torch.tensor([answer])
            out = model(
                input_ids=rows,
                mm_token_type_ids=(rows == IMAGE).int(),
                pixel_values=made["pixel_values"],
                image_grid_thw=grids,
                use_cache=False,
            )
            answer.append(int(out.logits[0, -1].argmax()))
            logprobs.append(round(out.logits[0, -1].log_softmax(-1).max().item(), 6))
        answers.append(
            {
                "images": [base64.b64encode(file).decode() for file in files],
                "messages": messages,
                "prompt_ids": ids,
                "grids": grids.tolist(),
                "features": rounded(features),
                "greedy_ids": answer[len(ids) :],
                "logprobs": logprobs,
            }
        )
    return {"answers": answers}


if __name__ == "__main__":
    main(sys.argv[1:])
