"""A checkpoint that acts out a script: it calls a tool, and after the tool's result says a text.

Its weights are constructed, not trained. The embedding of a token that matters is a direction of
its own, so that the last token decides the next one; one attention head finds out whether the
prompt has a tool's result. Whatever a client sends, behind any number of tokens and at any
temperature, the answer is the same.
"""

# mlx's stubs leave the types of save_safetensors partly unknown.
# pyright: reportUnknownMemberType=false

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from models import DEMO

TEMPLATE = Path(__file__).parent / "templates" / "qwen.jinja"
CONTEXT = 131_072
_ORDINARY = 4096
"""Tokens of the demo's vocabulary."""
_CONTROL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_END = 4095
_NEWLINES = (198, 336)
"""The template's prompt of an answer ends with one of them."""
_HIDDEN, _HEADS, _KV_HEADS, _WIDTH = 64, 4, 2, 16
_ANY, _PROMPT, _RESULT, _SEEN, _FIRST = range(5)
"""Directions: of every token, of the last one of a prompt, of a tool's result, of having seen one,
and of the first token of the script."""
_SLOWEST = _WIDTH // 2 - 1
"""The dimension of a head that the rotary embedding turns least: by 0.002 over the context."""


@dataclass(frozen=True, slots=True)
class Script:
    """The answers: a `call` of a tool with its arguments, if any, and `text` once it has a result.

    Without a call every answer is `text`.
    """

    text: str
    call: tuple[str, Mapping[str, str]] | None = None

    @property
    def call_tokens(self) -> tuple[str, ...]:
        if self.call is None:
            return ()
        name, arguments = self.call
        fields = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        return "<tool_call>", f"\n<function={name}>\n{fields}</function>\n", "</tool_call>"


def make_scripted(folder: Path, script: Script, context: int = CONTEXT, check: str = "") -> Path:
    """Writes the checkpoint into `folder`, which is made, and returns it.

    `check`: what its template does before it renders messages, such as to refuse some.
    """
    folder.mkdir(parents=True)
    tokens = dict.fromkeys((*_CONTROL, *script.call_tokens, script.text))
    ids = {token: _ORDINARY + number for number, token in enumerate(tokens)}
    vocabulary = (_ORDINARY + len(ids) + 15) // 16 * 16
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": _HIDDEN,
        "intermediate_size": _HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _WIDTH,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e9,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "eos_token_id": _END,
    }
    _ = (folder / "config.json").write_text(json.dumps(config))
    _write_text_files(folder, ids, check)
    weights = _layer() | _script_weights(script, ids, vocabulary)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _write_text_files(folder: Path, ids: Mapping[str, int], check: str) -> None:
    """The demo's tokenizer with these tokens, and a template as Qwen's, without thoughts."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    some: dict[str, Any] = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**some, "id": id, "content": token, "special": False} for token, id in ids.items()
    ]
    _ = (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    _ = config.pop("chat_template"), config.pop("model_max_length")
    _ = (folder / "tokenizer_config.json").write_text(json.dumps(config))
    messages = TEMPLATE.read_text().partition("{%- if add_generation_prompt")[0]
    end = "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    _ = (folder / "chat_template.jinja").write_text(check + messages + end)


def _script_weights(script: Script, ids: Mapping[str, int], vocabulary: int) -> dict[str, mx.array]:
    """The embedding of each token, and in the head the one that follows it."""
    embedding, head = mx.zeros((vocabulary, _HIDDEN)), mx.zeros((vocabulary, _HIDDEN))
    embedding[:, _ANY] = 1
    for id in _NEWLINES:
        embedding[id, _PROMPT] = 1
    embedding[ids["<tool_response>"], _RESULT] = 1
    call, text = [ids[token] for token in script.call_tokens], [ids[script.text]]
    head[(call or text)[0], _PROMPT] = 10
    if call:
        head[text[0], _SEEN] = 10
    chains = [*pairwise([*call, _END]), *pairwise([*text, _END])]
    for direction, (id, follower) in enumerate(chains, _FIRST):
        embedding[id, direction] = 1
        head[follower, direction] = 10
    return {"model.embed_tokens.weight": embedding, "lm_head.weight": head}


def _layer() -> dict[str, mx.array]:
    """One layer: its first head asks, at the last token of a prompt, for a tool's result.

    The score of a result is above 30, that of other tokens 0: a result among 131,072 tokens gets
    nearly all of the attention.
    """
    query, output = mx.zeros((_HEADS * _WIDTH, _HIDDEN)), mx.zeros((_HIDDEN, _HEADS * _WIDTH))
    key, value = (mx.zeros((_KV_HEADS * _WIDTH, _HIDDEN)) for _ in range(2))
    query[_SLOWEST, _PROMPT] = key[_SLOWEST, _RESULT] = 2
    value[0, _RESULT] = 1
    output[_SEEN, 0] = 0.5
    layer, ones = "model.layers.0", mx.ones((_HIDDEN,))
    projections = {"q": query, "k": key, "v": value, "o": output}
    return {
        **{f"{layer}.self_attn.{name}_proj.weight": each for name, each in projections.items()},
        **{
            f"{layer}.mlp.{n}_proj.weight": mx.zeros((_HIDDEN, _HIDDEN))
            for n in ("gate", "up", "down")
        },
        **dict.fromkeys(
            (f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"), ones
        ),
        "model.norm.weight": ones,
    }
