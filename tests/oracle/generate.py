"""Writes the tiny checkpoints and their expected numbers beside this file, with transformers.

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors
    VENV/bin/python tests/oracle/generate.py [FAMILY ...]

Not run by the tests, which need no torch. Each FAMILY folder has a `config.json` and gets
`model.safetensors` in the layout of its original repository, and `oracle.json`. Weights are random,
but such that a token's own embedding decides most of what follows it: so the text does not settle
on one token, and the head, which sees that embedding too, is often right and sometimes not.

Everything is float32 and without caches: each draft computes the whole sequence anew, so that
nothing of ours (caches, rollback, priming) has a counterpart here.
"""

# torch is no dependency of the project, so that nothing of it is typed here.
# pyright: basic, reportMissingImports=false

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

HERE = Path(__file__).parent
HIDDEN = 32
TOKENS = 48
MAX_K = 3
PROMPTS = ([3, 14, 15, 9, 26, 5], [58, 1, 33], list(range(40, 8, -1)))
PICKED = {
    "deepseek_v3": (9, 0.6),
    "glm4_moe": (8, 0.5),
    "qwen3_5": (7, 0.4),
    "qwen3_5_moe": (8, 0.4),
    "qwen3_next": (8, 0.4),
}
"""Seed and gain, the share that layers have in the residual stream: with less of it the head is
right more often and the text repeats itself sooner."""
LOGIT_ROWS = 2
"""The last rows of teacher forcing whose logits are kept; of all others the argmax."""

FED = {"deepseek_v3": ("post_norm", "pre_norm"), "glm4_moe": ("post_norm", "pre_norm")}


def main(families: list[str]) -> None:
    torch.set_num_threads(1)
    for family in families or PICKED:
        folder = HERE / family
        write_weights(folder, *PICKED[family])
        with torch.no_grad():
            facts = {fed: expected(folder, fed) for fed in FED.get(family, ("post_norm",))}
        text = json.dumps({"prompts": PROMPTS, **facts}, separators=(",", ":"))
        _ = (folder / "oracle.json").write_text(text + "\n")
        for fed, fact in facts.items():
            counts = [answer["K"] for answer in fact]
            distinct = [len(set(answer["greedy_ids"])) for answer in fact]
            print(f"{family} {fed}: {distinct} distinct tokens, {counts}")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def write_weights(folder: Path, seed: int, gain: float) -> None:
    """Names and shapes are those that transformers saves; the head's are its last layer's.

    Qwen3.5's repositories hold the backbone's experts fused, as transformers has them in memory.
    """
    config = config_of(folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder / "shapes", max_shard_size="1GB")
    shapes = {k: v.shape for k, v in load_file(folder / "shapes" / "model.safetensors").items()}
    for file in (folder / "shapes").iterdir():
        file.unlink()
    (folder / "shapes").rmdir()
    head = head_shapes(shapes, nextn="first_k_dense_replace" in config)
    if config["model_type"] == "qwen3_5_moe_text":
        shapes = {name: value.shape for name, value in model.state_dict().items()}
    shapes |= head
    generator = torch.Generator().manual_seed(seed)
    zero_centred = "first_k_dense_replace" not in config
    tensors = {k: filled(k, shapes[k], generator, zero_centred) for k in sorted(shapes)}
    for name in tensors:
        if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            tensors[name] *= gain
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def head_shapes(shapes: dict[str, torch.Size], *, nextn: bool) -> dict[str, torch.Size]:
    last = max(int(name.split(".")[2]) for name in shapes if name.startswith("model.layers."))
    layer = {
        name.removeprefix(f"model.layers.{last}."): shape
        for name, shape in shapes.items()
        if name.startswith(f"model.layers.{last}.")
    }
    vector, fusion = torch.Size([HIDDEN]), torch.Size([HIDDEN, 2 * HIDDEN])
    if not nextn:
        own = {"fc": fusion, "pre_fc_norm_embedding": vector}
        own |= {"pre_fc_norm_hidden": vector, "norm": vector}
        head = {f"mtp.{name}.weight": shape for name, shape in own.items()}
        return head | {f"mtp.layers.0.{name}": shape for name, shape in layer.items()}
    own = {"eh_proj": fusion, "enorm": vector, "hnorm": vector, "shared_head.norm": vector}
    layer |= {f"{name}.weight": shape for name, shape in own.items()}
    return {f"model.layers.{last + 1}.{name}": shape for name, shape in layer.items()}


def filled(
    name: str, shape: torch.Size, generator: torch.Generator, zero_centred: bool
) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return noise.abs().add(0.5).log()
    if name.endswith("e_score_correction_bias"):
        # Positive: where it outweighs a score, mlx-lm and transformers mask groups differently.
        return 0.1 * noise.abs()
    return drawn(name, noise, zero_centred).to(torch.bfloat16)


def drawn(name: str, noise: torch.Tensor, zero_centred: bool) -> torch.Tensor:
    if "norm" in name:
        # In steps that bfloat16 has between 1 and 2 too: mlx-lm adds the 1 before it converts.
        steps = (0.2 * noise).clamp(-0.5, 0.5).mul(128).round() / 128
        return steps + (0.0 if zero_centred and "linear_attn.norm" not in name else 1.0)
    if noise.ndim == 1:
        return 0.1 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return noise
    scaled = noise / noise.shape[-1] ** 0.5
    if "eh_proj" in name or name == "mtp.fc.weight":
        embedding, hidden = scaled.split(HIDDEN, dim=-1)
        return torch.cat([torch.eye(HIDDEN) + 0.1 * embedding, 0.3 * hidden], dim=-1)
    return scaled


# Expected numbers


@dataclass
class Target:
    """The backbone and its head, as pure functions of whole sequences."""

    model: Any
    mtp: Any
    pre_norm: bool

    def run(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, V) logits, and (n, H) of the hidden that feeds the head."""
        before: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_hook(lambda _m, x, _y: before.append(x[0]))
        out = self.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        hook.remove()
        return out.logits[0], (before[0] if self.pre_norm else out.hidden_states[-1])[0]

    def draft(
        self, hidden: torch.Tensor, following: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, V) draft logits and (n, H) of the head's output, for rows (hidden, next token)."""
        positions = torch.arange(1, len(following) + 1)[None]
        layer = self.mtp.layers[0]
        layer.use_post_norm = not self.pre_norm
        out = self.mtp.forward_layer(
            0, hidden[None], positions, None, input_ids=torch.tensor([following])
        )
        read = layer.post_norm(out) if self.pre_norm else out
        return self.mtp._project_to_logits(read)[0], out[0]

    def drafts(self, ids: list[int], hidden: torch.Tensor) -> list[int]:
        """Drafts after `ids`; `hidden` has a row for each of them but the last."""
        following, drafts = ids[1:], []
        for _ in range(MAX_K):
            logits, out = self.draft(hidden, following)
            drafts.append(int(logits[-1].argmax()))
            hidden = torch.cat([hidden, out[-1:]])
            following = [*following, drafts[-1]]
        return drafts


def expected(folder: Path, fed: str) -> list[dict[str, Any]]:
    target = opened(folder, pre_norm=fed == "pre_norm")
    return [one_answer(target, prompt) for prompt in PROMPTS]


def opened(folder: Path, *, pre_norm: bool) -> Target:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    if not hasattr(model.config, "num_mtp_layers"):  # transformers ignores the Qwen heads
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    elif "first_k_dense_replace" in config_of(folder):  # it knows the published depths only
        layers = model.config.num_hidden_layers
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers}\..*"]
    return Target(model, MtpModel.from_pretrained(model).eval(), pre_norm)


def one_answer(target: Target, prompt: list[int]) -> dict[str, Any]:
    ids = list(prompt)
    for _ in range(TOKENS):
        ids.append(int(target.run(ids)[0][-1].argmax()))
    logits, hidden = target.run(ids[:-1])
    drafted, _ = target.draft(hidden, ids[1:])
    # By what is emitted before a round: how many of its first drafts are the greedy tokens.
    right = [
        next(mismatches(target.drafts(ids[:end], hidden[: end - 1]), ids[end:]), MAX_K)
        for end in range(len(prompt) + 1, len(ids))
    ]
    return {
        "greedy_ids": ids[len(prompt) :],
        "logits": rounded(logits[-LOGIT_ROWS:]),
        "hidden": rounded(hidden[-LOGIT_ROWS:]),
        "draft_ids": drafted.argmax(-1).tolist(),
        "draft_logits": rounded(drafted[-LOGIT_ROWS:]),
        "K": {str(k): counts(right, k) for k in range(1, MAX_K + 1)},
    }


def counts(right: list[int], k: int) -> dict[str, int]:
    """Rounds of `k` drafts, each verified against the greedy ids, until all of them are emitted.

    `drafted` and `accepted` as the stats count them: every draft that was verified, and those that
    were emitted. Near the end a round drafts no more than may still be emitted before its last
    token, which the verify itself gives.
    """
    counts = {"rounds": 0, "drafted": 0, "accepted": 0}
    emitted = 1  # the first token comes from the prefill
    while emitted < TOKENS:
        depth = min(k, TOKENS - emitted - 1)
        if depth:
            accepted = min(right[emitted - 1], depth)
            counts["rounds"] += 1
            counts["drafted"] += depth
            counts["accepted"] += accepted
            emitted += accepted
        emitted += 1
    return counts


def mismatches(drafts: list[int], expected: list[int]) -> Iterator[int]:
    """The positions of wrong drafts; a draft past the end of the answer counts as right."""
    pairs = enumerate(zip(drafts, expected, strict=False))
    return (i for i, (token, right) in pairs if token != right)


def rounded(rows: torch.Tensor) -> list[list[float]]:
    return [[round(x, 6) for x in row] for row in rows.tolist()]


if __name__ == "__main__":
    main(sys.argv[1:])
