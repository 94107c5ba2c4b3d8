"""Chat messages to ids, ids to text as it grows, and where an answer ends."""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from ...mtp.types import FinishReason
from ...placement.errors import InvalidCheckpoint, InvalidRequest
from ..checkpoint.headers import fault as file_fault
from ..checkpoint.headers import parse_object, read_bytes, shown, size_of
from .messages import too_long
from .token_bytes import longest_token, token_bytes

_PLUGINS = ("chat_template_type", "tool_parser_type")
"""Fields of tokenizer_config.json by which mlx-lm imports one of its own modules."""
_PLUGIN = re.compile(r"[a-z0-9_]{1,64}")
_TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What an expression in a template can raise: nearly all that one in Python can."""


class TextCodec:
    """A checkpoint's tokenizer and chat template."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._control = _ControlTokens(tokenizer)
        self.token_bytes = token_bytes(tokenizer)
        self._longest_token: int | None = None
        self.end_tokens = frozenset(int(token) for token in tokenizer.eos_token_ids)

    @classmethod
    def load(cls, folder: Path) -> "TextCodec":
        """Raises InvalidCheckpoint. Code in the checkpoint is never run."""
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
        self, messages: Sequence[Mapping[str, Any]], limit: int | None = None
    ) -> list[int]:
        """Ids of the rendered chat, up to where the assistant's answer begins.

        An assistant's message that comes last is the beginning of the answer, which continues it.
        Control tokens come from the template only: where the messages spell one, it is text.
        Raises InvalidRequest where the template refuses these messages, and ContextLengthExceeded
        where it makes more than `limit` bytes of them.
        """
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template; use a model that was trained for chat",
                param="model",
            )
        mark = f"\ufdd0{secrets.randbits(64)}\ufdd0"
        broken = [self._control.broken(message, mark) for message in messages]
        end = f"\ufdd1{secrets.randbits(64)}\ufdd1" if _is_continued(messages) else ""
        if end:
            broken[-1]["content"] += end
        try:
            text: str = self._tokenizer.apply_chat_template(
                broken, add_generation_prompt=not end, tokenize=False
            )
            if end:
                text = _until(text, end)
            parts = text.split(mark)
            if limit is not None and (size := sum(len(p.encode()) for p in parts)) > limit:
                raise too_long(size, limit)
            pieces = [self._tokenizer.encode(part, add_special_tokens=False) for part in parts]
        except _TEMPLATE_FAULTS as fault:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {fault}", param="messages"
            ) from fault
        return [int(token) for piece in pieces for token in piece]

    def stream(self, stop: Sequence[str], *, ignore_end: bool) -> "TextStream":
        """For one answer; `ignore_end` goes on past the model's end tokens (benchmarks)."""
        ends = frozenset[int]() if ignore_end else self.end_tokens
        return TextStream(self._tokenizer, ends, tuple(stop))


def _is_continued(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer: a call of tools is whole."""
    last = messages[-1] if messages else {}
    return (
        last.get("role") == "assistant"
        and isinstance(last.get("content"), str)
        and not last.get("tool_calls")
    )


def _until(text: str, end: str) -> str:
    """What stands before `end`. Raises InvalidRequest where the template lost or repeated it."""
    before, *after = text.split(end)
    if len(after) != 1:
        raise InvalidRequest(
            "the model's chat template cannot continue an assistant's message; end with a message "
            "of another role",
            param="messages",
        )
    return before


class _ControlTokens:
    """The tokens that give a chat its structure, and how to keep messages from spelling them.

    A tokenizer takes `<|im_end|>` for the end of a turn wherever it stands, so whoever may write
    one message could write others. A mark behind the first character of each, at which the rendered
    text is cut before it is tokenised, leaves text without these tokens exactly as it was.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        added = list(tokenizer.added_tokens_decoder.values())
        special = {token.content for token in added if token.special}
        # Some publishers do not flag theirs as special: then the template is what names them.
        template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
        named = {token.content for token in added if token.content in template}
        self._special = _beginnings(special)
        self._all = _beginnings(special | {name for name in named if not name.isspace()})

    def broken(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        """The message with a mark inside each control token that one of its strings spells.

        Of an answer, only the special ones: templates look for `</think>` and the like there.
        """
        tokens = self._special if message.get("role") == "assistant" else self._all
        return _substituted(dict(message), tokens, rf"\g<0>{mark}")


def _beginnings(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each occurrence, also where two overlap."""
    parts = [f"{re.escape(t[0])}(?={re.escape(t[1:])})" for t in tokens if len(t) > 1]
    return re.compile("|".join(sorted(parts)) or r"(?!)")


def _substituted(value: Any, pattern: re.Pattern[str], replacement: str) -> Any:
    match value:
        case str():
            return pattern.sub(replacement, value)
        case dict():
            return {k: _substituted(v, pattern, replacement) for k, v in value.items()}
        case list():
            return [_substituted(item, pattern, replacement) for item in value]
        case _:
            return value


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
