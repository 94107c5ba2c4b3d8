"""`POST /v1/completions`, `/v1/tokenize` and `/v1/detokenize`: text and ids without a template."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final, final

from starlette.requests import Request

from ....mtp.types import Sampling
from ....placement.ids import ModelId, RequestId
from ....proto import peer_pb2 as pb
from ...chat.images import gathered
from ...chat.requests import (
    Finished,
    GenerationRequest,
    Part,
    PromptLogprobs,
    Started,
    TextDelta,
    TokenLogprob,
)
from ..http.bodies import unknown_fields
from ..http.dialects import Dialect, Exchange, WholeAnswer
from ..http.routes import ApiRoute, post_json
from ..http.sse import data
from ..shared.answering import Answering
from ..shared.chat_message import messages_for_template
from ..shared.choices import ChoiceStream
from ..shared.history import History
from ..shared.sampling_schema import generation
from ..shared.thinking_schema import thinking_options
from .completion_logprobs import CompletionLogprobs
from .completions_schema import CompletionBody, DetokenizeBody, TokenizeBody


def renderers_of(body: CompletionBody, request_id: RequestId) -> list["CompletionRenderer"]:
    count = body.count * len(body.prompt)
    stream = ChoiceStream(count, body.has_usage_apart, len(body.prompt))
    return [CompletionRenderer(body, request_id, number, stream) for number in range(count)]


@final
class CompletionRenderer:
    """Renders one choice of a text completion, or its chunks."""

    def __init__(
        self, body: CompletionBody, request_id: RequestId, number: int, stream: ChoiceStream
    ) -> None:
        """`number`: the choice's, `body.count` of each prompt. `stream`: that of all choices."""
        self._with_ids = bool(body.return_token_ids)
        self._with_answer = body.max_tokens != 0
        """False: the answer's one token, which every request computes, is left out."""
        self._with_prompt_logprobs = body.scores_prompt and body.logprobs is not None
        own = body.prompt[number // body.count]
        prompt = own if body.echo and isinstance(own, str) else None
        self._echo = prompt or ""
        """The text in front of the answer; of a prompt in ids, it comes with their names."""
        self._echoes_ids = bool(body.echo) and prompt is None
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._logprobs = None if body.logprobs is None else CompletionLogprobs(prompt)
        self._number = number
        self._stream = stream
        self._head = {
            "id": request_id.replace("req_", "cmpl-", 1),
            "object": "text_completion",
            "created": stream.created,
            "model": body.model,
        }

    def whole(self, answer: WholeAnswer, end: Finished) -> dict[str, Any]:
        end, echo = self._end(end), self._echo + self._text_of(answer.prompt_logprobs)
        scores = self._prompt_scores(answer.prompt_logprobs)
        text, ids = echo, tuple[int, ...]()
        if self._with_answer:
            text, ids = echo + answer.text, tuple(answer.ids)
            scores = _sum(scores, self._scores(answer.logprobs))
        return self._stream.body(self._head, self._choice(text, ids, end.reason, scores), end)

    def heartbeat(self) -> bytes:
        return self._chunk(self._choice("", (), None))

    def render(self, event: Part) -> bytes:
        match event:
            case Started() if self._echo:
                return self._chunk(self._choice(self._echo, (), None))
            case PromptLogprobs(entries):
                text, scores = self._text_of(entries), self._prompt_scores(entries)
                return self._chunk(self._choice(text, (), None, scores)) if text or scores else b""
            case TextDelta() if self._with_answer:
                return self._text(event)
            case Finished():
                end = self._end(event)
                return self._stream.last(self._head, self._choice("", (), end.reason), end)
            case _:
                return b""

    def _text(self, delta: TextDelta) -> bytes:
        scores = self._scores(delta.logprobs) if delta.logprobs else None
        if not (delta.text or scores or (delta.token_ids and self._with_ids)):
            return b""
        return self._chunk(self._choice(delta.text, delta.token_ids, None, scores))

    def _end(self, end: Finished) -> Finished:
        if self._with_answer:
            return end
        return replace(
            end, reason="length", completion_tokens=0, accepted_draft_tokens=0, reasoning_tokens=0
        )

    def _text_of(self, prompt: Sequence[TokenLogprob]) -> str:
        """The next part of a prompt in ids."""
        if not self._echoes_ids:
            return ""
        return self._decoder.decode(b"".join(entry.bytes for entry in prompt))

    def _prompt_scores(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._with_prompt_logprobs or self._logprobs is None:
            return None
        return self._logprobs.of_prompt(entries)

    def _scores(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs.of_answer(entries)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return data({**self._head, "choices": [choice]})

    def _choice(
        self,
        text: str,
        ids: tuple[int, ...],
        reason: str | None,
        scores: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": self._number, "text": text, "logprobs": scores, "finish_reason": reason}
        return choice | ({"token_ids": ids} if self._with_ids else {})


def _sum(some: dict[str, Any] | None, others: dict[str, Any] | None) -> dict[str, Any] | None:
    if some is None or others is None:
        return some or others
    return {name: chain(values, others[name]) for name, values in some.items()}


def bare_request(
    model: str, request_id: RequestId, prompt: str | list[int], field: str = "prompt"
) -> GenerationRequest:
    """`field`: the body's, for errors."""
    text, ids = (prompt, None) if isinstance(prompt, str) else (None, tuple(prompt))
    return GenerationRequest(
        request_id, ModelId(model), (), Sampling(), text=text, ids=ids, prompt_field=field
    )


def _parse(body: CompletionBody, request_id: RequestId) -> Exchange:
    requests = [_request(body, request_id, number) for number in range(len(body.prompt))]
    renderers = renderers_of(body, request_id)
    return Exchange(requests[0], renderers, bool(body.stream), unknown_fields(body), requests[1:])


def _request(body: CompletionBody, request_id: RequestId, number: int) -> GenerationRequest:
    prompt = body.prompt[number]
    field = f"prompt[{number}]" if len(body.prompt) > 1 else "prompt"
    name = RequestId(f"{request_id}-p{number}" if number else request_id)
    return generation(
        body,
        name,
        text=prompt if isinstance(prompt, str) else None,
        ids=None if isinstance(prompt, str) else tuple(prompt),
        prompt_field=field,
        limits={"max_tokens": body.token_limit},
        output=pb.Output(
            top_logprobs=0 if body.logprobs is None and body.scores_prompt else body.logprobs,
            prompt_logprobs=body.scores_prompt,
            grammar=body.form,
        ),
        suffix=body.suffix or None,
    )


class TokenizerApi:
    """The endpoints that encode and decode without an answer."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[ApiRoute]:
        return [
            post_json("/v1/tokenize", self.tokenize, TokenizeBody),
            post_json("/v1/detokenize", self.detokenize, DetokenizeBody),
        ]

    async def tokenize(self, request: Request, body: TokenizeBody) -> dict[str, Any]:
        request_id = RequestId(request.state.request_id)
        if body.prompt is not None:
            generation = bare_request(body.model, request_id, body.prompt)
        else:
            turns = messages_for_template(body.messages or (), History([]))
            messages, images = gathered(turns)
            generation = GenerationRequest(
                request_id,
                ModelId(body.model),
                messages,
                Sampling(),
                tools=tuple(tool.function.for_template() for tool in body.tools or ()),
                options=thinking_options(kwargs=body.chat_template_kwargs),
                images=images,
            )
        prompt = await self._answering.encode(generation)
        count, limit = len(prompt.ids), prompt.context_length
        return {"count": count, "max_model_len": limit, "tokens": prompt.ids}

    async def detokenize(self, request: Request, body: DetokenizeBody) -> dict[str, Any]:
        request_id = RequestId(request.state.request_id)
        generation = bare_request(body.model, request_id, body.tokens, "tokens")
        return {"prompt": (await self._answering.encode(generation)).text}


COMPLETIONS: Final = Dialect("/v1/completions", CompletionBody, _parse)
