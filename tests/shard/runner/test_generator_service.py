"""The generator's service: what it asks the engine for, and what it streams of an answer."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engines import CHUNK, changed, message
from families_text import codec_of
from small import PROMPT, small_engine

from exo_node.mtp.types import Forward, Round, Sampling
from exo_node.placement.errors import InvalidRequest
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.events import Delta, EngineEvent, RebuiltText
from exo_node.shard.engine.answers.request_limits import RequestLimits
from exo_node.shard.engine.compute import ComputeThread
from exo_node.shard.engine.loop_guard import EARLY, LATE, LoopLimits
from exo_node.shard.engine.request import MAX_UNREAD_EVENTS, Parameters
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.runner.generator_service import GeneratorService

CODEC = codec_of("qwen")
IDS = CODEC.encode_text("<think>\n")
CONTEXT = 64
VOCABULARY = 5000
LIMITS = StageLimits("p", 0, "float32", 8, 8, CONTEXT, VOCABULARY)
_NO_CONTEXT: Any = None


Put = Callable[[Any], None]
Drive = Callable[[Any, Parameters, Put, Put], Any]
RUN = SimpleNamespace(cancel=lambda: None, acknowledge=lambda: None)


class _Prompts:
    async def encode(self, _: str, __: int, notes: list[str]) -> list[int]:
        notes.append("a note")
        return IDS

    async def encode_text(self, _: str, __: int) -> list[int]:
        return IDS


def streamed(drive: Drive, **fields: Any) -> list[pb.GenerateEvent]:
    """The events of one request, with a stand-in for the engine."""
    return asyncio.run(_stream(_stand_in(drive), None, **fields))


def _stand_in(drive: Drive, k: int = 3, near_ties: int = 0) -> Any:
    """`k`: the most that is granted. `near_ties`: the K of drafts that may decide near ties."""

    def grant(request: Parameters) -> Parameters:
        return changed(request, num_draft_tokens=min(k, request.k))

    def near_tie_drafts(request: Parameters) -> int:
        return min(near_ties, request.k)

    drafting = SimpleNamespace(grant=grant, near_tie_drafts=near_tie_drafts)
    return SimpleNamespace(
        limits=RequestLimits(CONTEXT, VOCABULARY),
        codec=CODEC,
        is_whole=True,
        drive=drive,
        drafting=drafting,
        reads_any=False,
    )


async def _stream(engine: Any, compute: Any, **fields: Any) -> list[pb.GenerateEvent]:
    prompts: Any = _Prompts()
    service = GeneratorService(LIMITS, engine, compute, prompts)
    fields = {"sampling": sampling()} | fields
    request = message(placement=LIMITS.placement, request="r", attempt=1, **fields)
    context: Any = None
    async with asyncio.timeout(30):
        return [event async for event in service.Generate(request, context)]


def sampling(**fields: Any) -> pb.Sampling:
    return pb.Sampling(temperature=Sampling().temperature, top_p=1, **fields)


def generated(**fields: Any) -> tuple[Parameters, pb.Started]:
    """The request that the engine gets, and the first event."""
    engine_requests: list[Parameters] = []

    def drive(_: Any, engine_request: Parameters, deliver: Put, on_end: Put) -> Any:
        del deliver
        engine_requests.append(engine_request)
        on_end(None)
        return RUN

    events = streamed(drive, **fields)
    return engine_requests[0], events[0].started


def computed(events: Iterable[EngineEvent], **fields: Any) -> list[pb.GenerateEvent]:
    """The events after the first, where the engine gives these."""

    def drive(_: Any, engine_request: Parameters, deliver: Put, on_end: Put) -> Any:
        del engine_request
        for event in events:
            deliver(event)
        on_end(None)
        return RUN

    return streamed(drive, **fields)[1:]


CHAT: dict[str, Any] = {"messages": pb.Messages(json="[]")}


@pytest.mark.parametrize(
    ("granted", "near_ties", "said"),
    [(3, 0, (0, False)), (3, 3, (2, True)), (0, 3, (0, False))],
    ids=["bitwise", "near_tie", "not measured"],
)
def test_an_attempt_says_what_its_drafts_may_decide(
    granted: int, near_ties: int, said: tuple[int, bool]
) -> None:
    """A resume is exact only where that is the same in all attempts."""
    requested = list[int]()

    def drive(_: Any, engine_request: Parameters, deliver: Put, on_end: Put) -> Any:
        del deliver
        requested.append(engine_request.k)
        on_end(None)
        return RUN

    fields = {"num_draft_tokens": 2, "adaptive_draft": True}
    engine = _stand_in(drive, granted, near_ties)
    engine.reads_any = near_ties > 0
    [event, *_] = asyncio.run(_stream(engine, None, **CHAT, **fields))
    assert event.started.reads_any is engine.reads_any
    assert (event.started.near_tie_drafts, event.started.adaptive_draft) == said
    assert requested == [min(granted, 2)], "what was said is what is done"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        (CHAT, ("a</think>b", "!")),
        ({"text": "x", "bare": True}, ("", "a")),
    ],
)
def test_a_stop_string_counts_in_the_content_alone(
    fields: dict[str, Any], end: tuple[str, str]
) -> None:
    engine_request, _ = generated(stop=["a", "!"], **fields)
    strings = engine_request.stop_strings()
    assert (strings.feed("a</think>b!"), strings.match) == end


TOOLS = '[{"type": "function", "function": {"name": "f"}}]'


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({"tools": TOOLS, "loop_guard": True, "max_tokens": 9}, EARLY),
        ({"tools": TOOLS, "loop_guard": True}, EARLY),
        ({"tools": TOOLS, "max_tokens": 9}, EARLY),
        ({"tools": TOOLS, "loop_guard": False, "max_tokens": 9}, None),
        ({"tools": TOOLS, "loop_guard": False}, None),
        ({"loop_guard": True}, LATE),
        ({"loop_guard": True, "max_tokens": 9}, None),
        ({"loop_guard": False}, None),
        ({}, LATE),
    ],
)
def test_an_answer_with_tools_or_without_a_limit_ends_by_its_repeats(
    fields: dict[str, Any], limits: LoopLimits | None
) -> None:
    engine_request, _ = generated(**CHAT, **fields)
    assert engine_request.loop_limits is limits
    assert (engine_request.loop_guard() is None) is (limits is None)
    assert replace(engine_request, grammar=cast("Any", object())).loop_guard() is None


@pytest.mark.parametrize(
    ("max_tokens", "granted"), [(32_000, CONTEXT - len(IDS)), (5, 5), (0, None)]
)
def test_more_tokens_than_the_context_has_are_cut_and_told(
    max_tokens: int, granted: int | None
) -> None:
    engine_request, started = generated(max_tokens=max_tokens, **CHAT)
    assert engine_request.limits.max_tokens == (granted or CONTEXT - len(IDS))
    cut = ["max_tokens beyond the end of the context"] if max_tokens > CONTEXT else []
    assert list(started.notes) == ["a note", *cut]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 5.0),
        ("min_p", -0.5),
        ("top_p", 1.5),
        ("xtc_probability", 2.0),
        ("xtc_threshold", 0.6),
        ("temperature", -1.0),
    ],
)
def test_a_members_sampling_that_means_nothing_is_refused_by_its_field(
    field: str, value: float
) -> None:
    sampling = replace(Sampling(), **{field: value})
    with pytest.raises(InvalidRequest, match=f"{field} must be") as caught:
        _ = RequestLimits(CONTEXT, VOCABULARY).checked(sampling)
    assert caught.value.param == field


def test_a_bias_on_the_first_id_beyond_the_vocabulary_is_refused() -> None:
    def biased(token: int) -> Sampling:
        return Sampling(logit_bias=((7, 1.0), (token, 1.0)))

    limits = RequestLimits(CONTEXT, VOCABULARY)
    assert limits.checked(biased(VOCABULARY - 1)) == biased(VOCABULARY - 1)
    with pytest.raises(InvalidRequest, match=f"names token {VOCABULARY}") as caught:
        _ = limits.checked(biased(VOCABULARY))
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("number", [None, 0, 3])
def test_a_zero_is_another_thing_than_a_field_that_is_absent(number: int | None) -> None:
    engine_request, _ = generated(**CHAT, top_logprobs=number, sampling=sampling(seed=number))
    assert (engine_request.top_logprobs, engine_request.sampling.seed) == (number, number)


def test_an_answer_of_any_length_comes_whole_to_a_reader_that_keeps_reading() -> None:
    served, compute, count = small_engine(), ComputeThread(), 2 * MAX_UNREAD_EVENTS + 1
    fields = {"token_ids": pb.TokenIds(ids=PROMPT), "max_tokens": count, "ignore_eos": True}
    try:
        events = asyncio.run(_stream(served, compute, **fields))
    finally:
        compute.close()
    ids = [token for event in events for token in event.delta.round.tokens]
    assert len(ids) == count
    assert events[-1].finished.reason == "length"


def test_a_resumed_answer_continues_in_the_part_that_it_was_in() -> None:
    """The prompt opens the reasoning, which the attempt before has closed."""
    new = Delta(Round((5,), 0, 0, Forward(9, 1, 1)), " there")
    retold, delta = computed([RebuiltText(1, 1, "Hm.</think>\n\nHello"), new], **CHAT)
    assert (retold.rebuilt.done, retold.rebuilt.total) == (1, 1)
    assert (delta.delta.text, list(delta.delta.pieces)) == (" there", [])


@pytest.mark.smoke
def test_a_prefix_is_found_while_the_compute_thread_is_busy() -> None:
    served, compute, busy = small_engine(prefix_cache_bytes=1 << 26), ComputeThread(), Event()
    rows = 2 * CHUNK
    prompt = [3 + id_ % 4000 for id_ in range(rows + 5)]
    fields = {"token_ids": pb.TokenIds(ids=prompt), "max_tokens": 2}
    try:
        events = asyncio.run(_stream(served, compute, **fields))
        assert events[-1].finished.stats.cached_tokens == 0
        blocked = compute.submit(busy.wait)
        reply = _prefix(served, compute, **fields)
        unsaved = _prefix(served, compute, cache=False, **fields)
        assert not blocked.done()
    finally:
        busy.set()
        compute.close()
    assert (reply.prompt_rows, reply.rows, reply.tier) == (rows + 5, rows, "memory")
    assert 0 < reply.bytes <= served.prefix_cache_bytes and reply.key == "the key"
    assert unsaved == pb.CachedPrefix(prompt_rows=rows + 5, key="the key")


def _prefix(engine: Any, compute: Any, **fields: Any) -> pb.CachedPrefix:
    prompts: Any = _Prompts()
    sender: Any = SimpleNamespace(key="the key")
    service = GeneratorService(LIMITS, engine, compute, prompts, sender)
    request = message(placement=LIMITS.placement, request="r", attempt=1, **fields)
    return asyncio.run(service.FindPrefix(request, _NO_CONTEXT))
