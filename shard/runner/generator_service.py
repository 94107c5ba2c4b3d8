"""The gRPC service that answers requests, on the runner of the first stage."""

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from ...placement.errors import (
    PROMPT,
    ContextLengthExceeded,
    ExoNodeError,
    InvalidRequest,
    StateLost,
    UnsupportedParameter,
)
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ...proto.fields import changed
from ..engine.answers.events import AnswerEnd, Delta, EngineEvent, RebuiltText
from ..engine.answers.text_engine import AnswerHandle, TextEngine
from ..engine.compute import ComputeThread
from ..engine.loop_guard import EARLY, LATE, LoopLimits
from ..engine.reading.link import Readers
from ..engine.request import Parameters
from ..model.stage_limits import StageLimits
from ..pipeline.frames import REQUEST_NAME
from ..text.grammars.grammar import Gate, TokenGrammar, gate_of
from ..text.grammars.grammars import GrammarSpec, left_out, refusal, spec_of
from ..text.image_rows import PreparedImage, require_rows, with_image_rows
from ..text.messages import chat_json, tools_from_json
from ..text.prompt_encoder import PromptEncoder
from ..text.tools.channels import AnswerFormat, ReasoningCount
from ..text.tools.tool_calls import Call
from .answer_pieces import AnswerPieces
from .encodings import Encoding, Encodings, encode_bare
from .generator_wire import event_to_wire, round_from_wire, sampling_from_wire, shared_stats
from .prefix_exchange import PrefixFetcher, PrefixSender
from .refusal import Context, as_public, refuse

log = logging.getLogger(__name__)

MAX_TOP_LOGPROBS = 20
ReadersOf = Callable[[pb.GenerateRequest, Parameters], Readers | None]
"""The runners that may read a request's prompt; None if it names none."""


class GeneratorService(peer_pb2_grpc.GeneratorServicer):
    """Runs answers on the compute thread and streams their events."""

    def __init__(
        self,
        expected: StageLimits,
        engine: TextEngine,
        compute: ComputeThread,
        prompts: PromptEncoder,
        sender: PrefixSender | None = None,
        fetcher: PrefixFetcher | None = None,
        readers: ReadersOf | None = None,
    ) -> None:
        """`sender`, `fetcher`: of states to and from other runners, or None if they do not move.
        `readers`: of prompts, likewise."""
        self._readers = readers
        self._sender = sender
        self._fetcher = fetcher
        self._prompts = prompts
        self._encodings = Encodings()
        self._expected = expected
        self._engine = engine
        self._compute = compute
        self._compiling = asyncio.Semaphore(1)

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: "Context",
    ) -> AsyncIterator[pb.GenerateEvent]:
        notes: list[str] = []
        try:
            # What it may draft is decided here, so that it is what `Started` says.
            parameters = self._engine.drafting.grant(await self._prepare(request, notes))
        except ExoNodeError as fault:
            await refuse(context, fault)
        near_ties = self._engine.drafting.near_tie_drafts(parameters)
        started = pb.Started(
            prompt_ids=parameters.prompt,
            notes=notes,
            near_tie_drafts=near_ties,
            adaptive_draft=near_ties > 0 and parameters.drafting.adaptive_draft,
            reads_any=self._engine.reads_any,
        )
        yield pb.GenerateEvent(started=started)
        if request.HasField("prefix_source") and self._fetcher is not None:
            began_at = time.monotonic()
            received = await self._fetcher.fetch(request.prefix_source, parameters)
            fetch_s = time.monotonic() - began_at
            parameters = replace(parameters, received=received, fetch_s=fetch_s)
        if self._readers is not None:
            parameters = replace(parameters, readers=self._readers(request, parameters))
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[EngineEvent | BaseException | None] = asyncio.Queue()

        def enqueue(item: EngineEvent | BaseException | None) -> None:
            _ = loop.call_soon_threadsafe(events.put_nowait, item)

        pieces = self._pieces(request, parameters)
        reasoning_count = ReasoningCount(parameters.answer_format, parameters.prompt)
        for replayed in parameters.replay:
            reasoning_count.take(replayed.tokens)
        shared = shared_stats(self._expected)
        handle = self._engine.drive(self._compute, parameters, enqueue, enqueue)
        try:
            async for event in _drain(events, handle):
                event_pieces = await _pieces_of(event, pieces)
                if isinstance(event, Delta):
                    reasoning_count.take(event.round.tokens)
                names = self._engine.codec.token_bytes, self._engine.codec.prompt_bytes
                wire = event_to_wire(event, event_pieces, *names, shared)
                if isinstance(event, AnswerEnd):
                    stats = wire.finished.stats
                    stats.read_reason = stats.read_reason or request.read_reason
                    wire.finished.reasoning_tokens = reasoning_count.tokens
                yield wire
        except ExoNodeError as fault:
            await refuse(context, fault)
        finally:
            handle.cancel()

    def _pieces(self, request: pb.GenerateRequest, parameters: Parameters) -> AnswerPieces:
        tools = tools_from_json(request.tools)

        async def parse(text: str) -> Sequence[Call] | None:
            return await self._prompts.calls(text, tools)

        return AnswerPieces(
            parameters.answer_format,
            parameters.prompt,
            parse if tools else None,
            tools=tools,
            in_parts=request.output.call_parts,
        )

    def _format(self, request: pb.GenerateRequest, prompt: Sequence[int]) -> AnswerFormat:
        """How the answer marks its parts."""
        if request.bare:  # its prompt may end within any part
            return AnswerFormat()
        form = self._engine.codec.answer_format
        if request.tools:
            form = form.with_tools(tools_from_json(request.tools))
            must_call = (
                request.output.HasField("grammar") and request.output.grammar.kind == "calls"
            )
            unmarked = must_call and not self._engine.codec.has_call_grammar
            return form.unmarked_call() if unmarked else form
        if request.output.HasField("grammar") and form.entry(prompt) is None:
            form = form.whole_content()
        return form.without_calls()

    async def Encode(self, request: pb.EncodeRequest, context: "Context") -> pb.EncodeReply:
        """Tokenises a prompt or a text, or decodes ids, without an answer."""
        length = self._expected.context_length
        try:
            images = await self._images(request.images, b"")
            match request.WhichOneof("what"):
                case "messages":
                    ids = await self._prompts.encode(_chat(request.messages, request.tools), length)
                    ids = self._with_images(ids, images)
                case _:
                    return await encode_bare(request, self._prompts, self._expected)
        except ExoNodeError as fault:
            await refuse(context, fault)
        return pb.EncodeReply(ids=ids, context_length=length)

    async def FindPrefix(self, request: pb.GenerateRequest, context: "Context") -> pb.CachedPrefix:
        """Looks up a request's prompt on the event loop: the compute thread may be busy."""
        try:
            _check_request(request, self._expected)
            prompt = (await self._encoding(request)).ids.tolist()
        except ExoNodeError as fault:
            await refuse(context, fault)
        key = self._sender.key if self._sender is not None else ""
        reply = pb.CachedPrefix(prompt_rows=len(prompt), key=key)
        sharing = request.sharing
        if sharing.cache or not sharing.HasField("cache"):
            drafts = self._engine.drafting.grants(request.drafting.num_draft_tokens)
            lookup = self._engine.prefix_lookup
            reply.rows, reply.tier, reply.bytes = lookup.find(
                prompt, sharing.cache_salt, drafts=drafts
            )
        return reply

    async def ReadPrefix(
        self, request: pb.PrefixRequest, context: "Context"
    ) -> AsyncIterator[pb.FileChunk]:
        """Streams the state after a prompt's longest cached prefix."""
        try:
            if self._sender is None:
                raise InvalidRequest("states of this runner do not move", param="key")
            async with aclosing(self._sender.send(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except ExoNodeError as fault:
            await refuse(context, fault)
        except (OSError, ValueError, LookupError, TypeError) as fault:
            # A file was deleted or changed meanwhile.
            log.warning("a state was not sent: %s", fault)
            await refuse(context, StateLost("the state cannot be read from disk"))

    async def _prepare(self, request: pb.GenerateRequest, notes: list[str]) -> Parameters:
        _check_request(request, self._expected)
        if request.output.prompt_logprobs and not self._engine.is_whole:
            raise UnsupportedParameter(
                "log-probabilities of a prompt, and the text of one in ids, need the whole model "
                "on one node; this placement has several stages. Leave 'echo' out",
                param="echo",
            )
        encoding = await self._encoding(request)
        prompt = encoding.ids.tolist()
        notes += encoding.notes
        max_tokens = self._engine.limits.budget(len(prompt), request.limits.max_tokens)
        if max_tokens < request.limits.max_tokens:
            notes.append("max_tokens beyond the end of the context")
        has_grammar = request.output.HasField("grammar")
        grammar = await self._grammar(request, prompt, notes) if has_grammar else None
        # Copies, since a part of a message keeps all of it in memory: its images, its log.
        return Parameters(
            request.request,
            request.attempt,
            prompt,
            self._engine.limits.checked(sampling_from_wire(request.sampling)),
            limits=changed(request.limits, max_tokens=max_tokens),
            drafting=changed(request.drafting),
            output=changed(request.output, grammar=None),
            sharing=changed(request.sharing),
            replay=tuple(round_from_wire(r) for r in request.replay),
            fills_gap=request.HasField("suffix"),
            answer_format=self._format(request, prompt),
            grammar=grammar,
            loop_limits=_loop_limits(request, self._engine.codec.answer_format),
            images=encoding.images,
        )

    async def _encoding(self, request: pb.GenerateRequest) -> Encoding:
        """A request's prompt, which is encoded once for its look-up and its answer."""
        key = Encodings.key(request)
        if (encoding := self._encodings.get(key)) is None:
            encoding = await self._encode(request)
            self._encodings.put(key, encoding)
        return encoding

    async def _images(self, pictures: Sequence[pb.Image], client: bytes) -> list[PreparedImage]:
        """Decodes a request's images. Raises InvalidRequest naming the field of one that cannot be
        read, or does not fit the context beside those before it: the rest are not decoded."""
        if not pictures:
            return []
        files = [(file.data, file.field or "images") for file in pictures]
        if self._engine.images != "read":
            why = f"images cannot be read: {self._engine.images}"
            raise InvalidRequest(why, param=files[0][1])
        images, rows, most = list[PreparedImage](), 0, self._expected.context_length
        async with aclosing(self._prompts.images(files, client)) as prepared:
            async for image in prepared:
                images.append(image)
                rows += image.rows
                if rows > most:
                    field = files[len(images) - 1][1]
                    raise ContextLengthExceeded(
                        f"prompt is too long: {rows} tokens > {most} maximum, of images up to "
                        f"'{field}' alone; leave images out",
                        param=field,
                    )
        return images

    def _with_images(self, ids: list[int], images: Sequence[PreparedImage]) -> list[int]:
        if not images:
            return ids
        return with_image_rows(ids, self._engine.placeholder, images)

    async def _encode(self, request: pb.GenerateRequest) -> Encoding:
        notes = list[str]()
        images = await self._images(request.images, request.sharing.cache_salt)
        match request.WhichOneof("prompt"):
            case "messages":
                prompt = await self._prompts.encode(
                    _chat(request.messages, request.tools), self._expected.context_length, notes
                )
                prompt = self._with_images(prompt, images)
            case "text":
                length = self._expected.context_length
                if request.HasField("suffix"):
                    texts = request.text, request.suffix
                    prompt = await self._prompts.encode_infill(*texts, length)
                else:
                    prompt = await self._prompts.encode_text(request.text, length)
            case "token_ids":
                prompt = list(request.token_ids.ids)
            case "embeddings":
                raise UnsupportedParameter(
                    "this model is no embedder: it gives answers and no embeddings", param="model"
                )
            case _:
                raise InvalidRequest("the request has no prompt", param=PROMPT)
        if any(token >= self._expected.vocabulary for token in prompt):
            raise InvalidRequest(
                f"the prompt has ids that are not in the model's {self._expected.vocabulary}",
                param=PROMPT,
            )
        require_rows(prompt, images)
        return Encoding(tuple(notes), array("i", prompt), tuple(images))

    async def _grammar(
        self, request: pb.GenerateRequest, prompt: Sequence[int], notes: list[str]
    ) -> TokenGrammar:
        """Compiles the grammar for this attempt; `notes` names what it leaves out of its schema.

        Raises InvalidRequest naming the field.
        """
        wire, tools = request.output.grammar, tools_from_json(request.tools)
        must_call = wire.kind == "calls"
        if must_call:
            # Schemas may be large: the event loop must not block.
            lark = await asyncio.to_thread(self._engine.codec.call_grammar, wire.text, tools)
            spec = GrammarSpec("calls", lark, wire.field)
        else:
            spec = spec_of(wire.kind, wire.text, wire.field)
        gate = Gate()
        if not request.bare:
            form, calls = self._engine.codec.answer_format, bool(request.tools) and not must_call
            gate = gate_of(form, prompt, calls=calls, insists=must_call)
        if gate is None:
            raise refusal(spec, "this node does not know where in this model's answers it holds")
        await self._prompts.check(spec)
        notes += await asyncio.to_thread(left_out, spec, tools, strict=wire.strict)
        async with self._compiling:
            return await asyncio.to_thread(self._engine.codec.grammars.compile, spec, gate)


def _loop_limits(request: pb.GenerateRequest, form: AnswerFormat) -> LoopLimits | None:
    """Limits of answers with tools or no bound; headers do not show where a call begins."""
    limits = request.limits
    is_off = limits.HasField("loop_guard") and not limits.loop_guard
    if is_off or not (request.tools or limits.max_tokens == 0):
        return None
    return EARLY if request.tools and form.route is None else LATE


def _chat(messages: pb.Messages, tools: str) -> str:
    return chat_json(messages.json, tools, messages.options)


async def _pieces_of(event: EngineEvent, pieces: AnswerPieces) -> list[pb.Piece]:
    match event:
        case Delta(_, text):
            return await pieces.feed(text)
        case RebuiltText(_, _, text):
            _ = await pieces.feed(text)  # delivered by the attempt before
            return []
        case AnswerEnd(reason, text):
            return await pieces.finish(text, stopped=reason == "stop")
        case _:
            return []


def _check_request(request: pb.GenerateRequest, expected: StageLimits) -> None:
    """Checks fields that nothing else checks. Raises InvalidRequest naming the field."""
    rounds_fit = all(
        1 <= len(r.tokens) <= r.forward.rows <= expected.max_rows
        and all(token < expected.vocabulary for token in r.tokens)
        for r in request.replay
    )
    output = request.output
    checks = (
        ("placement", request.placement == expected.placement, "this runner's"),
        ("request", REQUEST_NAME.fullmatch(request.request), "1 to 64 letters, digits, - or _"),
        ("attempt", request.attempt >= 1, "at least 1"),
        (
            "top_logprobs",
            output.top_logprobs <= MAX_TOP_LOGPROBS,
            f"0 to {MAX_TOP_LOGPROBS}",
        ),
        (
            "prompt_logprobs",
            output.HasField("top_logprobs") or not output.prompt_logprobs,
            "off",
        ),
        ("stop", all(request.limits.stop), "of strings that are not empty"),
        ("replay", rounds_fit, "of rounds whose ids are in the vocabulary and fit their rows"),
    )
    for field, is_valid, expectation in checks:
        if not is_valid:
            raise InvalidRequest(f"{field} must be {expectation}", param=field)


async def _drain(
    events: "asyncio.Queue[EngineEvent | BaseException | None]", handle: AnswerHandle
) -> AsyncIterator[EngineEvent]:
    """The events up to the end. Raises ExoNodeError if an error ended the generation."""
    while True:
        item = await events.get()
        if item is None:
            return
        if isinstance(item, BaseException):
            raise as_public(item) from item
        handle.acknowledge()
        yield item
