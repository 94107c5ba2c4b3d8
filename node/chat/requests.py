"""One internal request and the events of its answer, whatever dialect the client speaks."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ...mtp.types import FinishReason, Sampling
from ...placement.drafting import DraftPolicy
from ...placement.ids import ModelId, RequestId


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer may be. `field` is the client's own name for it.

    `calls`: calls of the request's tools; `text` is what `calls_of` makes.
    """

    kind: Literal["json_schema", "regex", "lark", "calls"]
    text: str
    field: str


def calls_of(names: Sequence[str] | None, *, parallel: bool) -> Grammar:
    """The model must call one of the tools with these names, of any with None."""
    chosen = None if names is None else list(names)
    return Grammar("calls", json.dumps({"names": chosen, "parallel": parallel}), "tool_choice")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request. Sampling that is not among the `given` fields is the card's to say.

    `num_draft_tokens` None takes the card's default, 0 turns drafts off. `max_tokens` None means
    up to the end of the context. `draft_policy` None follows from `num_draft_tokens` and the node's
    setting. `top_logprobs` None asks for no log-probabilities, 0 for the emitted tokens' only.
    `background`: those who wait for an answer go first.
    """

    id: RequestId
    model: ModelId
    messages: tuple[Mapping[str, Any], ...]
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_draft_tokens: int | None = None
    draft_policy: DraftPolicy | None = None
    top_logprobs: int | None = None
    ignore_eos: bool = False
    background: bool = False
    given: frozenset[str] = frozenset()
    tools: tuple[Mapping[str, Any], ...] = ()
    """As chat templates take them: `{"type": "function", "function": …}`."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the chat template; see `shard/text/template.py`."""
    text: str | None = None
    """A whole prompt in place of messages; its answer has no parts."""
    ids: tuple[int, ...] | None = None
    """A whole prompt in ids, as `text`."""
    grammar: Grammar | None = None
    call_parts: bool = False
    """Calls come as `CallPart` while they are written, where their format allows."""
    keep_alive_s: float | None = None
    """How long the model stays loaded behind it; infinity for ever, None as the head's setting."""
    trusted: bool = True
    """Whether it may shorten the model's stay, or lengthen it beyond the head's setting."""
    client: str = field(default="", repr=False)
    """Whose it is, for a fair order of turns; empty where that is not known."""
    cache_salt: bytes = field(default=b"", repr=False)
    """Requests of one salt share what is kept of their prompts, and no others."""


@dataclass(frozen=True, slots=True)
class Loading:
    """The model is not in memory yet; `step` is for a person ("downloading 12 %")."""

    step: str


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt was rendered and tokenised.

    `notes`: what of the request is followed otherwise or not at all, each for a person.
    """

    prompt_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt rows done; also sent with `done == total`."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Resuming:
    """A stage was lost; the answer goes on from where it is. `step` is for a person."""

    step: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token under the model's distribution, before temperature and filters.

    `raw` is what it decodes to by itself, part of a character at times; empty for a control token.
    `logprob` is natural. `top` has the most likely tokens there, best first, without a `top` of
    their own.
    """

    id: int
    raw: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text (may be empty) and the ids emitted since the last delta.

    `logprobs` has an entry for each id where the request asked for them. The text of an id may come
    with a later delta: it waits for a whole character, and until it is known to be no stop string.
    The first `accepted_drafts` of the ids were drafted.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    accepted_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Reasoned:
    """New text of the model's reasoning, which is no part of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A whole call of one of the request's tools; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """What comes next of a call that is being written; where requests ask for `call_parts`.

    `name` in its first part only, the last one `ends` it. All `arguments` together are the text of
    a JSON object, but for a call that `is_cut`: the answer ended within it.
    """

    name: str
    arguments: str
    ends: bool = False
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The end: `stats` is the `generation_stats` object of the API, JSON-ready."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_draft_tokens: int
    stats: Mapping[str, Any]
    reasoning_tokens: int = 0
    """Of the completion's."""
    stopped_by: str = ""
    """The stop string that ended it, if one did."""


Progress = Loading | Resuming | PrefillProgress
"""Signs of life of an answer that has nothing to say yet."""
Part = Started | TextDelta | Reasoned | Called | CallPart | Finished
"""Events that clients are told of in their dialect."""
Event = Progress | Part


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt's ids, or the text of one that was given in ids."""

    ids: tuple[int, ...]
    text: str
    context_length: int


class Chat(Protocol):
    """What the HTTP layer needs of the node's chat service."""

    def stream(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """The answer. Closing the iterator (`aclose`) cancels it on every stage.

        Raises ExoNodeError of the kinds that `placement.errors` lists, before or between events.
        """
        ...

    async def encode(self, request: GenerationRequest) -> Encoded:
        """What the model would be given; it is loaded where it must be. Raises as `stream`."""
        ...

    async def release(self, request: GenerationRequest) -> None:
        """The model is unloaded as soon as no answer runs on it. Raises ModelNotFound."""
        ...
