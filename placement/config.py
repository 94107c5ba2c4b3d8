"""Reads a checkpoint's config.json as the hostile input that it may be."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard, cast

from .errors import InvalidCard

MAX_LAYERS = 1024
MAX_WIDTH = 65536
"""The widest hidden state, head and the like; also the most heads and experts."""
MAX_VOCAB = 2**21
MAX_CONTEXT = 2**24
MAX_STREAMS = 16
MAX_EXPERT_WIDTH = 2**20
MAX_KV_ROW = 2**24

Facts = Mapping[str, object]

_DTYPES = ("float32", "bfloat16", "float16")
_BITS_OF_METHOD = {"mxfp8": 8, "mxfp4": 4, "nvfp4": 4}
_EXPANDED = ("deepseek_v2", "minicpm3", "youtu_llm")
"""Model types with latent attention whose cache in mlx-lm holds each head's key and value."""

ENCODERS = ("bert", "modernbert", "roberta", "xlm-roberta")
"""Model types whose rows attend to all rows of a text: they embed, and keep no KV cache."""

LAYER_FIELDS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers")
"""A number's names in config.json, the usual one first: early publishers chose their own."""
HIDDEN_FIELDS = ("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim")
VOCABULARY_FIELDS = ("vocab_size", "num_vocab")
HEAD_FIELDS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
_KV_HEAD_FIELDS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_n_heads")
_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "max_context_length",
    "block_size",
)
_RECURRENT_FIELDS = ("state_size", "ssm_state_size", "d_state", "decay_low_rank_dim")
_LISTED = ("num_query_heads", "num_kv_heads")
"""OpenELM has a number of heads for each layer."""
_PARTS = ("attn_config", "ffn_config")
"""Tables inside the model's own that DBRX keeps its attention and experts in."""


def config_facts(config: Facts, overrides: Facts) -> dict[str, object]:
    """Every field of a card that `config` decides and `overrides` leaves open.

    Raises InvalidCard naming `config.json: field` and the line for exo-card.toml that mends it.
    """
    look = _Look(config)
    facts: dict[str, object] = {}
    for fact, read in _READERS.items():
        if fact not in overrides:
            facts[fact] = read(look, {**facts, **overrides})
    return facts


class _Look:
    """Typed look-ups; of a multi-modal model the text half wins."""

    def __init__(self, config: Facts) -> None:
        text = config.get("text_config")
        self.whole = config
        self.text: Facts = {} if text is None else table("text_config", text)
        parts = (config[name] for name in _PARTS if isinstance(config.get(name), Mapping))
        self._tables = (self.text, config, *(cast(Facts, part) for part in parts))

    def find(self, *fields: str) -> tuple[str, object]:
        """The first of `fields` that is set, and its value; the first name and None if none is."""
        for field in fields:
            for part in self._tables:
                if part.get(field) is not None:
                    return field, part[field]
        return fields[0], None

    def count(self, fact: str, *fields: str, limit: int, least: int = 1) -> int | None:
        """A whole number in [least, limit] for the card's `fact`; None where absent."""
        field, value = self.find(*fields)
        if value is None:
            return None
        if not _is_whole(value) or not least <= value <= limit:
            raise _fault(field, value, f"a whole number from {least} to {limit}", fact)
        return value

    def heads(self, fact: str, *fields: str) -> int | None:
        """Heads of a layer; the most, where each layer has a number of its own."""
        field, value = self.find(*fields)
        if field not in _LISTED or not isinstance(value, list):
            return self.count(fact, *fields, limit=MAX_WIDTH)
        counts = cast("list[object]", value)
        if not counts or not all(_is_whole(each) and 1 <= each <= MAX_WIDTH for each in counts):
            raise _fault(field, counts, f"whole numbers from 1 to {MAX_WIDTH}", fact)
        return max(each for each in counts if _is_whole(each))

    @property
    def is_recurrent(self) -> bool:
        """Whether no layer has attention, as in Mamba and RWKV: states, and no heads of attention.

        Mamba 2 calls its states' heads num_heads.
        """
        states = self.find(*_RECURRENT_FIELDS)[1] is not None
        return states and self.find("num_attention_heads")[1] is None


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _needed(fact: str, fields: Sequence[str], limit: int) -> Callable[[_Look, Facts], int]:
    def read(look: _Look, _facts: Facts) -> int:
        value = look.count(fact, *fields, limit=limit)
        if value is None:
            raise _missing(fields[0], fact)
        return value

    return read


def hidden_size(config: Facts) -> int:
    """The width of what layers pass on by config.json alone; InvalidCard where it does not say."""
    look = _Look(config)
    return _hidden(look, {}) * _streams(look, {})


def vocabulary_size(config: Facts) -> int:
    """The ids that the model knows by config.json alone; InvalidCard where it does not say."""
    return _vocabulary(_Look(config), {})


def context_length(config: Facts) -> int:
    """The tokens that the model reads by config.json alone; InvalidCard where it does not say."""
    return _context(_Look(config), {"model_type": config.get("model_type")})


_hidden = _needed("hidden_size", HIDDEN_FIELDS, MAX_WIDTH)
_vocabulary = _needed("vocab_size", VOCABULARY_FIELDS, MAX_VOCAB)


def _streams(look: _Look, _facts: Facts) -> int:
    return look.count("hidden_streams", "hc_count", limit=MAX_STREAMS) or 1


def _context(look: _Look, facts: Facts) -> int:
    value = look.count("context_length", *_CONTEXT_FIELDS, limit=MAX_CONTEXT)
    if value is not None and str(facts["model_type"]).endswith("roberta"):
        # RoBERTa's positions begin after the padding's.
        padding = look.count("context_length", "pad_token_id", limit=MAX_VOCAB, least=0)
        value = max(1, value - (1 if padding is None else padding) - 1)
    if value is not None:
        return value
    if look.is_recurrent:  # nothing grows with the text, and no position is encoded
        return MAX_CONTEXT
    raise _missing(_CONTEXT_FIELDS[0], "context_length")


def _expert_count(look: _Look, _facts: Facts) -> int:
    fields = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return look.count("num_experts", *fields, limit=MAX_WIDTH, least=0) or 0


def _expert_fact(fact: str, *fields: str, limit: int) -> Callable[[_Look, Facts], int]:
    def read(look: _Look, facts: Facts) -> int:
        # A dense model's `intermediate_size` is no expert's.
        if not facts["num_experts"]:
            return 0
        return look.count(fact, *fields, limit=limit, least=0) or 0

    return read


def _model_type(look: _Look, _facts: Facts) -> str:
    # The outer name, where there are two: `qwen3_5`, not its text half's `qwen3_5_text`.
    value = look.whole.get("model_type")
    if not isinstance(value, str):
        raise _fault("model_type", value, "a name such as qwen3_5", "model_type")
    return value


def _attention_layers(look: _Look, facts: Facts) -> int:
    """Layers with a KV cache; where config.json has no list, all of them (so never too few)."""
    fact, layers = "num_attention_layers", facts["num_layers"]
    if not isinstance(layers, int):
        return 0  # the card at fault is refused a moment later, by its schema
    if look.is_recurrent or facts["model_type"] in ENCODERS:
        return 0
    _, value = look.find("layer_types")
    if value is None:
        interval = look.count(fact, "full_attention_interval", limit=MAX_LAYERS)
        return layers if interval is None else layers // interval
    types = _list(value)
    if len(types) < layers or not all(isinstance(kind, str) for kind in types):
        raise _fault("layer_types", value, f"a list of {layers} names", fact)
    # Some configs list the MTP head's layers after the backbone's.
    return sum(map(_holds_cache, types[:layers]))


def _list(value: object) -> list[object]:
    return cast(list[object], value) if isinstance(value, list) else []


def _holds_cache(layer_type: object) -> bool:
    name = str(layer_type)
    return name.endswith("attention") and not name.startswith("linear")


def _kv_heads(look: _Look, _facts: Facts) -> int:
    if look.is_recurrent:
        return 1  # of which there is no layer
    fact = "num_key_value_heads"
    heads = look.heads(fact, *_KV_HEAD_FIELDS)
    if heads is None and look.find("multi_query")[1] is True:  # StarCoder: one for all
        return 1
    heads = look.heads(fact, *HEAD_FIELDS) if heads is None else heads
    if heads is None:
        raise _missing("num_attention_heads", "num_key_value_heads")
    return heads


def _head_dim(look: _Look, facts: Facts) -> int:
    if _latent(look):  # where head_dim may be there too, as the rotary part alone
        return sum(_key_parts(look, "head_dim"))
    head_dim = look.count("head_dim", "head_dim", limit=MAX_WIDTH)
    if head_dim is not None:
        return head_dim
    if look.is_recurrent:
        return 1
    heads = look.heads("head_dim", *HEAD_FIELDS)
    if heads is None:
        raise _missing(HEAD_FIELDS[0], "head_dim")
    hidden = facts["hidden_size"]
    return max(1, hidden // heads) if isinstance(hidden, int) else 1


def _latent(look: _Look) -> int:
    """Width of the latent that stands for all heads' keys and values, or 0 without one."""
    return look.count("kv_row_width", "kv_lora_rank", limit=MAX_WIDTH, least=0) or 0


def _key_parts(look: _Look, fact: str) -> tuple[int, int]:
    """The widths of a latent-attention key: the part without position, and the rotary part."""
    names = ("qk_nope_head_dim", "qk_rope_head_dim")
    plain, rotary = (look.count(fact, name, limit=MAX_WIDTH) for name in names)
    if plain is None or rotary is None:
        raise _missing(names[0] if plain is None else names[1], fact)
    return plain, rotary


def _kv_row_width(look: _Look, facts: Facts) -> int:
    """Numbers that a token adds to one layer's cache, where that is not a key and value a head.

    Latent attention in mlx-lm's deepseek_v3, and most that followed: the normed latent is kept in
    the place of keys and the rotary key, which all heads share, in that of values: kv_lora_rank +
    qk_rope_head_dim. A prefill expands them for one forward only. deepseek_v32's indexer keeps a
    key of its own, and zeros of its size. A few model types expand before they cache.
    """
    latent = _latent(look)
    if not latent:  # Qwen3.8-Flash-Next keeps two of its indexer's keys beside them, and a position
        index = look.count("kv_row_width", "indexer_head_dim", limit=MAX_WIDTH)
        parts = facts["num_key_value_heads"], facts["head_dim"]
        return 2 * (math.prod(cast("tuple[int, int]", parts)) + index) + 9 if index else 0
    plain, rotary = _key_parts(look, "kv_row_width")
    if look.text.get("model_type", facts["model_type"]) in _EXPANDED:
        heads = look.count("kv_row_width", "num_attention_heads", limit=MAX_WIDTH)
        if heads is None:
            raise _missing("num_attention_heads", "kv_row_width")
        key = plain + rotary
        return heads * (key + (look.count("kv_row_width", "v_head_dim", limit=MAX_WIDTH) or key))
    index = look.count("kv_row_width", "index_head_dim", limit=MAX_WIDTH) or 0
    return latent + rotary + 2 * index


def _tied(look: _Look, facts: Facts) -> bool:
    if facts["model_type"] in ENCODERS:  # which have no lm_head
        return True
    field, value = look.find("tie_word_embeddings")
    if value is not None and not isinstance(value, bool):
        raise _fault(field, value, "true or false", "tie_word_embeddings")
    return bool(value)


def _quantization(look: _Look, _facts: Facts) -> int | None:
    field, value = look.find("quantization", "quantization_config")
    if value is None:
        return None
    how = table(field, value)
    bits = _Look(how).count("quantization", "bits", limit=8)
    if bits is None and _fp8_that_stays(how):
        return 8
    return bits or _BITS_OF_METHOD.get(str(how.get("quant_method")))


def _fp8(look: _Look, facts: Facts) -> bool:
    """Whether mlx-lm turns FP8 into 16 bits on load, as DeepSeek-V3's classes do."""
    field, value = look.find("quantization", "quantization_config")
    if value is None or facts["quantization"] is not None:
        return False
    return table(field, value).get("quant_method") == "fp8"


def _fp8_that_stays(how: Facts) -> bool:
    # mlx-lm's load_model takes these blocks, with scales that are powers of two, for its mxfp8.
    blocks = how.get("scale_fmt"), how.get("weight_block_size")
    return how.get("quant_method") == "fp8" and blocks == ("ue8m0", [32, 32])


def _dtype(look: _Look, facts: Facts) -> str:
    field, value = look.find("dtype", "torch_dtype")
    if value is None:
        return "float32" if facts["model_type"] in ENCODERS else "bfloat16"
    if not isinstance(value, str) or value not in _DTYPES:
        raise _fault(field, value, "float32, bfloat16 or float16", "dtype")
    return value


def _capabilities(_look: _Look, facts: Facts) -> list[str]:
    return ["embeddings"] if facts["model_type"] in ENCODERS else []


# In order: a later one may use what an earlier one found.
_READERS: dict[str, Callable[[_Look, Facts], object]] = {
    "model_type": _model_type,
    "num_layers": _needed("num_layers", LAYER_FIELDS, MAX_LAYERS),
    "hidden_size": _hidden,
    "hidden_streams": _streams,
    "vocab_size": _vocabulary,
    "num_attention_layers": _attention_layers,
    "num_key_value_heads": _kv_heads,
    "head_dim": _head_dim,
    "kv_row_width": _kv_row_width,
    "context_length": _context,
    "tie_word_embeddings": _tied,
    "num_experts": _expert_count,
    "num_experts_per_tok": _expert_fact(
        "num_experts_per_tok",
        "num_experts_per_tok",
        "experts_per_token",
        "moe_top_k",
        "moe_topk",
        "moe_k",
        limit=MAX_WIDTH,
    ),
    "moe_intermediate_size": _expert_fact(
        "moe_intermediate_size",
        "moe_intermediate_size",
        "intermediate_size",
        "ffn_hidden_size",
        limit=MAX_EXPERT_WIDTH,
    ),
    "num_dense_layers": _expert_fact("num_dense_layers", "first_k_dense_replace", limit=MAX_LAYERS),
    "quantization": _quantization,
    "fp8": _fp8,
    "dtype": _dtype,
    "capabilities": _capabilities,
}


def table(field: str, value: object) -> Facts:
    """`value` as an object of config.json, or InvalidCard."""
    if not isinstance(value, Mapping):
        raise _fault(field, value, "an object", None)
    return cast(Facts, value)


def printable(value: object) -> str:
    """`value` for an error message, cut to 60 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, brackets nested too deep
        text = f"<{type(value).__name__}, too long to print>"
    return text if len(text) <= 60 else text[:57] + "..."


def _missing(field: str, fact: str) -> InvalidCard:
    return InvalidCard(
        f"config.json: {field} is missing; write `{fact} = …` into exo-card.toml",
        param=f"config.json: {field}",
    )


def _fault(field: str, value: object, expected: str, fact: str | None) -> InvalidCard:
    mend = "mend config.json" if fact is None else f"mend it or set {fact} in exo-card.toml"
    return InvalidCard(
        f"config.json: {field} is {printable(value)}, not {expected}; {mend}",
        param=f"config.json: {field}",
    )
