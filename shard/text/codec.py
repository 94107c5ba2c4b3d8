"""Chat messages to ids, ids to text as it grows, and where an answer ends."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from mlx_lm.tokenizer_utils import load as load_tokenizer

from ...mtp.types import FinishReason
from ...placement.errors import InvalidCheckpoint, InvalidRequest
from ..checkpoint.headers import fault as file_fault
from ..checkpoint.headers import parse_object, read_bytes, shown, size_of
from .answer_format import format_of
from .call_grammar import call_grammar
from .control_tokens import ControlTokens
from .grammars import Grammars
from .messages import too_long
from .template import TEMPLATE_FAULTS, ChatTemplate, TemplateOptions
from .token_bytes import longest_token, token_bytes
from .tokenizer_sizes import require_reasonable
from .tool_calls import Call, parse_calls, parser_of

_PLUGINS = ("chat_template_type", "tool_parser_type")
"""Fields of tokenizer_config.json by which mlx-lm imports one of its own modules."""
_PLUGIN = re.compile(r"[a-z0-9_]{1,64}")
_TRIMMING = (BPEStreamingDetokenizer, SPMStreamingDetokenizer)


class TextCodec:
    """A checkpoint's tokenizer and chat template."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer)
        self._template = ChatTemplate(tokenizer)
        self._parser = parser_of(tokenizer)
        self.answer_format = format_of(tokenizer)
        self.token_bytes = token_bytes(tokenizer)
        self._longest_token: int | None = None
        self.end_tokens = frozenset(int(token) for token in tokenizer.eos_token_ids)
        self.grammars = Grammars(cast("Any", tokenizer)._tokenizer, self.end_tokens)

    @classmethod
    def load(cls, folder: Path) -> "TextCodec":
        """Raises InvalidCheckpoint. Code in the checkpoint is never run."""
        require_reasonable(folder)
        _check_plugins(folder)
        try:
            eos: Any = _named_ends(folder)
            extra = {"trust_remote_code": False}
            tokenizer = load_tokenizer(folder, extra, eos_token_ids=eos)
        # The tokenizers library raises the bare class, the others whatever a field leads to.
        except Exception as fault:
            raise InvalidCheckpoint(
                f"the tokenizer of {folder.name} cannot be loaded: "
                f"{str(fault).replace(str(folder), folder.name)}; put a whole copy of it there"
            ) from fault
        return cls(tokenizer)

    @property
    def special_tokens(self) -> tuple[int, ...]:
        """What XTC never removes: the end tokens and the newline, as in mlx-lm's server."""
        newline = self._tokenizer.encode("\n", add_special_tokens=False)
        return tuple(sorted({*self.end_tokens, *newline}))

    @property
    def longest_token(self) -> int:
        """Bytes of text that one id may stand for at most."""
        if self._longest_token is None:
            self._longest_token = longest_token(self._tokenizer)
        return self._longest_token

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions | None = None,
    ) -> list[int]:
        """Ids of the rendered chat, up to where the assistant's answer begins.

        Control tokens come from the template only: where the messages spell one, it is text.
        Raises InvalidRequest where the template refuses these messages, and ContextLengthExceeded
        where it makes more than `limit` bytes of them.
        """
        parts = self._template.render(messages, tools, options or TemplateOptions())
        return self._encoded(parts, limit)

    def encode_text(self, text: str, limit: int | None = None) -> list[int]:
        """Ids of a text that is a whole prompt: what spells a control token is one.

        Raises ContextLengthExceeded as `encode_chat`.
        """
        return self._encoded([text], limit, first=True)

    def _encoded(
        self, parts: Sequence[str], limit: int | None, *, first: bool = False
    ) -> list[int]:
        """`first`: behind the token that the model wants at the beginning."""
        if limit is not None and (size := sum(len(p.encode()) for p in parts)) > limit:
            raise too_long(size, limit)
        try:
            pieces = [self._tokenizer.encode(part, add_special_tokens=first) for part in parts]
        except TEMPLATE_FAULTS as fault:
            raise InvalidRequest(
                f"the model's tokenizer refuses these messages: {type(fault).__name__}",
                param="messages",
            ) from fault
        return [int(token) for piece in pieces for token in piece]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, control tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[Call] | None:
        """The calls of tools in a text that the model marked as such; None: it holds none."""
        return parse_calls(self._parser, text, tools)

    def call_grammar(self, asked: str, tools: Sequence[Mapping[str, Any]]) -> str:
        """See there. Raises InvalidRequest."""
        return call_grammar(self._tokenizer, asked, tools)

    def stream(
        self, stop: Sequence[str], *, ignore_end: bool, continues: bool = False
    ) -> "TextStream":
        """For one answer; `ignore_end` goes on past the model's end tokens (benchmarks).

        `continues`: the answer goes on in a text, so a space that begins it stays.
        """
        ends = frozenset[int]() if ignore_end else self.end_tokens
        return TextStream(self._tokenizer, ends, tuple(stop), continues=continues)


class TextStream:
    """An answer's text so far. End tokens belong to the ids and not to the text.

    Text that may be the beginning of a stop string is held back until it is known not to be one.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        ends: frozenset[int],
        stop: tuple[str, ...],
        *,
        continues: bool = False,
    ) -> None:
        self._detokenizer: Any = tokenizer.detokenizer
        if continues and isinstance(self._detokenizer, _TRIMMING):
            # They drop a space while their text is empty, so it is not: some was handed out.
            self._detokenizer.text, self._detokenizer.offset = " ", 1
        self._ends = ends
        self._stop = stop
        self._ready = ""
        self._held = ""
        self._over = False
        self.stopped_by = ""
        """The stop string that ended the answer, if one did."""

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
        places = [(at, s) for s in self._stop if (at := held.find(s)) >= 0]
        if places:
            found, self.stopped_by = min(places)
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


def _named_ends(folder: Path) -> object:
    """The end tokens that config.json names, or generation_config.json, which has the last word."""
    ends: object = None
    for name in ("config.json", "generation_config.json"):
        if (path := folder / name).exists():
            found = parse_object(path, read_bytes(path, 0, size_of(path)), unique=False)
            ends = found.get("eos_token_id") or ends
    return ends


def _check_plugins(folder: Path) -> None:
    """Raises InvalidCheckpoint where a field that chooses a module to import is no plain word."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return
    config = parse_object(path, read_bytes(path, 0, size_of(path)), unique=False)
    for field in _PLUGINS:
        name = config.get(field)
        if name is not None and not (isinstance(name, str) and _PLUGIN.fullmatch(name)):
            raise file_fault(
                path,
                f"has {field} = {shown(name)}, which is not the name of a module of mlx-lm",
                remedy="Use a checkpoint whose chat format mlx-lm has built in.",
            )
