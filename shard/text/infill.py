"""Fill in the middle: a prompt of the text in front of a gap and the text after it."""

from typing import Any, Final

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .control_tokens import first_characters

_PREFIX, _SUFFIX = 0, 1
"""The places of the two texts in a form."""
_Form = tuple[str | int, ...]

FORMS: Final[tuple[_Form, ...]] = (
    # Qwen, CodeGemma, newer Granite
    ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),
    # StarCoder, older Granite
    ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),
    # DeepSeek
    (
        "<\uff5cfim\u2581begin\uff5c>",
        _PREFIX,
        "<\uff5cfim\u2581hole\uff5c>",
        _SUFFIX,
        "<\uff5cfim\u2581end\uff5c>",
    ),
    # GLM
    ("<|code_prefix|>", _PREFIX, "<|code_suffix|>", _SUFFIX, "<|code_middle|>"),
    # Codestral and Seed-Coder, which were trained with the suffix in front
    ("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX),
    ("<[fim-suffix]>", _SUFFIX, "<[fim-prefix]>", _PREFIX, "<[fim-middle]>"),
)
"""The tokens of each family, and the order of the texts between them, as their publishers have
them. A tokenizer has the form of which it has all tokens."""

OTHER_ENDS: Final = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|fim_pad|>",
    "<fim_pad>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<file_sep>",
    "<|repo_name|>",
    "<repo_name>",
    "<reponame>",
    "<|EOT|>",
    "[MIDDLE]",
)
"""Tokens that end what was filled in, beside the form's own: another file begins, or nothing."""

_ANCHOR: Final = "\n"


class Infill:
    """The form of a tokenizer, and the ids of prompts in it."""

    def __init__(self, tokenizer: TokenizerWrapper, form: _Form, tokens: dict[str, int]) -> None:
        """`tokens`: the ids of the added tokens by their text."""
        self._tokenizer = tokenizer
        self._form = form
        self._tokens = tokens
        names = [name for name in (*form, *OTHER_ENDS) if isinstance(name, str) and name in tokens]
        self.ends = frozenset(tokens[name] for name in names)
        """The ids that end an answer, beside the model's own end tokens."""
        added: Any = tokenizer.added_tokens_decoder.values()
        special = {str(token.content) for token in added if token.special}
        self._control = first_characters({*names, *special})
        first = tokenizer.convert_ids_to_tokens(self._encode("a")[:1])
        self._adds_space = any(token.startswith("\u2581") for token in first)
        """Whether a space is put in front of each text, as SentencePiece does."""

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> "Infill | None":
        """None for a tokenizer that has no form."""
        added: Any = tokenizer.added_tokens_decoder
        tokens = {str(token.content): int(number) for number, token in added.items()}
        for form in FORMS:
            if all(name in tokens for name in form if isinstance(name, str)):
                return cls(tokenizer, form, tokens)
        return None

    def encode(self, prefix: str, suffix: str) -> list[int]:
        """The ids of a prompt, after the BOS token where the tokenizer has one in front of texts.

        Both are plain text: a control token that they spell is encoded as other text is.
        """
        ids = self._bos()
        for piece in self._form:
            if isinstance(piece, str):
                ids.append(self._tokens[piece])
            else:
                ids += self._plain((prefix, suffix)[piece], follows=piece == _SUFFIX)
        return ids

    def _bos(self) -> list[int]:
        first: list[int] = self._tokenizer.encode("", add_special_tokens=True)[:1]
        return first if first == [self._tokenizer.bos_token_id] else []

    def _plain(self, text: str, *, follows: bool) -> list[int]:
        """The ids of a text, in parts that spell no control token. `follows`: it is after another
        text."""
        ids, begin = list[int](), 0
        for end in [*(match.end() for match in self._control.finditer(text)), len(text)]:
            part, begin = text[begin:end], end
            ids += self._following(part) if follows or ids else self._encode(part)
        return ids

    def _following(self, text: str) -> list[int]:
        """The ids of a text after another one: without a space that the tokenizer adds."""
        if not self._adds_space:
            return self._encode(text)
        anchor, both = self._encode(_ANCHOR), self._encode(_ANCHOR + text)
        return both[len(anchor) :] if both[: len(anchor)] == anchor else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]
