"""The internal request and the events of its answer, the same for every dialect of the API."""

import dataclasses
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...mtp.types import FinishReason, Sampling
from ...placement.drafting import DraftPolicy
from ...placement.ids import ModelId, RequestId
from ...proto import peer_pb2 as pb


def calls_of(names: Sequence[str] | None, *, parallel: bool) -> pb.Grammar:
    """The constraint that the model calls a tool with one of these names; None: any tool."""
    chosen = None if names is None else list(names)
    text = json.dumps({"names": chosen, "parallel": parallel})
    return pb.Grammar(kind="calls", text=text, field="tool_choice")


@dataclass(frozen=True, slots=True)
class Image:
    """A file that a part `{"type": "image"}` of the messages stands for; nothing has decoded it."""

    data: bytes = field(repr=False)
    media_type: str
    """The client's own; empty if it gives none."""
    field: str
    """The request's field that has it, for errors."""
    url: str = dataclasses.field(default="", repr=False)
    """The address that the client has sent in place of `data`, which is not fetched."""
    must_be_seen: bool = False
    """It is in the user's latest turn, so it is refused where the model reads no images."""
    refusal: str = ""
    """The beginning of that error, for clients that look for a sentence."""


def embeddings_of(
    inputs: Sequence[str | Sequence[int]], dimensions: int | None = None, *, truncate: bool = False
) -> pb.Embeddings:
    """The inputs of a request for embeddings, each a text or token ids."""
    each_input = [
        pb.EmbeddingInput(index=index, text=each)
        if isinstance(each, str)
        else pb.EmbeddingInput(index=index, token_ids=pb.TokenIds(ids=each))
        for index, each in enumerate(inputs)
    ]
    return pb.Embeddings(inputs=each_input, dimensions=dimensions or 0, truncate=truncate)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request, for an answer unless it has `embeddings`.

    `num_draft_tokens` None takes the card's default, 0 turns drafts off. `draft_policy` None
    follows from `num_draft_tokens` and the node's setting. `limits`, `output` and `sharing` are
    groups of the runner's message, which nothing changes; a profile completes what they leave out.
    """

    id: RequestId
    model: ModelId
    """The model itself; `profile` is the name of it that the client gave, if it is one."""
    messages: tuple[Mapping[str, Any], ...]
    sampling: Sampling
    limits: pb.Limits = field(default_factory=pb.Limits)
    output: pb.Output = field(default_factory=pb.Output)
    sharing: pb.Sharing = field(default_factory=pb.Sharing)
    profile: str = ""
    num_draft_tokens: int | None = None
    draft_policy: DraftPolicy | None = None
    explicit_fields: frozenset[str] = frozenset()
    """The sampling fields that the request or its profile sets; the model has its own for others,
    see `placement/sampling_values.py`."""
    profile_fields: frozenset[str] = frozenset()
    """The `explicit_fields` that the profile sets."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """In the form of chat templates: `{"type": "function", "function": …}`."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of the chat template; see `shard/text/template.py`."""
    text: str | None = None
    """A whole prompt in place of messages; its answer has no parts."""
    ids: tuple[int, ...] | None = None
    """A whole prompt in token ids; like `text`, in place of messages."""
    prompt_field: str = "messages"
    """The client's field that has the prompt, for errors."""
    suffix: str | None = None
    """The text behind a gap that the answer fills; `text` is what is in front of it."""
    embeddings: pb.Embeddings | None = field(default=None, repr=False)
    """Inputs of embeddings, in place of messages."""
    images: tuple[Image, ...] = field(default=(), repr=False)
    """In the order of the parts `{"type": "image"}` in the messages' contents."""
    choice: int = 0
    """Its number among the choices of its client's request: with a seed, it has the seed plus that
    number, modulo 2**64."""
    keep_alive_s: float | None = None
    """How long the model stays loaded afterwards; infinity: for ever, None: the head's setting."""
    trusted: bool = True
    """Whether it may shorten the model's stay, or lengthen it beyond the head's setting."""
    client: str = field(default="", repr=False)
    """The client's identity, for a fair order of turns; empty if unknown."""


@dataclass(frozen=True, slots=True)
class AnswerProgress:
    """A sign of life of an answer without new text: the model is loaded, the prompt read, or a lost
    stage replaced. `step` is text for a person ("downloading 12 %", "prefill 64/200")."""

    step: str


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt was rendered and tokenised.

    `notes`: the parts of the request that have another effect or none, as text for a person.
    """

    prompt_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


TokenLogprob = pb.TokenLogprob
"""A token under the model's distribution, before temperature and filters."""
CallPart = pb.CallPart
"""A call of one of the request's tools; for requests with `call_parts`, perhaps a part of it."""
Embedded = pb.Embedded


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The next tokens of a prompt, with the log-probability of each behind those before it.

    The prompt's first token has none: its `logprob` is 0. `bytes` of control tokens are their name.
    """

    logprobs: tuple[TokenLogprob, ...]


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
class ReasoningDelta:
    """New text of the model's reasoning, which is not part of the answer's text."""

    text: str


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
    """Part of `completion_tokens`."""
    stopped_by: str = ""
    """The stop string that ended the answer, or ""."""


Part = Started | PromptLogprobs | TextDelta | ReasoningDelta | CallPart | Finished
"""Events that every dialect renders for its clients."""
Event = AnswerProgress | Part | Embedded


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of a prompt, or the text of a prompt that the request has in ids."""

    ids: tuple[int, ...]
    text: str
    context_length: int


class Chat(Protocol):
    """The chat service as the HTTP layer uses it."""

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Event]:
        """The answer. Closing it (`aclose`) cancels it on every stage.

        Raises ExoNodeError of the kinds that `placement.errors` lists, before or between events.
        """
        ...

    async def encode(self, request: GenerationRequest) -> Encoded:
        """The model's input. Loads the model if necessary. Raises the errors of `stream`."""
        ...

    async def release(self, request: GenerationRequest) -> None:
        """Has the model unloaded as soon as no answer runs on it. Raises ModelNotFound."""
        ...
