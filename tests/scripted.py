"""A checkpoint that acts out a script: it calls tools in order, and then says a text.

Its weights are constructed, not trained. The embedding of a token that matters is a direction of
its own, and the last token decides the next one. The prompt of an answer ends with a token for the
number of results that tools have given, so whatever a client sends, after any number of tokens and
at any temperature, the answer is the same.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
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
_HEADS, _KV_HEADS, _WIDTH = 4, 2, 16
Call = tuple[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Script:
    """The answers: the calls of tools, one each with its arguments, and `text` after the last.

    Without a call every answer is `text`.
    """

    text: str
    call: Call | None = None
    further_calls: tuple[Call, ...] = ()

    @property
    def steps(self) -> list[list[str]]:
        """The tokens of each answer. No token is in two of them: further calls are one each."""
        call, further = self.call, [["".join(_tokens_of(each))] for each in self.further_calls]
        return [*([] if call is None else [_tokens_of(call)]), *further, [self.text]]


def _tokens_of(call: Call) -> list[str]:
    name, arguments = call
    fields = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return ["<tool_call>", f"\n<function={name}>\n{fields}</function>\n", "</tool_call>"]


def make_scripted(folder: Path, script: Script, context: int = CONTEXT, check: str = "") -> Path:
    """Writes the checkpoint into `folder`, which is made, and returns it.

    `check`: what its template does before it renders messages, such as to refuse some.
    """
    folder.mkdir(parents=True)
    steps = script.steps
    begins = [f"<step_{number}>" for number in range(len(steps))]
    tokens = dict.fromkeys((*_CONTROL, *begins, *chain(*steps)))
    ids = {token: _ORDINARY + number for number, token in enumerate(tokens)}
    vocabulary = (_ORDINARY + len(ids) + 15) // 16 * 16
    hidden = (sum(map(len, steps)) + len(steps) + 64) // 64 * 64
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _WIDTH,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e9,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "eos_token_id": [_END],
    }
    _ = (folder / "config.json").write_text(json.dumps(config))
    _write_text_files(folder, ids, check, len(steps) - 1)
    pairs = zip(begins, steps, strict=True)
    chains = [[ids[token] for token in (begin, *step)] for begin, step in pairs]
    weights = _layer(hidden) | _script_weights(chains, vocabulary, hidden)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _write_text_files(folder: Path, ids: Mapping[str, int], check: str, last: int) -> None:
    """The demo's tokenizer with these tokens, and the template with the step's token at its end.

    A step for each result that tools have given, up to the `last` one.
    """
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
    count = "messages | selectattr('role', 'equalto', 'tool') | list | length"
    begin = f"<|im_start|>assistant\n<step_{{{{ [{count}, {last}] | min }}}}>"
    end = f"{{%- if add_generation_prompt %}}{begin}{{% endif %}}"
    _ = (folder / "chat_template.jinja").write_text(check + messages + end)


def _script_weights(chains: list[list[int]], vocabulary: int, hidden: int) -> dict[str, mx.array]:
    """The embedding of each token, and in the head the one that follows it."""
    embedding, head = mx.zeros((vocabulary, hidden)), mx.zeros((vocabulary, hidden))
    embedding[:, 0] = 1
    pairs = chain.from_iterable(pairwise([*each, _END]) for each in chains)
    for direction, (id, follower) in enumerate(pairs, 1):
        embedding[id, direction] = 1
        head[follower, direction] = 10
    return {"model.embed_tokens.weight": embedding, "lm_head.weight": head}


def _layer(hidden: int) -> dict[str, mx.array]:
    """One layer that adds nothing."""
    layer, ones = "model.layers.0", mx.ones((hidden,))
    heads, kv_heads = _HEADS * _WIDTH, _KV_HEADS * _WIDTH
    shapes = {
        "q": (heads, hidden),
        "k": (kv_heads, hidden),
        "v": (kv_heads, hidden),
        "o": (hidden, heads),
    }
    return {
        **{
            f"{layer}.self_attn.{name}_proj.weight": mx.zeros(shape)
            for name, shape in shapes.items()
        },
        **{
            f"{layer}.mlp.{n}_proj.weight": mx.zeros((hidden, hidden))
            for n in ("gate", "up", "down")
        },
        **dict.fromkeys(
            (f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"), ones
        ),
        "model.norm.weight": ones,
    }
