"""Writes tiny checkpoints with vision towers and their expected numbers beside this file.

    VENV/bin/pip install torch==2.13.0 torchvision transformers==5.23.0 safetensors pillow
    VENV/bin/python tests/oracle/images.py [FOLDER ...]

Not run by the tests, which need no torch; see `generate.py`. Each folder has the texts that a
publisher's repository has: config.json, preprocessor_config.json, and a tokenizer of bytes with a
chat template of its own (Gemma's has two and three newlines as one token). It gets the weights
under the published names, and `oracle.json`: conversations with images, the features of each image,
and greedy ids that transformers' whole model computes in float32 without caches. What is unusual:
Gemma's ends are not tied, so that a token is not followed by itself, and its window has fewer rows
than an image; experts' sizes are not half the hidden one, since their axes are published the other
way round.
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
from generate import filled, rounded
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).parent
TOKENS = 24


class Kind(NamedTuple):
    """How the images of a family come into a prompt."""

    processor_class: Any
    inputs: Any
    grids: Any
    """Each image's patches by time, height and width, of a processor's output."""
    first_special: int = 256
    """The first id that is no text."""
    options: dict[str, Any] = {}  # noqa: RUF012
    """Of the processor, as transformers' own Processor calls it."""


class Model(NamedTuple):
    kind: Kind
    seed: int
    gain: float
    """The share that layers have in the residual stream."""


def is_deep(name: str) -> bool:
    return name.startswith("qwen3_vl")


QWEN = Kind(
    Qwen2VLImageProcessorPil,
    lambda *given: qwen_inputs(*given),
    lambda made: made["image_grid_thw"].tolist(),
)
GEMMA = Kind(
    Gemma3ImageProcessorPil,
    lambda *given: gemma_inputs(*given),
    lambda made: [[1, 8, 8] for _ in made["pixel_values"]],
    258,
)
MISTRAL = Kind(
    PixtralImageProcessorPil,
    lambda *given: mistral_inputs(*given),
    lambda made: [[1, int(h) // 14, int(w) // 14] for h, w in made["image_sizes"]],
    options={"patch_size": {"height": 28, "width": 28}},
)
MODELS = {
    "qwen3_vl_images": Model(QWEN, 23, 0.5),
    "qwen3_vl_moe_images": Model(QWEN, 24, 0.5),
    "qwen3_5_images": Model(QWEN, 21, 0.4),
    "qwen3_5_moe_images": Model(QWEN, 22, 0.4),
    "gemma3_images": Model(GEMMA, 24, 1.0),
    "mistral3_images": Model(MISTRAL, 25, 1.0),
}
QWEN_IMAGE, GEMMA_IMAGE, GEMMA_ROWS = 260, 263, 16
"""Ids of images, and the rows of one."""


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names or MODELS:
        folder = HERE / name
        write_weights(folder, MODELS[name])
        with torch.no_grad():
            facts = expected(folder, MODELS[name].kind)
        _ = (folder / "oracle.json").write_text(json.dumps(facts, separators=(",", ":")) + "\n")
        for answer in facts["answers"]:
            print(name, len(answer["prompt_ids"]), answer["greedy_ids"])


def write_weights(folder: Path, made: Model) -> None:
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    if made.kind is QWEN:
        shapes, zero_centred = qwen_shapes(folder, model)
    else:  # under the names that transformers saves, which are the published ones
        model.save_pretrained(folder / "shapes")
        saved = load_file(folder / "shapes" / "model.safetensors")
        shapes, zero_centred = {name: t.shape for name, t in saved.items()}, made.kind is GEMMA
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
            tensors[name][made.kind.first_special :] = 0  # answers have text alone
        if made.kind is GEMMA and "embed_tokens" in name:
            tensors[name] *= 0.15  # the model multiplies it by 8
        if not is_tower and any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            tensors[name] *= made.gain
    if made.kind is GEMMA:  # Google's repositories have names of an older version
        old = "vision_tower.vision_model."
        tensors = {name.replace("vision_tower.", old): t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


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
        ids += [QWEN_IMAGE] * left.pop(0) if token == QWEN_IMAGE else [token]
    seen = model.model.visual(made["pixel_values"], grid_thw=grids)
    features = getattr(seen, "pooler_output", None)

    def arguments(rows: torch.Tensor) -> dict[str, Any]:
        types = (rows == QWEN_IMAGE).int()
        return {"mm_token_type_ids": types, "image_grid_thw": grids}

    return ids, seen[0] if features is None else features, arguments


def gemma_inputs(model: Any, made: Any, text: str, encode: Any) -> tuple[list[int], Any, Any]:
    """As transformers' own Gemma3Processor expands a prompt, in front of the tokenizer."""
    soft = "<image_soft_token>" * GEMMA_ROWS
    whole = f"\n\n<start_of_image>{soft}<end_of_image>\n\n"
    features = model.model.get_image_features(made["pixel_values"]).pooler_output

    def arguments(rows: torch.Tensor) -> dict[str, Any]:
        return {"token_type_ids": (rows == GEMMA_IMAGE).long()}

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
        assert max(answer[len(ids) :]) < kind.first_special
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
