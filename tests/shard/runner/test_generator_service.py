"""How the generator's service prepares a request: its stop strings and its tokens."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from families_text import codec_of

from exo_node.mtp.types import Sampling
from exo_node.placement.errors import InvalidRequest
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.request import EngineRequest
from exo_node.shard.engine.request_limits import RequestLimits
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.runner.generator_service import GeneratorService

CODEC = codec_of("qwen")
IDS = CODEC.encode_text("<think>\n")
CONTEXT = 64


class _Prompts:
    async def encode(self, _: str, __: int, notes: list[str]) -> list[int]:
        notes.append("a note")
        return IDS

    async def encode_text(self, _: str, __: int) -> list[int]:
        return IDS


class _Compute:
    def drive(self, _: Any, put: Callable[[Any], None], done: Any, *, background: bool) -> Any:
        put(None)
        return SimpleNamespace(cancel=lambda: None, read=lambda: None)


def generated(**fields: Any) -> tuple[EngineRequest, pb.Started]:
    """What the engine is asked for, and the first event."""
    asked: list[EngineRequest] = []
    engine: Any = SimpleNamespace(
        limits=RequestLimits(CONTEXT, 5000),
        answer_format=CODEC.answer_format,
        token_bytes=CODEC.token_bytes,
        generate=asked.append,
    )
    limits = StageLimits("p", 0, "float32", 8, 8, CONTEXT, 5000)
    compute: Any = _Compute()
    prompts: Any = _Prompts()
    service = GeneratorService(limits, engine, compute, prompts)
    sampling = pb.Sampling(temperature=Sampling().temperature, top_p=1)
    request = pb.GenerateRequest(
        placement=limits.placement, request="r", attempt=1, sampling=sampling, **fields
    )

    async def run() -> pb.Started:
        context: Any = None
        events = [event async for event in service.Generate(request, context)]
        return events[0].started

    started = asyncio.run(run())
    return asked[0], started


CHAT = {"messages": pb.Messages(json="[]")}


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
    asked, _ = generated(stop=["a", "!"], **fields)
    strings = asked.stop_strings()
    assert (strings.feed("a</think>b!"), strings.match) == end


@pytest.mark.parametrize(("wanted", "granted"), [(32_000, CONTEXT - len(IDS)), (5, 5), (0, None)])
def test_more_tokens_than_the_context_has_are_cut_and_told(
    wanted: int, granted: int | None
) -> None:
    asked, started = generated(max_tokens=wanted, **CHAT)
    assert asked.max_tokens == (granted or CONTEXT - len(IDS))
    cut = ["max_tokens beyond the end of the context"] if wanted > CONTEXT else []
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
        _ = RequestLimits(CONTEXT, 5000).checked(sampling)
    assert caught.value.param == field
