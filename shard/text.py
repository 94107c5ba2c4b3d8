"""Chat messages to ids, ids to text as it grows, and where an answer ends."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_config

from ..mtp.types import FinishReason
from ..placement.errors import InvalidCheckpoint, InvalidRequest


class TextCodec:
    """A checkpoint's tokenizer and chat template."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self.end_tokens = frozenset(int(token) for token in tokenizer.eos_token_ids)

    @classmethod
    def load(cls, folder: Path) -> "TextCodec":
        """Raises InvalidCheckpoint. Code in the checkpoint is never run."""
        try:
            eos = load_config(folder).get("eos_token_id")
            extra = {"trust_remote_code": False}
            return cls(load_tokenizer(folder, extra, eos_token_ids=eos))
        except (OSError, ValueError, KeyError, TypeError, ImportError) as fault:
            raise InvalidCheckpoint(
                f"the tokenizer of {folder.name} cannot be loaded: {fault}; download it again"
            ) from fault

    @property
    def special_tokens(self) -> tuple[int, ...]:
        """What XTC never removes: the end tokens and the newline, as in mlx-lm's server."""
        newline = self._tokenizer.encode("\n", add_special_tokens=False)
        return tuple(sorted({*self.end_tokens, *newline}))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the rendered chat, up to where the assistant's answer begins.

        Raises InvalidRequest where the template refuses these messages.
        """
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template; use a model that was trained for chat",
                param="model",
            )
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as fault:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {fault}", param="messages"
            ) from fault
        return [int(token) for token in ids]

    def stream(self, stop: Sequence[str], *, ignore_end: bool) -> "TextStream":
        """For one answer; `ignore_end` goes on past the model's end tokens (benchmarks)."""
        ends = frozenset[int]() if ignore_end else self.end_tokens
        return TextStream(self._tokenizer, ends, tuple(stop))


class TextStream:
    """An answer's text so far. End tokens belong to the ids and not to the text.

    Text that may be the beginning of a stop string is held back until it is known not to be one.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, ends: frozenset[int], stop: tuple[str, ...]
    ) -> None:
        self._detokenizer: Any = tokenizer.detokenizer
        self._ends = ends
        self._stop = stop
        self._ready = ""
        self._held = ""
        self._over = False

    def push(self, token: int) -> FinishReason | None:
        """Takes the next id; "stop" when it ends the answer."""
        if token in self._ends:
            return "stop"
        self._detokenizer.add_token(token)
        return self._add(self._detokenizer.last_segment)

    def take(self) -> str:
        """The text that became certain since the last call."""
        text, self._ready = self._ready, ""
        return text

    def finish(self) -> str:
        """The rest, when the answer is over."""
        if not self._over:
            self._detokenizer.finalize()
            if self._add(self._detokenizer.last_segment) is None:
                self._ready += self._held
                self._held = ""
        return self.take()

    def _add(self, text: str) -> FinishReason | None:
        held = self._held + text
        found = min((at for s in self._stop if (at := held.find(s)) >= 0), default=-1)
        if found >= 0:
            self._ready += held[:found]
            self._held, self._over = "", True
            return "stop"
        keep = max((_overlap(held, s) for s in self._stop), default=0)
        cut = len(held) - keep
        self._ready += held[:cut]
        self._held = held[cut:]
        return None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


def messages_from_json(text: str) -> list[dict[str, Any]]:
    """The `Messages` message of the wire. Raises InvalidRequest."""
    try:
        messages = json.loads(text)
    except ValueError as fault:
        raise InvalidRequest(f"messages is not JSON: {fault}", param="messages") from fault
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise InvalidRequest("messages must be a list of objects", param="messages")
    return messages
