"""Embeddings: `POST /v1/embeddings` (OpenAI), `/api/embed` and `/api/embeddings` (Ollama)."""

import base64
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, cast, final

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ....mtp.types import Sampling
from ....placement.ids import ModelId, RequestId
from ....proto import peer_pb2 as pb
from ...chat.requests import Embeddings, Finished, GenerationRequest, Part
from ..http.bodies import StrictBody, TolerantBody, unknown_fields
from ..http.dialects import OLLAMA, OPENAI, Dialect, Exchange, WholeAnswer, WireFormat
from ..http.errors import HttpFault
from ..http.keep_alive import KeepAlive
from .ollama_schema import ModelName, OllamaOptions

MOST_INPUTS: Final = 2048
"""OpenAI's limit of inputs in one request."""
MOST_ID: Final = 2**31 - 1
Input = str | tuple[int, ...]


def _fault(at: str, sentence: str) -> PydanticCustomError:
    return PydanticCustomError("input", "{sentence}", {"sentence": sentence, "at": at})


def _ids(value: list[object], at: str) -> tuple[int, ...]:
    for number, token in enumerate(value):
        # 5.0 is 5: the same JSON number, and some languages write only the first.
        whole = isinstance(token, int | float) and not isinstance(token, bool) and token % 1 == 0
        if not whole or not 0 <= cast("float", token) <= MOST_ID:
            raise _fault(f"{at}[{number}]", f"should be a token id of 0 to {MOST_ID}")
    return tuple(int(cast("float", token)) for token in value)


def _one(value: object, at: str) -> Input:
    if not isinstance(value, str | list):
        raise _fault(at, "should be a text or a list of token ids")
    if not value:
        raise _fault(at, "should not be empty; send a text or token ids")
    return value if isinstance(value, str) else _ids(cast("list[object]", value), at)


def _inputs(value: object) -> tuple[Input, ...]:
    """A text, token ids, or a list of either, as a list. Raises naming the one at fault."""
    if isinstance(value, str):
        return (_one(value, ""),)
    if not isinstance(value, list) or not value:
        raise _fault("", "should be a text, a list of token ids, or a list of these")
    items = cast("list[object]", value)
    if isinstance(items[0], int | float):
        return (_ids(items, ""),)
    if len(items) > MOST_INPUTS:
        raise _fault("", f"should have at most {MOST_INPUTS} inputs; send the others by themselves")
    return tuple(_one(item, f"[{number}]") for number, item in enumerate(items))


def _texts(value: object) -> tuple[Input, ...]:
    """The same of texts alone, as Ollama's API has it."""
    inputs = _inputs(value)
    for number, each in enumerate(inputs):
        if not isinstance(each, str):
            raise _fault("" if len(inputs) == 1 else f"[{number}]", "should be a text")
    return inputs


Inputs = Annotated[
    Any,
    BeforeValidator(_inputs, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Texts = Annotated[Any, BeforeValidator(_texts, json_schema_input_type=str | list[str])]
Dimensions = Annotated[int | None, Field(ge=1, le=2**16)]


class EmbeddingsBody(StrictBody):
    """The body of `POST /v1/embeddings`."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    input: Inputs
    dimensions: Dimensions = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate: bool | None = None
    """Cuts an input that is longer than the model reads; else it is refused."""
    user: str | None = None
    background: bool | None = None
    keep_alive: KeepAlive = None

    without_effect: ClassVar[frozenset[str]] = frozenset(("user",))


class OllamaEmbedBody(TolerantBody):
    """The body of `POST /api/embed`."""

    model: ModelName
    input: Texts
    dimensions: Dimensions = None
    truncate: bool | None = None
    """true unless it is false: see `EmbeddingsBody`."""
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None

    without_effect: ClassVar[frozenset[str]] = frozenset(("options",))


class OllamaEmbeddingsBody(TolerantBody):
    """The body of `POST /api/embeddings`, the older form of `/api/embed` for one text."""

    model: ModelName
    prompt: Annotated[str, Field(min_length=1)]
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None

    without_effect: ClassVar[frozenset[str]] = frozenset(("options",))


def _request(
    body: EmbeddingsBody | OllamaEmbedBody | OllamaEmbeddingsBody,
    request_id: RequestId,
    embeddings: Embeddings,
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
    embeddings = Embeddings(body.input, body.dimensions, body.truncate is True)
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

    return Exchange(request, [_EmbeddingRenderer(render, OPENAI)], stream=False)


def _parse_embed(body: OllamaEmbedBody, request_id: RequestId) -> Exchange:
    embeddings = Embeddings(body.input, body.dimensions, body.truncate is not False)
    began_at = time.monotonic()

    def render(answer: WholeAnswer, end: Finished) -> dict[str, Any]:
        return {
            "model": body.model,
            "embeddings": (_numbers(answer.vectors[index]) for index in sorted(answer.vectors)),
            "total_duration": int((time.monotonic() - began_at) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": end.prompt_tokens,
        }

    request = _request(body, request_id, embeddings)
    renderer = _EmbeddingRenderer(render, OLLAMA)
    return Exchange(request, [renderer], stream=False, ignored=unknown_fields(body))


def _parse_embeddings(body: OllamaEmbeddingsBody, request_id: RequestId) -> Exchange:
    def render(answer: WholeAnswer, end: Finished) -> dict[str, Any]:
        return {"embedding": _numbers(answer.vectors[0])}

    request = _request(body, request_id, Embeddings((body.prompt,), truncate=True))
    renderer = _EmbeddingRenderer(render, OLLAMA)
    return Exchange(request, [renderer], stream=False, ignored=unknown_fields(body))


def _numbers(vector: bytes) -> list[float]:
    return array("f", vector).tolist()


def _base64(vector: bytes) -> str:
    """OpenAI's own form: float32, little-endian."""
    return base64.b64encode(vector).decode()


@final
class _EmbeddingRenderer:
    """Renders embeddings, which are never streamed."""

    def __init__(
        self, render: Callable[[WholeAnswer, Finished], dict[str, Any]], wire: WireFormat
    ) -> None:
        self._render = render
        self._wire = wire

    def whole(self, answer: WholeAnswer, end: Finished) -> Mapping[str, Any]:
        return self._render(answer, end)

    def render(self, event: Part) -> bytes:
        return b""

    def heartbeat(self) -> bytes:
        return b""

    def fault(self, fault: HttpFault) -> bytes:
        return self._wire.frame(fault)


EMBEDDINGS: Final = Dialect("/v1/embeddings", EmbeddingsBody, _parse)
OLLAMA_EMBED: Final = Dialect("/api/embed", OllamaEmbedBody, _parse_embed)
OLLAMA_EMBEDDINGS: Final = Dialect("/api/embeddings", OllamaEmbeddingsBody, _parse_embeddings)
