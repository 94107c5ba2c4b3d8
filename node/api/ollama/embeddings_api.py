"""Embeddings: `POST /v1/embeddings` (OpenAI), `/api/embed` and `/api/embeddings` (Ollama)."""

import base64
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from ....mtp.types import Sampling
from ....placement.ids import ModelId, RequestId
from ....proto import peer_pb2 as pb
from ...chat.requests import Finished, GenerationRequest, Part, embeddings_of
from ..http.bodies import KeepAlive, NoEffect, StrictBody, TolerantBody, unknown_fields
from ..http.dialects import Dialect, Exchange, WholeAnswer
from ..shared.inputs_schema import AnyInput, inputs_of, wrong
from ..shared.sampling_schema import ModelName
from .ollama_schema import OllamaName, OllamaOptions

MOST_INPUTS: Final = 2048
"""OpenAI's limit of inputs in one request."""


def _inputs(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Texts and token ids, none of them empty. Raises naming the one at fault."""
    inputs = inputs_of(value, MOST_INPUTS)
    for number, each in enumerate(inputs):
        if not each:
            at = "" if isinstance(value, str) else f"[{number}]"
            raise wrong(at, "should not be empty; send a text or token ids")
    return tuple(each if isinstance(each, str) else tuple(each) for each in inputs)


def _texts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """The same of texts alone, as Ollama's API has it."""
    inputs = _inputs(value)
    for number, each in enumerate(inputs):
        if not isinstance(each, str):
            raise wrong("" if len(inputs) == 1 else f"[{number}]", "should be a text")
    return inputs


Inputs = Annotated[Any, BeforeValidator(_inputs, json_schema_input_type=AnyInput)]
Texts = Annotated[Any, BeforeValidator(_texts, json_schema_input_type=str | list[str])]
Dimensions = Annotated[int | None, Field(ge=1, le=2**16)]


Render = Callable[[WholeAnswer, Finished], dict[str, Any]]


class EmbeddingsBody(StrictBody):
    model: ModelName
    input: Inputs
    dimensions: Dimensions = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate: bool | None = None
    """Cuts an input that is longer than the model reads; else it is refused."""
    user: NoEffect[str] = None
    background: bool | None = None
    keep_alive: KeepAlive = None


class _OllamaBody(TolerantBody):
    model: OllamaName
    options: NoEffect[OllamaOptions] = None
    keep_alive: KeepAlive = None


class OllamaEmbedBody(_OllamaBody):
    input: Texts
    dimensions: Dimensions = None
    truncate: bool | None = None
    """true unless it is false: see `EmbeddingsBody`."""


class OllamaEmbeddingsBody(_OllamaBody):
    """The body of `POST /api/embeddings`, the older form of `/api/embed` for one text."""

    prompt: Annotated[str, Field(min_length=1)]


def _request(
    body: EmbeddingsBody | _OllamaBody,
    request_id: RequestId,
    embeddings: pb.Embeddings,
    *,
    background: bool = False,
) -> GenerationRequest:
    return GenerationRequest(
        request_id,
        ModelId(body.model),
        (),
        Sampling(),
        num_draft_tokens=None,
        embeddings=embeddings,
        sharing=pb.Sharing(background=background, cache=False),
        keep_alive_s=body.keep_alive,
    )


def _parse(body: EmbeddingsBody, request_id: RequestId) -> Exchange:
    embeddings = embeddings_of(body.input, body.dimensions, truncate=body.truncate is True)
    request = _request(body, request_id, embeddings, background=body.background is True)

    def render(answer: WholeAnswer, end: Finished) -> dict[str, Any]:
        of = _base64 if body.encoding_format == "base64" else _numbers
        count = end.prompt_tokens
        return {
            "object": "list",
            "model": body.model,
            "data": (
                {"object": "embedding", "index": index, "embedding": of(answer.vectors[index])}
                for index in sorted(answer.vectors)
            ),
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }

    return Exchange(request, [_EmbeddingRenderer(render)], stream=False)


def _parse_embed(body: OllamaEmbedBody, request_id: RequestId) -> Exchange:
    embeddings = embeddings_of(body.input, body.dimensions, truncate=body.truncate is not False)
    began_at = time.monotonic()

    def render(answer: WholeAnswer, end: Finished) -> dict[str, Any]:
        return {
            "model": body.model,
            "embeddings": (_numbers(answer.vectors[index]) for index in sorted(answer.vectors)),
            "total_duration": int((time.monotonic() - began_at) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": end.prompt_tokens,
        }

    return _ollama_exchange(body, _request(body, request_id, embeddings), render)


def _parse_embeddings(body: OllamaEmbeddingsBody, request_id: RequestId) -> Exchange:
    def render(answer: WholeAnswer, end: Finished) -> dict[str, Any]:
        return {"embedding": _numbers(answer.vectors[0])}

    request = _request(body, request_id, embeddings_of([body.prompt], truncate=True))
    return _ollama_exchange(body, request, render)


def _ollama_exchange(body: _OllamaBody, request: GenerationRequest, render: Render) -> Exchange:
    ignored = unknown_fields(body)
    return Exchange(request, [_EmbeddingRenderer(render)], stream=False, ignored=ignored)


def _numbers(vector: bytes) -> list[float]:
    return array("f", vector).tolist()


def _base64(vector: bytes) -> str:
    """OpenAI's own form: float32, little-endian."""
    return base64.b64encode(vector).decode()


@dataclass(frozen=True, slots=True)
class _EmbeddingRenderer:
    """Renders embeddings, which are never streamed."""

    render_whole: Render

    def whole(self, answer: WholeAnswer, end: Finished) -> dict[str, Any]:
        return self.render_whole(answer, end)

    def render(self, event: Part) -> bytes:
        return b""

    def heartbeat(self) -> bytes:
        return b""


EMBEDDINGS: Final = Dialect("/v1/embeddings", EmbeddingsBody, _parse)
OLLAMA_EMBED: Final = Dialect("/api/embed", OllamaEmbedBody, _parse_embed)
OLLAMA_EMBEDDINGS: Final = Dialect("/api/embeddings", OllamaEmbeddingsBody, _parse_embeddings)
