"""Writes the weights of tiny embedders and encoders, and their embeddings.

    VENV/bin/python tests/oracle/embedders.py

Not run by the tests, which need no torch; see `generate.py`. Each folder has the texts that a
publisher's repository has: config.json, a tokenizer that puts tokens around or after a text, and
the files of sentence-transformers that say how hidden states become an embedding. It gets a bare
backbone's tensors, without `model.` before their names and without lm_head, and `oracle.json`:
inputs with the ids of that tokenizer and the embeddings that transformers computes of each alone,
in float32, pooled hidden states divided by their length.
"""

# pyright: basic, reportMissingImports=false

import json
from pathlib import Path

import torch
from generate import filled
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoTokenizer

HERE = Path(__file__).parent
SEEDS = {"qwen3_embedding": 11, "encoder_bert": 21, "encoder_xlm_roberta": 22}
SEEDS |= {"encoder_modernbert": 23}
TEXTS = (
    "What is the capital of China?",
    "a",
    "The capital of China is Beijing.",
    "Gravity attracts two bodies towards each other. " * 16,
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "Instruct: Given a web search query, retrieve relevant passages\nQuery:Explain gravity",
)


def main() -> None:
    torch.set_num_threads(1)
    for name, seed in SEEDS.items():
        write(HERE / name, seed)


def write(folder: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    model = AutoModel.from_config(config).float().eval()
    kept = {k: v for k, v in model.state_dict().items() if not k.startswith("pooler.")}
    is_encoder = folder.name.startswith("encoder_")
    tensors = {
        k: drawn(k, kept[k].shape, generator)
        if is_encoder
        else filled(k, kept[k].shape, generator, False)
        for k in sorted(kept)
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _ = model.load_state_dict(tensors, strict=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            pooled = pool(folder, model(torch.tensor([ids])).last_hidden_state[0])
        vector = [round(x, 8) for x in (pooled / pooled.norm()).tolist()]
        rows.append({"text": text, "ids": ids, "embedding": vector})
    _ = (folder / "oracle.json").write_text(json.dumps(rows, separators=(",", ":")) + "\n")
    vectors = torch.tensor([row["embedding"] for row in rows])
    print(folder.name, "cosines", (vectors @ vectors.T).round(decimals=2).tolist())


def pool(folder: Path, hidden: torch.Tensor) -> torch.Tensor:
    flags = json.loads((folder / "1_Pooling" / "config.json").read_text())
    if flags.get("pooling_mode_lasttoken"):
        return hidden[-1]
    return hidden[0] if flags["pooling_mode_cls_token"] else hidden.mean(0)


def drawn(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """An encoder's weights."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name.lower() and name.endswith("weight"):
        noise = 1 + 0.2 * noise
    elif noise.ndim == 1:
        noise = 0.1 * noise
    elif "embeddings" not in name:
        noise = noise / shape[-1] ** 0.5
    return noise.to(torch.bfloat16)


if __name__ == "__main__":
    main()
