"""One streamed answer: the times of its events, its counts, and why it failed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_SHOWN: Final = 200
"""Characters of a server's text that are kept for the terminal."""
_Count = Annotated[int, Field(ge=0, le=1 << 40)]


class _Part(BaseModel):
    """A part of an event. Servers differ, so fields that are not listed are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Delta(_Part):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[object] | None = None

    def text(self) -> str:
        return "".join(filter(None, (self.content, self.reasoning_content, self.reasoning)))


class _Choice(_Part):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(_Part):
    cached_tokens: _Count | None = None


class Usage(_Part):
    """The server's token counts."""

    prompt_tokens: _Count
    completion_tokens: _Count
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens


class DraftCounts(_Part):
    """The drafts of one answer, from exo-node's `generation_stats`."""

    drafter_kind: str = "none"
    draft_policy: str | None = None
    num_draft_tokens: _Count | None = None
    spec_decode_rounds: _Count = 0
    proposed_draft_tokens: _Count = 0
    accepted_draft_tokens: _Count = 0


class _Event(_Part):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    generation_stats: DraftCounts | None = None
    error: object = None


@dataclass(frozen=True, slots=True)
class AnswerFailure:
    """Why an answer failed. `kind` has no text of the server, so it may be shared."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's outcome; times are of one monotonic clock, in seconds."""

    started: float
    ended: float
    chunks: tuple[float, ...] = ()
    """The times of the events with text; an event may contain several tokens."""
    text: str = ""
    usage: Usage | None = None
    finish_reason: str = ""
    failure: AnswerFailure | None = None
    refused: bool = False
    """The server is busy: HTTP 429 or 503."""
    turn: int = 0
    drafts: DraftCounts | None = None


@dataclass(slots=True)
class AnswerReader:
    """Collects the events of one stream; times are arguments."""

    started: float
    chunks: list[float] = field(default_factory=list[float])
    text: list[str] = field(default_factory=list[str])
    usage: Usage | None = None
    drafts: DraftCounts | None = None
    finish_reason: str = ""
    failure: AnswerFailure | None = None
    has_ended: bool = False

    def take(self, at: float, data: str) -> None:
        """Reads one event's data. An event without text, such as the role's, is not a token."""
        if data.strip() == "[DONE]":
            self.has_ended = True
            return
        try:
            event = _Event.model_validate_json(data)
        except ValidationError:
            self.fail("an event that is no chat chunk", data)
            return
        if event.error:
            self.fail("an error in the stream", str(event.error))
        self.usage = event.usage or self.usage
        self.drafts = event.generation_stats or self.drafts
        for choice in event.choices or ():
            self._read(at, choice)

    def _read(self, at: float, choice: _Choice) -> None:
        delta = choice.delta or _Delta()
        if (text := delta.text()) or delta.tool_calls:
            self.chunks.append(at)
            self.text.append(text)
        self.finish_reason = choice.finish_reason or self.finish_reason

    def fail(self, kind: str, detail: str = "") -> None:
        """Records the first failure; later ones follow from it."""
        self.failure = self.failure or AnswerFailure(kind, " ".join(detail[:_SHOWN].split()))

    def answer(self, ended: float, turn: int) -> Answer:
        """The outcome. A stream that ends without a reason or without text is a failure."""
        for kind in self._missing():
            self.fail(kind)
        return Answer(
            self.started,
            ended,
            tuple(self.chunks),
            "".join(self.text),
            self.usage,
            self.finish_reason,
            self.failure,
            turn=turn,
            drafts=self.drafts,
        )

    def _missing(self) -> Iterator[str]:
        if not (self.finish_reason or self.has_ended):
            yield "the stream ended before the answer did"
        if not self.chunks:
            yield "an answer without text"
