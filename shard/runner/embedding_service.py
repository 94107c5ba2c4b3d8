"""The gRPC service that computes embeddings, on the runner of an embedder."""

import asyncio
from array import array
from collections.abc import AsyncIterator

import grpc.aio

from ...mtp.types import GenerationStats
from ...placement.errors import (
    ContextLengthExceeded,
    ExoNodeError,
    InvalidRequest,
    LoadFailed,
    UnsupportedParameter,
)
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ..engine.answers.embedding_engine import EmbeddingEngine, EmbeddingRequest
from ..engine.compute import ComputeThread
from ..engine.options import EngineOptions
from ..model.load import Loaded
from ..model.stage_limits import StageLimits
from ..pipeline.frames import REQUEST_NAME
from ..text.prompt_encoder import PromptEncoder
from .encodings import encode_bare
from .generator_wire import shared_stats, stats_to_wire
from .refusal import Context, as_public, refuse

_Item = tuple[int, bytes] | GenerationStats | BaseException


class EmbeddingService(peer_pb2_grpc.GeneratorServicer):
    """Answers requests for embeddings; it generates nothing."""

    def __init__(
        self,
        expected: StageLimits,
        engine: EmbeddingEngine,
        compute: ComputeThread,
        prompts: PromptEncoder,
    ) -> None:
        self._expected = expected
        self._engine = engine
        self._compute = compute
        self._prompts = prompts
        self._frame: tuple[list[int], list[int]] | None = None

    async def Generate(
        self, request: pb.GenerateRequest, context: "Context"
    ) -> AsyncIterator[pb.GenerateEvent]:
        notes: list[str] = []
        try:
            embedding_request = await self._prepare(request, notes)
        except ExoNodeError as fault:
            await refuse(context, fault)
        yield pb.GenerateEvent(started=pb.Started(notes=notes))
        began_at, prompts = self._engine.clock(), embedding_request.prompts
        loop, items = asyncio.get_running_loop(), asyncio.Queue[_Item]()

        def deliver(item: _Item) -> None:
            _ = loop.call_soon_threadsafe(items.put_nowait, item)

        run = self._engine.drive(self._compute, embedding_request, deliver)
        try:
            while True:
                match item := await items.get():
                    case (index, vector):
                        embedded = pb.Embedded(
                            index=index, vector=vector, tokens=len(prompts[index])
                        )
                        yield pb.GenerateEvent(embedded=embedded)
                    case GenerationStats():
                        yield self._finished(item, self._engine.clock() - began_at)
                        return
                    case _:
                        raise as_public(item) from item
        except ExoNodeError as fault:
            await refuse(context, fault)
        finally:
            self._compute.post(run.cancel)

    async def Encode(self, request: pb.EncodeRequest, context: "Context") -> pb.EncodeReply:
        """Tokenises a text as an input, or decodes ids."""
        try:
            return await encode_bare(request, self._prompts, self._expected)
        except ExoNodeError as fault:
            await refuse(context, fault)

    async def FindPrefix(self, request: pb.GenerateRequest, context: "Context") -> pb.CachedPrefix:
        """Nothing: no input begins after another's."""
        return pb.CachedPrefix()

    async def ReadPrefix(
        self, request: pb.PrefixRequest, context: "Context"
    ) -> AsyncIterator[pb.FileChunk]:
        """Refused: see `FindPrefix`."""
        await refuse(context, InvalidRequest("an embedder has no cached prefixes", param="key"))
        yield pb.FileChunk()

    def _finished(self, stats: GenerationStats, seconds: float) -> pb.GenerateEvent:
        wire = stats_to_wire(stats, "off")
        wire.MergeFrom(shared_stats(self._expected))
        wire.prompt_tps = stats.prompt_tokens / seconds if seconds > 0 else 0.0
        wire.time_to_first_token_s = seconds
        return pb.GenerateEvent(finished=pb.Finished(reason="stop", stats=wire))

    async def _prepare(self, request: pb.GenerateRequest, notes: list[str]) -> EmbeddingRequest:
        wire, size = request.embeddings, self._engine.hidden_size
        checks = (
            ("placement", request.placement == self._expected.placement, "this runner's"),
            ("request", REQUEST_NAME.fullmatch(request.request), "1 to 64 letters, digits, - or _"),
            ("attempt", request.attempt >= 1, "at least 1"),
            ("dimensions", wire.dimensions <= size, f"1 to {size}, the model's own"),
        )
        if request.WhichOneof("prompt") != "embeddings":
            raise UnsupportedParameter(
                "this model is an embedder: it gives embeddings and no answers", param="model"
            )
        for field, is_valid, expectation in checks:
            if not is_valid:
                raise InvalidRequest(f"'{field}' must be {expectation}", param=field)
        self._frame = self._frame or await self._frame_tokens()
        prompts = {
            each.index: array("i", await self._prompt(each, wire, self._frame, notes))
            for each in wire.inputs
        }
        return EmbeddingRequest(
            request.request,
            request.attempt,
            prompts,
            wire.dimensions or size,
            background=request.sharing.background,
            after_fault=request.sharing.alone,
        )

    async def _prompt(
        self,
        wire: pb.EmbeddingInput,
        whole: pb.Embeddings,
        frame: tuple[list[int], list[int]],
        notes: list[str],
    ) -> list[int]:
        """The ids of an input with the tokens around it. Raises InvalidRequest that names it."""
        limit, (starts, ends) = self._expected.context_length, frame
        field = f"input[{wire.index}]" if len(whole.inputs) > 1 else "input"
        if wire.WhichOneof("input") == "text":
            ids = await self._encoded(wire.text, field, notes, truncate=whole.truncate)
        else:
            ids = list(wire.token_ids.ids)
            ids = ids if ids[: len(starts)] == starts else starts + ids
            ids = ids if ids[len(ids) - len(ends) :] == ends else ids + ends
        if min(ids) < 0 or max(ids) >= self._expected.vocabulary:
            most = self._expected.vocabulary - 1
            raise InvalidRequest(f"'{field}' has ids beyond 0 to {most}", param=field)
        if len(ids) <= limit:
            return ids
        if not whole.truncate:
            raise _too_long(field, f"{len(ids)} tokens", limit)
        if _CUT not in notes:
            notes.append(_CUT)
        return [*ids[: limit - len(ends)], *ends]

    async def _encoded(
        self, text: str, field: str, notes: list[str], *, truncate: bool
    ) -> list[int]:
        limit = self._expected.context_length
        try:
            if truncate:
                ids, is_whole = await self._prompts.encode_beginning(text, limit)
                if not is_whole and _CUT not in notes:
                    notes.append(_CUT)
                return ids
            return await self._prompts.encode_text(text, limit)
        except ContextLengthExceeded as fault:
            raise _too_long(field, f"{len(text)} characters", limit) from fault
        except InvalidRequest as fault:
            raise InvalidRequest(f"'{field}': {fault.message}", param=field) from fault

    async def _frame_tokens(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer itself puts before and after every text.

        Raises LoadFailed if there are none where an embedding is read from such a token's row.
        """
        length = self._expected.context_length
        starts, some = [await self._prompts.encode_text(text, length) for text in ("", "a")]
        ends = list[int]()
        while starts and some and starts[-1] == some[-1]:
            ends.insert(0, starts.pop())
            _ = some.pop()
        place, tokens = {
            "cls": ("start token in front of", starts),
            "last": ("end token behind", ends),
        }.get(self._engine.pooling, ("", ends))
        if place and not tokens:
            raise LoadFailed(
                f"the model's tokenizer puts no {place} a text, and its embeddings are "
                "read from that token; take the publisher's present tokenizer.json",
                param="tokenizer.json",
            )
        return starts, ends


async def serve_embeddings(
    server: grpc.aio.Server,
    loaded: Loaded,
    spec: pb.StageSpec,
    compute: ComputeThread,
    prompts: PromptEncoder,
) -> EmbeddingEngine:
    """Adds the service of a loaded embedder to the server, and returns its engine."""
    making = compute.submit(lambda: EmbeddingEngine(loaded, EngineOptions.of(spec)))
    engine = await asyncio.wrap_future(making)
    service = EmbeddingService(loaded.expected, engine, compute, prompts)
    peer_pb2_grpc.add_GeneratorServicer_to_server(service, server)
    return engine


_CUT = "input beyond the end of the context"


def _too_long(field: str, size: str, limit: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"'{field}' has {size}, and this model reads {limit} tokens of an input; shorten it, or "
        'send "truncate": true to have it cut',
        param=field,
    )
