"""Writes tiny encoders as sentence-transformers publishes them, and their embeddings.

    VENV/bin/python tests/oracle/encoders.py

Not run by the tests, which need no torch; see `generate.py`. Each folder has a bare encoder's
tensors, a tokenizer that puts tokens around a text, and the files that say how hidden states become
an embedding. `oracle.json` has inputs with the ids of that tokenizer and the embeddings that
transformers computes of each alone, in float32: pooled hidden states, divided by their length.
"""

# pyright: basic, reportMissingImports=false

import json
import string
from pathlib import Path
from typing import Any

import torch
from embedders import TEXTS  # pyright: ignore[reportAttributeAccessIssue]  # its neighbour
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer

HERE = Path(__file__).parent
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "torch_dtype": "bfloat16",
}
BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "num_hidden_layers": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
}
XLM_ROBERTA: dict[str, Any] = {
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "num_hidden_layers": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 1026,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "position_embedding_type": "absolute",
    "type_vocab_size": 1,
}
MODERNBERT: dict[str, Any] = {
    "architectures": ["ModernBertModel"],
    "model_type": "modernbert",
    "num_hidden_layers": 5,
    "hidden_activation": "gelu",
    "norm_eps": 1e-05,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "local_attention": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 3,
    "bos_token_id": 0,
    "cls_token_id": 0,
    "eos_token_id": 2,
    "sep_token_id": 2,
}
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "bert": (BERT, "mean"),
    "xlm_roberta": (XLM_ROBERTA, "cls"),
    "modernbert": (MODERNBERT, "cls"),
}


def main() -> None:
    torch.set_num_threads(1)
    for number, (name, (config, pooling)) in enumerate(FAMILIES.items()):
        write(HERE / f"encoder_{name}", SIZES | config, pooling, seed=21 + number)


def write(folder: Path, config: dict[str, Any], pooling: str, seed: int) -> None:
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    put(folder / "config.json", config)
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(steps)
    ]
    put(folder / "modules.json", modules)
    put(folder / "sentence_bert_config.json", {"max_seq_length": 1000, "do_lower_case": False})
    flags = {
        "word_embedding_dimension": 64,
        "pooling_mode_cls_token": pooling == "cls",
        "pooling_mode_mean_tokens": pooling == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    put(folder / "1_Pooling" / "config.json", flags)
    if config["model_type"] == "bert":
        write_words(folder)
    else:
        write_bytes(folder)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModel.from_config(loaded(folder)).float().eval()
    kept = {k: v for k, v in model.state_dict().items() if not k.startswith("pooler.")}
    tensors = {k: drawn(k, kept[k].shape, generator) for k in sorted(kept)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _ = model.load_state_dict(tensors, strict=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
        pooled = hidden[0] if pooling == "cls" else hidden.mean(0)
        vector = [round(x, 8) for x in (pooled / pooled.norm()).tolist()]
        rows.append({"text": text, "ids": ids, "embedding": vector})
    _ = (folder / "oracle.json").write_text(json.dumps(rows, separators=(",", ":")) + "\n")
    vectors = torch.tensor([row["embedding"] for row in rows])
    print(folder.name, "cosines", (vectors @ vectors.T).round(decimals=2).tolist())


def loaded(folder: Path) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    return config


def drawn(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name.lower() and name.endswith("weight"):
        noise = 1 + 0.2 * noise
    elif noise.ndim == 1:
        noise = 0.1 * noise
    elif "embeddings" not in name:
        noise = noise / shape[-1] ** 0.5
    return noise.to(torch.bfloat16)


def write_words(folder: Path) -> None:
    """WordPiece over letters, as BERT's: text in lower case, without accents."""
    letters = string.ascii_lowercase + string.digits + string.punctuation
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {name: n for n, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    finish(tokenizer, folder, "[CLS]", "[SEP]", "[PAD]", names[:4])


def write_bytes(folder: Path) -> None:
    special = ["<s>", "<pad>", "</s>", "[PAD]"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*special, *alphabet]
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    finish(tokenizer, folder, "<s>", "</s>", "<pad>", special)


def finish(
    tokenizer: Tokenizer, folder: Path, start: str, end: str, pad: str, special: list[str]
) -> None:
    tokenizer.add_special_tokens(special)
    ids = [(name, tokenizer.token_to_id(name)) for name in (start, end)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", pair=f"{start} $A {end} $B {end}", special_tokens=ids
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    put(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "cls_token": start,
            "sep_token": end,
            "pad_token": pad,
            "model_max_length": 1000,
        },
    )


def put(path: Path, value: object) -> None:
    _ = path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
