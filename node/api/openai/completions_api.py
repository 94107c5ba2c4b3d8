"""`POST /v1/completions`, `/v1/tokenize` and `/v1/detokenize`: text and ids without a template."""

from typing import Any, Final

from starlette.requests import Request

from ....mtp.types import Sampling
from ....placement.ids import ModelId, RequestId
from ....proto import peer_pb2 as pb
from ...chat.images import gathered
from ...chat.requests import GenerationRequest
from ..http.dialects import Dialect, Exchange
from ..http.routes import ApiRoute, post_json
from ..shared.answering import Answering
from ..shared.chat_message import messages_for_template
from ..shared.history import History
from ..shared.sampling_schema import generation
from ..shared.thinking_schema import thinking_options
from .completion_renderer import renderers_of
from .completions_schema import CompletionBody, DetokenizeBody, TokenizeBody


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
    return Exchange(requests[0], renderers, bool(body.stream), body.ignored, requests[1:])


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
