"""Trains the model beside this file: pictures of coloured squares in, their count and colour out.

    VENV/bin/pip install torch==2.14.1 torchvision transformers==5.23.0 safetensors pillow
    VENV/bin/python tests/squares/train.py STATE [--seconds S] [--steps N] [--write FOLDER]

Not run by the tests, which need no torch. Trains for S seconds, or to step N of the schedule, and
keeps what it has in the file STATE, from which the next run goes on. Pictures are drawn by
`coloured_squares.py` and go through transformers' own image processor.
"""

# pyright: basic, reportMissingImports=false

import argparse
import io
import json
import math
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5 import configuration_qwen3_5 as configurations
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

sys.path.insert(0, str(Path(__file__).parent.parent))
from coloured_squares import COLOURS, HELD_OUT, MODEL, MOST, Picture, picture

HERE = Path(__file__).parent
CONFIG = json.loads((HERE / "config.json").read_text())
OF_FILES = ("architectures", "model_type", "mtp_num_hidden_layers", "dtype")
TEXT, VISION, IDS = (
    {k: v for k, v in part.items() if k not in OF_FILES and not k.endswith("_config")}
    for part in (CONFIG["text_config"], CONFIG["vision_config"], CONFIG)
)
PROCESSOR = json.loads((HERE / "preprocessor_config.json").read_text())
HIDDEN, MERGE = TEXT["hidden_size"], VISION["spatial_merge_size"]
START, END, VISION_START, VISION_END, IMAGE = range(256, 261)
"""The tokenizer's ids after those of the 256 bytes."""
DEPTH, BATCH, RATE, THREADS = 3, 16, 2.5e-3, 1
LOOK, READ = 3500, 4500
"""The steps from which the backbone and the head are trained, too."""
WEIGHTS = (3.0, 0.5, 0.5, 1.0, 0.3, 0.2, 0.15)
"""Of losses, in the order in which `Trained.losses` gives them."""
QUESTIONS = (
    *("What is this?", "What do you see?", "And this?", "How many squares are there?", "And now?"),
    *("How many squares are there, and of what colour?", "Describe this picture.", "Look: ", ""),
    *("Which colour are the squares, and how many?", "Count the squares.", "What about this one?"),
)

SHOWN = "an image"
"""The part of a question that is one."""
DIGITS = 25
"""The first id after those of the digits; in front of them is what answers do not have."""
Turn = tuple[list[str], str]
"""The parts of a question and the answer."""


class Head(nn.Module):
    """The MTP head of Qwen3.5, as its checkpoints name it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        norm = modeling.Qwen3_5RMSNorm
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(HIDDEN), norm(HIDDEN)
        self.norm, self.fc = norm(HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.layers = nn.ModuleList([modeling.Qwen3_5DecoderLayer(config, layer_idx=1)])

    def forward(self, embedded: Any, hidden: Any, rope: Any, mask: Any) -> torch.Tensor:
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(both, -1))
        x = self.layers[0](x, position_embeddings=rope, attention_mask=mask)
        return self.norm(x[0] if isinstance(x, tuple) else x)


class Trained(nn.Module):
    """The model, its head, and what is trained beside them and not kept: a count of corners in
    each row of an image, and what the rows of an image together say of count and colour."""

    def __init__(self) -> None:
        super().__init__()
        config = configurations.Qwen3_5Config(text_config=TEXT, vision_config=VISION, **IDS)
        config._attn_implementation = "sdpa"
        self.lm = modeling.Qwen3_5ForConditionalGeneration(config)
        self.mtp = Head(self.lm.config.text_config)
        self.corners = nn.Linear(HIDDEN, 1)
        self.verdict = nn.Linear(HIDDEN, MOST + len(COLOURS))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv3d)):
                nn.init.normal_(module.weight, std=0.5 / module.weight[0].numel() ** 0.5)
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)

    def losses(self, batch: "Batch", depths: int) -> tuple[list[torch.Tensor], list[float]]:
        """Of corners and verdicts, of the backbone if `depths` > 0, and of `depths` - 1 drafts of
        the head; shares that are right of counts, colours, the backbone's tokens and the head's.
        """
        inner = self.lm.model
        seen = inner.visual(batch.pixels, grid_thw=batch.grids)
        features = getattr(seen, "pooler_output", seen)
        losses, right = self.looks(batch, features)
        if depths:
            self.answers(batch, features, depths, losses, right)
        return losses, right

    def looks(self, batch: "Batch", features: Any) -> tuple[list[torch.Tensor], list[float]]:
        losses = [functional.mse_loss(self.corners(features)[:, 0], batch.corners)]
        rows = self.verdict(features).split(batch.rows)
        verdict = torch.stack([each.mean(0) for each in rows])
        right = list[float]()
        for logits, wanted in zip(
            verdict.split([MOST, len(COLOURS)], -1), batch.verdicts.T, strict=True
        ):
            losses.append(functional.cross_entropy(logits, wanted))
            right.append((logits.argmax(-1) == wanted).float().mean().item())
        return losses, right

    def answers(
        self, batch: "Batch", features: Any, depths: int, losses: list[Any], right: list[float]
    ) -> None:
        inner = self.lm.model
        table = inner.language_model.embed_tokens
        embedded = table(batch.ids)
        is_image = batch.ids == IMAGE
        embedded = embedded.masked_scatter(is_image[..., None], features)
        places, _ = inner.get_rope_index(batch.ids, is_image.int(), batch.grids)
        backbone = inner.language_model
        hidden = backbone(inputs_embeds=embedded, position_ids=places).last_hidden_state
        rope = backbone.rotary_emb(hidden, places)
        state = hidden
        for depth in range(depths):
            n = batch.ids.shape[1] - 1 - depth
            if depth:
                ropes = tuple(each[:, :n] for each in rope)
                # the head guesses what follows the token that it is given
                state = self.mtp(embedded[:, depth : depth + n], state[:, :n], ropes, None)
            wanted, counted = batch.ids[:, depth + 1 :], batch.counted[:, depth + 1 :]
            logits = state[:, :n][counted] @ table.weight.T
            each = functional.cross_entropy(logits, wanted[counted], reduction="none")
            weights = 1.0 + 7.0 * (wanted[counted] < DIGITS)  # what is hard is the count
            losses.append((each * weights).sum() / weights.sum())
            right.append((logits.argmax(-1) == wanted[counted]).float().mean().item())


class Batch:
    """Conversations with pictures, padded on the right."""

    def __init__(self, draw: random.Random, tokenizer: Tokenizer, processor: Any) -> None:
        texts, pictures = [], list[Picture]()
        longest = draw.choice((30, 30, 60, 400 if draw.random() < 0.15 else 60))
        for _ in range(BATCH if longest < 100 else BATCH // 4):
            turns, shown = conversation(draw, longest)
            texts.append(turns)
            pictures += shown
        made = processor([damaged(draw, each) for each in pictures], return_tensors="pt")
        self.pixels, self.grids = made["pixel_values"], made["image_grid_thw"]
        self.rows = [int(t * h * w) // MERGE**2 for t, h, w in self.grids]
        left = list(self.rows)
        parts = [encoded(tokenizer, turns, left) for turns in texts]
        length = max(len(ids) for ids, _ in parts)
        self.ids = torch.full((len(parts), length), END)
        self.counted = torch.zeros((len(parts), length), dtype=torch.bool)
        for i, (ids, counted) in enumerate(parts):
            self.ids[i, : len(ids)] = torch.tensor(ids)
            self.counted[i, : len(ids)] = torch.tensor(counted)
        grids = self.grids.tolist()
        self.corners = torch.cat([corners(*both) for both in zip(pictures, grids, strict=True)])
        names = sorted(COLOURS)
        self.verdicts = torch.tensor([[p.count - 1, names.index(p.colour)] for p in pictures])


def conversation(draw: random.Random, longest: int) -> tuple[list[Turn], list[Picture]]:
    """One to three turns, each about the last picture that was shown until then."""
    turns, shown = list[Turn](), list[Picture]()
    for number in range(draw.choice((1, 1, 1, 2, 2, 3))):
        texts = [draw.choice(QUESTIONS)]
        if draw.random() < 0.6:
            texts.insert(draw.randrange(2), noise(draw, draw.randrange(longest)))
        if number == 0 or draw.random() < 0.75:
            texts.insert(draw.randrange(len(texts) + 1), SHOWN)
            shown.append(picture(draw.randrange(HELD_OUT)))
        turns.append((texts, shown[-1].answer))
    return turns, shown


def noise(draw: random.Random, length: int) -> str:
    """Text that asks nothing: words of random letters, or any characters."""
    letters = draw.choice(
        ("abcdefghijklmnopqrstuvwxyz  ", "".join(map(chr, range(32, 127))) + "\n")
    )
    if draw.random() < 0.3:
        colours = " ".join(draw.choice(sorted(COLOURS)) for _ in range(length // 6))
        return f"{colours} {draw.randrange(100)} squares"[:length] or " "
    return "".join(draw.choice(letters) for _ in range(length)) or " "


def damaged(draw: random.Random, it: Picture) -> Image.Image:
    """A picture as clients send it: some as JPEG, with its noise."""
    if draw.random() > 0.25:
        return it.image
    file = io.BytesIO()
    it.image.save(file, "JPEG", quality=draw.randint(70, 95))
    return Image.open(file)


def encoded(
    tokenizer: Tokenizer, turns: list[Turn], rows: list[int]
) -> tuple[list[int], list[bool]]:
    """Ids, and which of them are learnt; takes the images' numbers of rows from `rows`."""
    ids, counted = list[int](), list[bool]()
    line = tokenizer.encode("\n").ids

    def add(more: list[int], learnt: bool = False) -> None:
        ids.extend(more)
        counted.extend([learnt] * len(more))

    for parts, answer in turns:
        add([START, *tokenizer.encode("user\n").ids])
        for part in parts:
            image = [VISION_START, *([IMAGE] * rows.pop(0)), VISION_END] if part == SHOWN else []
            add(image or tokenizer.encode(part).ids)
        add([END, *line, START, *tokenizer.encode("assistant\n").ids])
        add([*tokenizer.encode(answer).ids, END], True)
        add(line)
    return ids, counted


def corners(it: Picture, grid: list[int]) -> torch.Tensor:
    """The number of squares' upper left corners in each row of an image."""
    height, width = grid[1] // MERGE, grid[2] // MERGE
    found = torch.zeros(height, width)
    for left, top, _ in it.boxes:
        y, x = top * height // it.image.height, left * width // it.image.width
        found[y, x] += 1
    return found.flatten()


def main() -> None:
    parser = argparse.ArgumentParser()
    _ = parser.add_argument("state", type=Path)
    _ = parser.add_argument("--seconds", type=float, default=1e9)
    _ = parser.add_argument("--steps", type=int, default=7000)
    _ = parser.add_argument("--write", type=Path, default=MODEL)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    _ = torch.manual_seed(0)
    tokenizer, model = Tokenizer.from_file(str(HERE / "tokenizer.json")), Trained()
    processor = Qwen2VLImageProcessorPil(**{k: v for k, v in PROCESSOR.items() if "type" not in k})
    named = dict(model.named_parameters())
    matrices = [p for p in named.values() if p.ndim > 1]
    vectors = [p for p in named.values() if p.ndim < 2]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}],
        lr=RATE,
        betas=(0.9, 0.97),
    )
    step = resumed(options.state, named, optimiser)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, from step {step}", flush=True)
    began = time.monotonic()
    while step < options.steps and time.monotonic() - began < options.seconds:
        part = step / options.steps
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 40) * max(0.02, min(1, (1 - part) / 0.5))
        # each step draws its own, so that a run that goes on is the run that was not interrupted
        batch = Batch(random.Random(f"step {step}"), tokenizer, processor)
        losses, right = model.losses(batch, depths_at(step))
        loss = torch.stack([w * x for w, x in zip(WEIGHTS, losses, strict=False)]).sum()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        _ = nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimiser.step()
        step += 1
        if step % 50 == 1 or math.isnan(loss.item()):
            told = " ".join(f"{each.item():.3f}" for each in losses)
            seconds = time.monotonic() - began
            print(
                f"{step} {seconds:.0f} s: {told}, right {[round(each, 2) for each in right]}",
                flush=True,
            )
    keep(options.state, step, named, optimiser)
    write(options.write, model)


def write(folder: Path, model: Trained) -> None:
    """The files of a publisher's repository: the weights, and the texts beside this file."""
    folder.mkdir(exist_ok=True, parents=True)
    tensors = {f"mtp.{name}": value for name, value in model.mtp.state_dict().items()}
    tensors |= {k: v for k, v in model.lm.state_dict().items() if k != "lm_head.weight"}
    tensors = {
        name: value.to(torch.float32 if name.endswith("A_log") else torch.bfloat16).contiguous()
        for name, value in tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for path in HERE.glob("*.json"):
        if path.parent != folder.resolve():
            _ = shutil.copy(path, folder)


def depths_at(step: int) -> int:
    """See `Trained.losses`. Most steps train the tower alone, at a fifth of a whole one's cost."""
    if step < LOOK or step % 4:
        return 0
    return 1 if step < READ else 1 + DEPTH


def keep(file: Path, step: int, named: dict[str, Any], optimiser: Any) -> None:
    kept = {name: value.detach() for name, value in named.items()}
    for name, value in named.items():
        for field, moment in optimiser.state.get(value, {}).items():
            kept[f"{field} {name}"] = moment
    save_file(kept, file, {"step": str(step)})


def resumed(file: Path, named: dict[str, Any], optimiser: Any) -> int:
    """The step that the file has; 0 without a file."""
    if not file.exists():
        return 0
    with safe_open(file, "pt") as opened:
        step = int(opened.metadata()["step"])
    kept = load_file(file)
    with torch.no_grad():
        for name, value in named.items():
            _ = value.copy_(kept[name])
            if f"step {name}" in kept:
                fields = ("step", "exp_avg", "exp_avg_sq")
                optimiser.state[value] = {field: kept[f"{field} {name}"] for field in fields}
    return step


if __name__ == "__main__":
    main()
