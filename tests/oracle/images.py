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
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import generate
import torch
from generate import QWEN_EXPERTS, filled, rounded
from image_configs import (
    DEEP,
    DEEP_EXPERTS,
    GEMMA,
    GEMMA_PROCESSOR,
    GEMMA_ROWS,
    GEMMA_SPECIAL,
    GEMMA_TEMPLATE,
    IMAGE,
    MISTRAL,
    MISTRAL_MARKS,
    MISTRAL_PROCESSOR,
    MISTRAL_SPECIAL,
    MISTRAL_TEMPLATE,
    PROCESSOR,
    SPECIAL,
    START,
    TEMPLATE,
    TEXT,
    VIDEO,
    VISION,
    VISION_END,
    VISION_START,
)
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).parent
TOKENS = 24


class Kind(NamedTuple):
    """The published form of a family: its texts, and how its images come into a prompt."""

    config: dict[str, Any]
    processor: dict[str, Any]
    processor_class: Any
    special: list[str]
    template: str
    end: str
    inputs: Any
    grids: Any
    """Each image's patches by time, height and width, of a processor's output."""
    bos: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012
    """Of the processor, as transformers' own Processor calls it."""


class Model(NamedTuple):
    kind: Kind
    seed: int
    gain: float
    """The share that layers have in the residual stream."""


def is_deep(name: str) -> bool:
    return name.startswith("qwen3_vl")


def qwen(kind: str, text: dict[str, Any]) -> Kind:
    deep = {"depth": 3, "deepstack_visual_indexes": [0, 2]} if is_deep(kind) else {}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": kind,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": False,
        "text_config": text | {"model_type": f"{kind}_text"},
        "vision_config": VISION | {"model_type": kind} | deep,
    }
    return Kind(
        config,
        PROCESSOR,
        Qwen2VLImageProcessorPil,
        SPECIAL,
        TEMPLATE,
        "<|im_end|>",
        lambda *given: qwen_inputs(*given),
        lambda made: made["image_grid_thw"].tolist(),
    )


MODELS = {
    "qwen3_vl_images": Model(qwen("qwen3_vl", DEEP), 23, 0.5),
    "qwen3_vl_moe_images": Model(qwen("qwen3_vl_moe", DEEP_EXPERTS), 24, 0.5),
    "qwen3_5_images": Model(qwen("qwen3_5", TEXT), 21, 0.4),
    "qwen3_5_moe_images": Model(qwen("qwen3_5_moe", TEXT | QWEN_EXPERTS), 22, 0.4),
    "gemma3_images": Model(
        Kind(
            GEMMA,
            GEMMA_PROCESSOR,
            Gemma3ImageProcessorPil,
            GEMMA_SPECIAL,
            GEMMA_TEMPLATE,
            "<end_of_turn>",
            lambda *given: gemma_inputs(*given),
            lambda made: [[1, 8, 8] for _ in made["pixel_values"]],
            "<bos>",
        ),
        24,
        1.0,
    ),
    "mistral3_images": Model(
        Kind(
            MISTRAL,
            MISTRAL_PROCESSOR,
            PixtralImageProcessorPil,
            MISTRAL_SPECIAL,
            MISTRAL_TEMPLATE,
            "</s>",
            lambda *given: mistral_inputs(*given),
            lambda made: [[1, int(h) // 14, int(w) // 14] for h, w in made["image_sizes"]],
            "<s>",
            {"patch_size": {"height": 28, "width": 28}},
        ),
        25,
        1.0,
    ),
}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names or MODELS:
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        write_texts(folder, MODELS[name].kind)
        write_weights(folder, MODELS[name])
        with torch.no_grad():
            facts = expected(folder, MODELS[name].kind)
        _ = (folder / "oracle.json").write_text(json.dumps(facts, separators=(",", ":")) + "\n")
        for answer in facts["answers"]:
            print(name, len(answer["prompt_ids"]), answer["greedy_ids"])


def write_texts(folder: Path, kind: Kind) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # As Gemma's vocabulary has them: two newlines are one token, and so are three.
    line, whole = "\u010a", kind.config is GEMMA
    merges = [(line, line), (line * 2, line)] if whole else []
    vocabulary = [*alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not whole)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(kind.special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({"bos_token": kind.bos} if kind.bos else {}),
        "eos_token": kind.end,
        "clean_up_tokenization_spaces": False,
        "chat_template": kind.template,
    }
    for name, value in (
        ("config.json", kind.config),
        ("preprocessor_config.json", kind.processor),
        ("tokenizer_config.json", settings),
        *([("processor_config.json", MISTRAL_MARKS)] if kind.config is MISTRAL else []),
    ):
        _ = (folder / name).write_text(json.dumps(value, indent=1) + "\n")


def write_weights(folder: Path, made: Model) -> None:
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    if made.kind.processor_class is Qwen2VLImageProcessorPil:
        shapes, zero_centred = qwen_shapes(folder, model)
    else:  # under the names that transformers saves, which are the published ones
        model.save_pretrained(folder / "shapes")
        saved = load_file(folder / "shapes" / "model.safetensors")
        shapes, zero_centred = (
            {name: t.shape for name, t in saved.items()},
            made.kind.config is GEMMA,
        )
        shutil.rmtree(folder / "shapes")
    generator = torch.Generator().manual_seed(made.seed)
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(shapes):
        is_tower = ".visual." in name or name.startswith("vision_tower.")
        centred = zero_centred and not is_tower
        tensors[name] = filled(name, shapes[name], generator, zero_centred=centred)
        if name.endswith(("patch_embed.proj.weight", "patch_embedding.weight", "conv.weight")):
            fan_in = shapes[name][1:].numel()
            tensors[name] = (tensors[name] * shapes[name][-1] ** 0.5 / fan_in**0.5 * 4).bfloat16()
        if name.endswith("lm_head.weight"):
            tensors[name][first_special(made.kind) :] = (
                0  # never the most likely: answers have text alone
            )
        if made.kind.config is GEMMA and "embed_tokens" in name:
            tensors[name] *= 0.15  # the model multiplies it by 8
        if not is_tower and any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            tensors[name] *= made.gain
    if made.kind.config is GEMMA:  # Google's repositories have names of an older version
        old = "vision_tower.vision_model."
        tensors = {name.replace("vision_tower.", old): t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def first_special(kind: Kind) -> int:
    """The first id that is no text."""
    return GEMMA["boi_token_index"] - 3 if kind.config is GEMMA else START


def qwen_shapes(folder: Path, model: Any) -> tuple[dict[str, torch.Size], bool]:
    """All tensors with those of a draft head, and whether norms are stored less 1."""
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
    return shapes | {k: v for k, v in head.items() if "rotary" not in k}, has_head


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


def qwen_inputs(model: Any, made: Any, text: str, encode: Any) -> tuple[list[int], Any, Any]:
    """A prompt's ids, all images' features, and the arguments of a forward over some ids."""
    grids = made["image_grid_thw"]
    ids = list[int]()
    left = [int(t * h * w) // 4 for t, h, w in grids]
    for token in encode(text):
        ids += [IMAGE] * left.pop(0) if token == IMAGE else [token]
    seen = model.model.visual(made["pixel_values"], grid_thw=grids)
    features = getattr(seen, "pooler_output", None)

    def arguments(rows: torch.Tensor) -> dict[str, Any]:
        types = (rows == IMAGE).int()
        return {"mm_token_type_ids": types, "image_grid_thw": grids}

    return ids, seen[0] if features is None else features, arguments


def gemma_inputs(model: Any, made: Any, text: str, encode: Any) -> tuple[list[int], Any, Any]:
    """As transformers' own Gemma3Processor expands a prompt, in front of the tokenizer."""
    soft = "<image_soft_token>" * GEMMA_ROWS
    whole = f"\n\n<start_of_image>{soft}<end_of_image>\n\n"
    features = model.model.get_image_features(made["pixel_values"]).pooler_output

    def arguments(rows: torch.Tensor) -> dict[str, Any]:
        return {"token_type_ids": (rows == GEMMA["image_token_index"]).long()}

    return encode(text.replace("<start_of_image>", whole)), features.flatten(0, 1), arguments


def mistral_inputs(model: Any, made: Any, text: str, encode: Any) -> tuple[list[int], Any, Any]:
    """As transformers' own PixtralProcessor expands a prompt: each line of an image has an end."""
    sizes = made["image_sizes"]
    for height, width in sizes:
        line = "[IMG]" * (int(width) // 28)
        lines = "[IMG_BREAK]".join(
            line.replace("[IMG]", "[IMAGE]") for _ in range(int(height) // 28)
        )
        text = text.replace("[IMG]", lines + "[IMG_END]", 1)
    seen = model.model.get_image_features(
        made["pixel_values"], image_sizes=sizes, vision_feature_layer=-1
    )
    ids = encode(text.replace("[IMAGE]", "[IMG]"))
    return ids, torch.cat(seen.pooler_output), lambda _: {"image_sizes": sizes}


def expected(folder: Path, kind: Kind) -> dict[str, Any]:
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = kind.processor_class.from_pretrained(folder)
    answers = []
    for files, messages in conversations():
        images = [Image.open(io.BytesIO(file)) for file in files]
        made = processor(images, return_tensors="pt", **kind.options)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids, features, arguments = kind.inputs(
            model, made, text, lambda t: tokenizer.encode(t, add_special_tokens=False)
        )
        answer, logprobs = list(ids), list[float]()
        for _ in range(TOKENS):
            rows = torch.tensor([answer])
            pixels = made["pixel_values"]
            out = model(input_ids=rows, pixel_values=pixels, use_cache=False, **arguments(rows))
            answer.append(int(out.logits[0, -1].argmax()))
            logprobs.append(round(out.logits[0, -1].log_softmax(-1).max().item(), 6))
        assert max(answer[len(ids) :]) < first_special(kind)
        answers.append(
            {
                "images": [base64.b64encode(file).decode() for file in files],
                "messages": messages,
                "prompt_ids": ids,
                "grids": kind.grids(made),
                "features": rounded(features),
                "greedy_ids": answer[len(ids) :],
                "logprobs": logprobs,
            }
        )
    return {"answers": answers}


if __name__ == "__main__":
    main(sys.argv[1:])
