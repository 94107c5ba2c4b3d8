"""Writes a tiny embedder in the layout of Qwen3-Embedding's repositories, and its embeddings.

    VENV/bin/python tests/oracle/embedders.py

Not run by the tests, which need no torch; see `generate.py`. The folder gets what the publisher's
repository has: a bare backbone's tensors, without `model.` before their names and without lm_head,
and a tokenizer that puts its end token behind every text. `oracle.json` has inputs with the ids of
that tokenizer and the embeddings that transformers computes of each alone, in float32: the hidden
state of the last token behind the final norm, divided by its length.
"""

# pyright: basic, reportMissingImports=false

import json
from pathlib import Path
from typing import Any

import torch
from generate import filled
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, Qwen3Config, Qwen3Model

FOLDER = Path(__file__).parent / "qwen3_embedding"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 256
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": END,
    "eos_token_id": END,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 260,
}
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
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "1_Pooling").mkdir(exist_ok=True)
    _ = (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    pooling = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}
    _ = (FOLDER / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=1) + "\n")
    write_tokenizer()
    generator = torch.Generator().manual_seed(11)
    shapes = {
        k: v.shape for k, v in Qwen3Model(Qwen3Config.from_pretrained(FOLDER)).state_dict().items()
    }
    tensors = {k: filled(k, shapes[k], generator, False) for k in sorted(shapes)}
    save_file(tensors, FOLDER / "model.safetensors", {"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModel.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rows = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == END
        with torch.no_grad():
            hidden = model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]
        vector = [round(x, 8) for x in (hidden / hidden.norm()).tolist()]
        rows.append({"text": text, "ids": ids, "embedding": vector})
    _ = (FOLDER / "oracle.json").write_text(json.dumps(rows, separators=(",", ":")) + "\n")
    vectors = torch.tensor([row["embedding"] for row in rows])
    print("cosines", (vectors @ vectors.T).round(decimals=2).tolist())


def write_tokenizer() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"$A {SPECIAL[0]}", special_tokens=[(SPECIAL[0], END)]
            ),
        ]
    )
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": SPECIAL[0],
        "model_max_length": 4096,
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    _ = (FOLDER / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main()
