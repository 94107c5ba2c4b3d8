"""A runner of a whole model that takes over an answer goes on with the same tokens and drafts.

A small checkpoint with its head, both perturbed by their rows: only the very forwards of before
give the numbers of before.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from engines import STORY, answer, engine_of, load_quietly, request
from shims import by_rows, perturb
from small import small_spec

from exo_node.mtp.drafting.depth import Plan
from exo_node.mtp.types import Round, Sampling
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.request import Parameters
from exo_node.shard.model.load import Loaded

PROMPT: list[int] = STORY["prompt_ids"]
LONG = (PROMPT * 30)[:330]
CHUNK = 16
TOKENS = 28
GREEDY = Sampling()
SEEDED = Sampling(temperature=1.0, seed=5)


@functools.cache
def _loaded() -> Loaded:
    loaded = load_quietly(small_spec(native_mtp=True, prefill_chunk=CHUNK))
    assert perturb(loaded.model.model, by_rows, size=0.1) > 10
    head: Any = loaded.head
    assert perturb(head, by_rows, size=0.1) > 4
    return loaded


class Stretches:
    """Drafts two tokens a round, or none for a while, as the position says."""

    def plan(self, position: int) -> Plan:
        inside = position % 16
        return Plan(2, 1) if inside < 8 else Plan(0, 16 - inside)

    def learn(self, k: int, accepted: int, position: int, seconds: float) -> None:
        del k, accepted, position, seconds

    def reason(self, position: int) -> str:
        return f"as position {position} says"


@dataclass(frozen=True, slots=True)
class Mode:
    k: int
    stretches: bool = False
    rows: int = 0
    sampling: Sampling = GREEDY


MODES = {
    "plain, seeded": Mode(0, sampling=SEEDED),
    "drafting, seeded": Mode(2, sampling=SEEDED),
    "at times": Mode(2, stretches=True),
    "strict": Mode(2, rows=4),
    "strict, at times": Mode(2, stretches=True, rows=4),
}


def runner(mode: Mode, **changes: Any) -> TextEngine:
    """One that holds nothing of any request."""
    stage_spec = small_spec(native_mtp=True, prefill_chunk=CHUNK, fixed_rows=mode.rows, **changes)
    text_engine = engine_of(_loaded(), stage_spec)
    if mode.stretches:

        def stretches(request: Parameters) -> Stretches:
            del request
            return Stretches()

        text_engine.drafting.depth = stretches
    return text_engine


def request_in(mode: Mode, prompt: Sequence[int] = PROMPT) -> Parameters:
    return request(prompt, mode.k, TOKENS, ignore_eos=True, top_logprobs=0, sampling=mode.sampling)


@functools.cache
def undisturbed(mode: Mode) -> tuple[Round, ...]:
    return answer(runner(mode), request_in(mode)).rounds


@pytest.mark.parametrize("share", [0.0, 0.6])
@pytest.mark.parametrize("name", MODES)
def test_it_repeats_the_recorded_rounds_and_drafts_as_before(name: str, share: float) -> None:
    mode = MODES[name]
    expected = undisturbed(mode)
    cut = 1 + int(share * len(expected))
    again = replace(request_in(mode), attempt=2, replay=expected[:cut])
    assert answer(runner(mode), again).rounds == expected[cut:]


def test_a_prompt_that_begins_like_a_kept_one_is_read_behind_that() -> None:
    mode = Mode(2)
    expected = answer(runner(mode, prefix_cache_bytes=1 << 24), request_in(mode, LONG)).rounds
    warm = runner(mode, prefix_cache_bytes=1 << 24)
    _ = answer(warm, request_in(mode, [*LONG[:320], 5, 6]))
    rest = answer(warm, replace(request_in(mode, LONG), attempt=2, replay=expected[:9]))
    assert rest.rounds == expected[9:]
    assert rest.stats.cached_tokens > 0
