"""Encodes chat messages to ids, decodes ids to text as it grows, and finds an answer's end."""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from mlx_lm.tokenizer_utils import load as load_tokenizer

from ...mtp.types import FinishReason
from ...placement.errors import PROMPT, InvalidCheckpoint, InvalidRequest, UnsupportedParameter
from ..checkpoint.chat_format import chat_templates
from ..checkpoint.checkpoint import read_config
from ..checkpoint.generation_config import read_generation_config
from .grammars.call_grammar import call_grammar
from .grammars.grammars import Grammars
from .image_rows import image_frame
from .infill import Infill
from .messages import too_long
from .stop_strings import StopStrings
from .template import TEMPLATE_FAULTS, ChatTemplate, TemplateOptions
from .token_bytes import longest_token, token_bytes
from .tokenizer_folder import require_reasonable, tokenizer_folder
from .tools.answer_format import format_of, has_call_grammar, other_turn_ends
from .tools.tool_calls import Call, parse_calls

if TYPE_CHECKING:
    from .pictures import PictureProcessor

log = logging.getLogger(__name__)

_TRIMMING = (BPEStreamingDetokenizer, SPMStreamingDetokenizer)


class TextCodec:
    """A checkpoint's tokenizer and chat template."""

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        folder: Path,
        published_sampling: Mapping[str, float],
        unused: str,
    ) -> None:
        """`unused`: what of the files of templates is not used, and why."""
        self.published_sampling = published_sampling
        """The sampling of generation_config.json, by the fields of requests."""
        self._unused = unused
        self._tokenizer = tokenizer
        self._folder = folder
        self._template = ChatTemplate(tokenizer)
        self.answer_format = format_of(tokenizer)
        self.has_call_grammar = has_call_grammar(tokenizer)
        self.token_bytes = token_bytes(tokenizer)
        self.prompt_bytes = token_bytes(tokenizer, with_control=True)
        """The same of a prompt's tokens: control tokens have the bytes of their names."""
        self._infill = Infill.of(tokenizer)
        self.end_tokens = frozenset(int(token) for token in tokenizer.eos_token_ids)
        self._other_turn_ends = other_turn_ends(tokenizer)
        self._image_frame = image_frame(folder, tokenizer)
        self.grammars = Grammars(cast("Any", tokenizer)._tokenizer, self.end_tokens)

    @classmethod
    def load(cls, folder: Path) -> "TextCodec":
        """Loads a tokenizer; never runs code in the checkpoint. Raises InvalidCheckpoint."""
        require_reasonable(folder)
        notes: list[str] = []
        published = read_generation_config(folder)
        templates = chat_templates(folder, notes)
        text = templates.get("tool_use") or templates.get("default", "")
        with tokenizer_folder(folder, text, notes) as view:
            try:
                eos: Any = list(published.ends) or _configured_ends(folder)
                tokenizer = load_tokenizer(view, {"trust_remote_code": False}, eos_token_ids=eos)
            # The tokenizers library raises Exception itself, the others any that a field causes.
            except Exception as fault:
                why = f"it has no {fault}" if isinstance(fault, KeyError) else str(fault)
                raise InvalidCheckpoint(
                    f"the tokenizer of {folder.name} cannot be loaded: "
                    f"{why.replace(str(view), folder.name)}; put a whole copy of it there"
                ) from fault
        if "tool_use" in templates:  # the library has read the call format in that one alone
            tokenizer.chat_template = templates
        for note in (*published.notes, *notes):
            log.warning("%s", note)
        # transformers makes one of control tokens alone where it finds no file with others.
        if not set(tokenizer.get_vocab()).difference(
            tokenizer.get_added_vocab(), tokenizer.all_special_tokens
        ):
            raise InvalidCheckpoint(
                f"the tokenizer of {folder.name} has no tokens for text; put the publisher's "
                "tokenizer.json there",
                param="tokenizer.json",
            )
        return cls(tokenizer, folder, published.sampling, "; ".join(notes))

    @property
    def turn_ends(self) -> frozenset[int]:
        """The tokens that end a turn of any role."""
        return self.end_tokens | self._other_turn_ends

    @property
    def special_tokens(self) -> tuple[int, ...]:
        """The tokens that XTC never removes: end tokens and the newline, as in mlx-lm's server."""
        newline = self._tokenizer.encode("\n", add_special_tokens=False)
        return tuple(sorted({*self.end_tokens, *newline}))

    @cached_property
    def longest_token(self) -> int:
        """The most bytes of text of one id."""
        return longest_token(self._tokenizer)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions | None = None,
        notes: list[str] | None = None,
    ) -> list[int]:
        """Ids of the rendered chat, up to the start of the assistant's answer.

        Control tokens come from the template only: those that messages spell are text. Appends to
        `notes` each option that the template does not support.
        Raises InvalidRequest if the template refuses these messages, and ContextLengthExceeded if
        the rendered text has more than `limit` bytes.
        """
        if not self._tokenizer.has_chat_template and self._unused:
            raise InvalidRequest(
                f"this model has no chat template that can be read: {self._unused}", param="model"
            )
        ignored = [] if notes is None else notes
        parts = self._template.render(messages, tools, options or TemplateOptions(), ignored)
        if self._image_frame is not None:
            mark, framed = self._image_frame
            parts = [part.replace(mark, framed) for part in parts]
        if limit is not None and (size := sum(len(part.encode()) for part in parts)) > limit:
            raise too_long(size, limit, self.longest_token)
        return self._encode(parts)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text that is a whole prompt; control tokens in it count as such."""
        return self._encode([text], first=True)

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Ids of a prompt whose answer fills the gap between two texts; see `Infill.encode`.

        Raises UnsupportedParameter for a tokenizer that has no tokens for it.
        """
        if self._infill is None:
            raise UnsupportedParameter(
                "this model's tokenizer has no tokens that mark a gap to fill, such as "
                "<|fim_middle|>; leave 'suffix' out, or use a model for code that has them",
                param="suffix",
            )
        return self._infill.encode(prefix, suffix)

    @property
    def infill_ends(self) -> frozenset[int]:
        """The tokens that end what was filled into a gap, beside the end tokens."""
        return frozenset() if self._infill is None else self._infill.ends

    def _encode(self, parts: Sequence[str], *, first: bool = False) -> list[int]:
        """`first`: whether to put the model's BOS token in front."""
        try:
            pieces = [self._tokenizer.encode(part, add_special_tokens=first) for part in parts]
        except TEMPLATE_FAULTS as fault:
            raise InvalidRequest(
                f"the model's tokenizer refuses this prompt: {type(fault).__name__}", param=PROMPT
            ) from fault
        return [int(token) for piece in pieces for token in piece]

    @cached_property
    def pictures(self) -> "PictureProcessor":
        """The processor of the model's images, imported on use. Raises InvalidCheckpoint."""
        from .pictures import PictureProcessor  # all of transformers: only where an image came

        return PictureProcessor(self._folder, self._tokenizer.convert_tokens_to_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, control tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[Call] | None:
        """The tool calls in a text that the model marked as such; None if it contains none."""
        return parse_calls(self.answer_format.call_format, text, tools)

    def call_grammar(self, request: str, tools: Sequence[Mapping[str, Any]]) -> str:
        """The grammar of `call_grammar.call_grammar`. Raises InvalidRequest."""
        return call_grammar(self._tokenizer, request, tools)

    def stream(
        self,
        stops: StopStrings,
        *,
        ignore_end: bool,
        continues: bool = False,
        more_ends: frozenset[int] = frozenset(),
    ) -> "TextStream":
        """The text of one answer; `ignore_end` continues past end tokens (benchmarks).

        `continues`: the answer begins within a text, so its leading space stays. `more_ends`: other
        tokens that end it.
        """
        ends = frozenset[int]() if ignore_end else self.end_tokens | more_ends
        return TextStream(self._tokenizer, ends, stops, continues=continues)


class TextStream:
    """An answer's text so far, without end tokens.

    Text that may begin a stop string is held back until it is certain not to.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        ends: frozenset[int],
        stops: StopStrings,
        *,
        continues: bool = False,
    ) -> None:
        self._detokenizer: Any = tokenizer.detokenizer
        if continues and isinstance(self._detokenizer, _TRIMMING):
            # They drop a space while their text is empty, so it pretends to have returned some.
            self._detokenizer.text, self._detokenizer.offset = " ", 1
        self.ends = ends
        self._stops = stops
        self._ready = ""

    @property
    def stopped_by(self) -> str:
        """The stop string that ended the answer, if one did."""
        return self._stops.match

    def push(self, token: int) -> FinishReason | None:
        """Adds the next id; returns "stop" if it ends the answer."""
        if token in self.ends:
            return "stop"
        self._detokenizer.add_token(token)
        self._ready += self._stops.feed(self._detokenizer.last_segment)
        return "stop" if self._stops.match else None

    def take(self) -> str:
        """The text that became certain since the last call."""
        text, self._ready = self._ready, ""
        return text

    def finish(self) -> str:
        """The rest, at the end of the answer."""
        if not self._stops.match:
            self._detokenizer.finalize()
            self._ready += self._stops.feed(self._detokenizer.last_segment)
            self._ready += self._stops.finish()
        return self.take()


def _configured_ends(folder: Path) -> list[int] | None:
    """The end tokens of config.json, or None if it names none."""
    config = read_config(folder) if (folder / "config.json").exists() else {}
    value = config.get("eos_token_id")
    return [value] if isinstance(value, int) else value
