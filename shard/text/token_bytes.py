"""The bytes of a token, by which log-probabilities name it."""

from collections.abc import Callable
from typing import Any

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

TokenBytes = Callable[[int], bytes]
_SPACE = "\u2581"


def token_bytes(tokenizer: TokenizerWrapper, *, with_control: bool = False) -> TokenBytes:
    """A function from this tokenizer's ids to their bytes; none for control and unknown ids.

    `with_control`: control tokens have the bytes of their names.

    Byte-level vocabularies spell each byte as one character, SentencePiece ones a space as U+2581
    and a lone byte as <0x..>. With any other kind a token is decoded by itself, so a part of a
    character becomes U+FFFD.
    """
    special = () if with_control else tokenizer.all_special_ids
    control = frozenset(int(token) for token in special)
    detokenizer: Any = tokenizer.detokenizer
    match detokenizer:
        case BPEStreamingDetokenizer():
            spell = _byte_level
        case SPMStreamingDetokenizer():
            spell = _sentence_piece
        case _:
            return lambda token: b"" if token in control else tokenizer.decode([token]).encode()
    names = tokenizer.convert_ids_to_tokens

    def bytes_of(token: int) -> bytes:
        name: str | None = None if token in control else names(token)
        return b"" if name is None else spell(name)

    return bytes_of


def longest_token(tokenizer: TokenizerWrapper) -> int:
    """Bytes of the longest token, or more if the vocabulary's spelling is not known."""
    names: Any = tokenizer.get_vocab()
    if not isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer):
        return max((len(name.encode()) for name in names), default=1)
    # A byte-level vocabulary spells a byte as a character, and added tokens as themselves.
    added: Any = tokenizer.added_tokens_decoder.values()
    return max((*map(len, names), *(len(token.content.encode()) for token in added)), default=1)


_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def _byte_level(name: str) -> bytes:
    # Added tokens are spelled as themselves, outside the table.
    if any(character not in _BYTES for character in name):
        return name.encode()
    return bytes(_BYTES[character] for character in name)


def _sentence_piece(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes.fromhex(name[3:5])
    return name.replace(_SPACE, " ").encode()
