"""A GGUF file's tokenizer, chat template and generation settings as the files of a checkpoint.

The expressions that divide a text before its merges are those in the publishers' tokenizer.json.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from ....placement.errors import InvalidCheckpoint
from ...checkpoint.gguf_file import MAX_ENTRIES, GgufFile, Value
from ...checkpoint.headers import quote

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
"""Kinds of tokens, `tokenizer.ggml.token_type`."""
_MAX_PIECE: Final = 128
"""Longer pieces, which no vocabulary is known to have, are never made by merges."""
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS: Final = r"\p{Lm}\p{Lo}\p{M}"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]*[\p{{Ll}}{_LETTERS}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]+[\p{{Ll}}{_LETTERS}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(expression: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}
    return [split | {"invert": False}, _BYTES | {"use_regex": False}]


_GPT2: Final = [_BYTES | {"use_regex": True}]
_LLAMA3: Final = _split(_WORDS.replace("NUMBERS", "{1,3}"))
_QWEN2: Final = _split(_WORDS.replace("NUMBERS", ""))
_PRE_TOKENIZERS: Final[dict[str, list[dict[str, Any]]]] = {
    "gpt-2": _GPT2,
    "smollm": [{"type": "Digits", "individual_digits": True}, *_GPT2],
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _split(_TEKKEN),
}
_ENDS: Final = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>",
     "<|end_of_text|>", "</s>", "<eos>")
)  # fmt: skip
"""Control tokens that end an answer, whatever the file calls its end token."""
_SAMPLING: Final = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip

_DEFAULTS: Final = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's sampling where a file has none, as most do:
https://github.com/ggml-org/llama.cpp/tree/master/tools/server"""


def text_files(file: GgufFile) -> dict[str, dict[str, Any]]:
    """The files by name, as JSON values. Raises InvalidCheckpoint."""
    return _Tokenizer(file).files()


class _Tokenizer:
    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._tokens = self._list("tokens", str)
        self._kinds = self._list("token_type", int) or [1] * len(self._tokens)
        self._ids = {token: id for id, token in enumerate(self._tokens)}
        if not self._tokens or len(self._kinds) != len(self._tokens):
            raise file.fault("has no tokens, or another number of token types")
        if len(self._ids) != len(self._tokens):
            raise file.fault("has a token twice in tokenizer.ggml.tokens")

    def files(self) -> dict[str, dict[str, Any]]:
        whole, begins = self._whole()
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {name: self._id(f"{key}_token_id") for name, key in keys.items()}
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": begins,
            **{f"{name}_token": self._tokens[id] for name, id in ids.items() if id is not None},
        }
        template = self._file.values.get("tokenizer.chat_template")
        if isinstance(template, str) and template:
            config["chat_template"] = template
        return {
            "tokenizer.json": whole,
            "tokenizer_config.json": config,
            "generation_config.json": self._generation(ids),
        }

    def _generation(self, ids: Mapping[str, int | None]) -> dict[str, Any]:
        """End tokens, and the sampling that the file wants, over llama.cpp's own."""
        named = (self._id(f"{key}_token_id") for key in ("eos", "eot", "eom"))
        controls = {i for i, kind in enumerate(self._kinds) if kind == _CONTROL}
        texts = {i for i in controls if self._tokens[i] in _ENDS}
        ends = sorted({i for i in named if i is not None} | texts)
        settings: dict[str, Any] = {"eos_token_id": ends, "do_sample": True, **_DEFAULTS}
        if ids["bos"] is not None:
            settings["bos_token_id"] = ids["bos"]
        for key, name in _SAMPLING.items():
            value = self._file.values.get(f"general.sampling.{key}")
            if isinstance(value, int | float) and not isinstance(value, bool):
                settings[name] = round(value, 6)
        return settings

    def _whole(self) -> tuple[dict[str, Any], bool]:
        """tokenizer.json, and whether a text begins with the BOS token."""
        match self._file.values.get("tokenizer.ggml.model"):
            case "gpt2":
                return self._byte_level()
            case "llama":
                return self._sentence_piece()
            case other:
                raise self._refused("tokenizer.ggml.model", other, "gpt2 and llama")

    def _byte_level(self) -> tuple[dict[str, Any], bool]:
        pre = self._file.values.get("tokenizer.ggml.pre")
        steps = _PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
        if steps is None:
            raise self._refused("tokenizer.ggml.pre", pre, ", ".join(_PRE_TOKENIZERS))
        model = {
            "type": "BPE",
            "byte_fallback": False,
            "ignore_merges": steps is _LLAMA3 or pre == "tekken",
            "vocab": {t: id for t, id in self._ids.items() if self._kinds[id] != _UNUSED},
            "merges": self._merges(),
        }
        begins = self._flag("add_bos_token", steps is _LLAMA3)
        whole = {
            "normalizer": {"type": "NFC"} if steps is _QWEN2 else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": _BYTES | {"use_regex": True},
            "model": model,
        }
        return self._with_ends(whole, begins), begins

    def _merges(self) -> list[list[str]]:
        merges = [merge.split(" ") for merge in self._list("merges", str)]
        for pair in merges:
            if len(pair) != 2 or not {*pair, "".join(pair)} <= self._ids.keys():
                raise self._file.fault(f"has a merge of unknown tokens, {quote(' '.join(pair))}")
        return merges

    def _sentence_piece(self) -> tuple[dict[str, Any], bool]:
        scores = self._list("scores", float)
        if len(scores) != len(self._tokens):
            raise self._file.fault("has another number of scores than of tokens")
        prefix = self._flag("add_space_prefix", True)
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._id("unknown_token_id")
        if unknown is None and _UNKNOWN in self._kinds:
            unknown = self._kinds.index(_UNKNOWN)
        before = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
        whole = {
            "normalizer": {"type": "Sequence", "normalizers": [*before, replace]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "unk_token": None if unknown is None else self._tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": self._ids,
                "merges": self._merges_of(scores),
            },
        }
        begins = self._flag("add_bos_token", True)
        return self._with_ends(whole, begins), begins

    def _merges_of(self, scores: Sequence[float]) -> list[list[str]]:
        """All pairs of tokens that make a token, as SentencePiece takes them: the best score first.

        Of one token its divisions come in the order of the vocabulary.
        """
        pairs: list[tuple[float, int, int, int]] = []
        for token, id in self._ids.items():
            if self._kinds[id] in (_CONTROL, _UNKNOWN, _UNUSED) or len(token) > _MAX_PIECE:
                continue
            if len(pairs) > MAX_ENTRIES:
                raise self._file.fault(f"has tokens that make over {MAX_ENTRIES} merges")
            for cut in range(1, len(token)):
                left, right = self._ids.get(token[:cut]), self._ids.get(token[cut:])
                if left is not None and right is not None:
                    pairs.append((-scores[id], id, left, right))
        return [[self._tokens[left], self._tokens[right]] for _, _, left, right in sorted(pairs)]

    def _with_ends(self, whole: dict[str, Any], begins: bool) -> dict[str, Any]:
        """Adds control tokens, which no merge makes, and the BOS token in front of a text."""
        special = {_CONTROL, _UNKNOWN}
        added = [
            {"id": id, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": kind in special}
            for id, (token, kind) in enumerate(zip(self._tokens, self._kinds, strict=True))
            if kind in (*special, _USER_DEFINED)
        ]  # fmt: skip
        whole = {
            "version": "1.0",
            "added_tokens": added,
            "truncation": None,
            "padding": None,
            **whole,
        }
        bos = self._id("bos_token_id")
        sequence = [{"Sequence": {"id": "A", "type_id": 0}}]
        if not begins or bos is None:
            return whole | {"post_processor": None}
        token = self._tokens[bos]
        first = {"SpecialToken": {"id": token, "type_id": 0}}
        template = {
            "type": "TemplateProcessing",
            "single": [first, *sequence],
            "pair": [first, *sequence, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
        }
        return whole | {"post_processor": template}

    def _list(self, key: str, kind: type) -> list[Any]:
        value: Value = self._file.values.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise self._file.fault(f"has a tokenizer.ggml.{key} of another type")
        return value

    def _id(self, key: str) -> int | None:
        value = self._file.values.get(f"tokenizer.ggml.{key}")
        if value is None or (isinstance(value, int) and 0 <= value < len(self._tokens)):
            return cast("int | None", value)
        raise self._file.fault(f"has tokenizer.ggml.{key} = {quote(value)}")

    def _flag(self, key: str, default: bool) -> bool:
        value = self._file.values.get(f"tokenizer.ggml.{key}", default)
        return value if isinstance(value, bool) else default

    def _refused(self, key: str, value: object, supported: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(
            f"{self._file.path.name} has {key} = {quote(value)}, and `exo-node models import` "
            f"knows {supported}; `exo-node models pull OWNER/NAME` gets the model in safetensors",
            param=key,
        )
