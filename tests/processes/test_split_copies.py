"""Runners of a split model that copy drafts: the ids of one engine, whatever happens to a stage."""

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import psutil
import pytest
import runners
from engines import Answer, answer, engine_of, load_quietly, request
from prompt_lookup import MODELS, chat, edits
from prompt_lookup import spec as copies_spec
from runners import Placement, WireAnswer

from exo_node.mtp.types import Sampling
from exo_node.placement.errors import ExoNodeError
from exo_node.proto import peer_pb2 as pb

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
BOUNDS = (0, 1, 3, 4)
TOKENS = 400


@dataclass(frozen=True, slots=True)
class Case:
    """A file to be edited, and what one engine answers without copies."""

    prompt: Sequence[int]
    greedy: Answer
    seeded: Answer


@pytest.fixture(scope="module")
def case() -> Case:
    spec = copies_spec("copies", native_mtp=False)
    engine = engine_of(load_quietly(spec), spec)
    prompt = chat(engine, edits(random.Random(3), 60)[0])
    seeded = request(prompt, 0, TOKENS, sampling=Sampling(temperature=0.7, seed=3))
    return Case(prompt, answer(engine, request(prompt, 0, TOKENS)), answer(engine, seeded))


@pytest.fixture(scope="module")
async def three(anyio_backend: object) -> AsyncIterator[Placement]:
    """Three stages, each of which measured at load what it computes exactly."""
    del anyio_backend
    changes = {"prompt_lookup": True, "prefix_cache_bytes": 64 << 20}
    async with runners.running(BOUNDS, MODELS["copies"], **changes) as placement:
        yield placement


def asks(placement: Placement, case: Case, **changes: object) -> pb.GenerateRequest:
    fields = {"max_tokens": TOKENS, "prompt_lookup": True, "drafting_reason": ""} | changes
    return placement.request(case.prompt, **fields)


def copied(rounds: Sequence[pb.Round]) -> list[int]:
    """The numbers of the rounds that copied."""
    return [number for number, each in enumerate(rounds) if each.copied]


async def test_copies_give_the_ids_of_one_engine(three: Placement, case: Case) -> None:
    """The second and the third answer begin after a cached prefix."""
    seeded = pb.Sampling(top_p=1.0, temperature=0.7, seed=3)
    for changes, expected in (
        ({}, case.greedy),
        ({}, case.greedy),
        ({"sampling": seeded}, case.seeded),
    ):
        got = WireAnswer()
        async for event in three.generate(asks(three, case, **changes)):
            got.add(event)
        assert got.ids == list(expected.ids) and got.text == expected.text
        assert got.finished is not None
        stats = got.finished.stats
        assert (stats.drafter_kind, stats.num_draft_tokens) == ("prompt_lookup", 0)
        assert stats.lookup_accepted_tokens > len(got.ids) / 2 and stats.lookup_reason == ""
        assert stats.greedy_identity == "bitwise"


@pytest.mark.parametrize("stage", [1, 2])
async def test_an_answer_whose_stage_is_killed_within_copies_resumes(
    three: Placement, case: Case, stage: int
) -> None:
    """It is killed while the next round is under way, whose copies nobody may see."""
    first, rounds = asks(three, case), list[pb.Round]()
    with pytest.raises(ExoNodeError):
        async for event in three.generate(first):
            if event.WhichOneof("event") == "delta":
                rounds.append(event.delta.round)
                if len(copied(rounds)) == 3:
                    psutil.Process(three.processes[stage].pid).kill()
    await three.restart(stage)
    second, got = pb.GenerateRequest(), WireAnswer()
    second.CopyFrom(first)
    second.attempt = 2
    second.replay.extend(rounds)
    async for event in three.generate(second):
        got.add(event)
    before = [token for each in rounds for token in each.tokens]
    assert [*before, *got.ids] == list(case.greedy.ids)
    assert copied(got.rounds), "the stage that took its place agreed on no copies"
    assert got.finished is not None and got.finished.stats.resumes == 1


async def test_a_request_that_names_its_drafts_copies_nothing(three: Placement, case: Case) -> None:
    got = WireAnswer()
    async for event in three.generate(asks(three, case, prompt_lookup=False)):
        got.add(event)
    assert got.ids == list(case.greedy.ids) and not copied(got.rounds)
