"""Answers that share forwards are those that they are alone, whoever joins, leaves or stalls."""

# pyright: reportPrivateUsage=false

import math
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from budget import seeds
from driven import driven
from engines import answer, request
from models import DEMO
from readers import GREEDY, SEEDED, Reader, alone, assert_as_alone, both_ways, engine, prompt
from zoo import VOCABULARY, tiny_config
from zoo_runs import small

from exo_node.mtp.targets import FamilyTarget
from exo_node.placement.config import hidden_size
from exo_node.shard.engine import prefill_forward
from exo_node.shard.engine import request as requests
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.scheduler import Scheduler
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.text.codec import TextCodec


@pytest.fixture(autouse=True)
def no_clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The members of a forward depend on turns alone, on a busy machine too."""
    for least in ("MIN_PART_S", "MAX_PART_S"):
        monkeypatch.setattr(prefill_forward, least, math.inf)
    monkeypatch.setattr(Scheduler, "charge", lambda *_, for_prefill: None)  # pyright: ignore


@pytest.mark.smoke
@pytest.mark.parametrize("seed", seeds(1, 12))
def test_random_joins_cancels_and_stalls_leave_every_answer_its_own(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_UNREAD_EVENTS", 6)
    draw = random.Random(seed)
    readers = list[Reader]()
    for number in range(12):
        begins = draw.randrange(60)
        stall = draw.randrange(begins, begins + 40)
        engine_request = request(
            prompt(number, draw.choice([0, 5, 60, 130])),
            draw.randrange(4),
            draw.randrange(1, 40),
            sampling=draw.choice([GREEDY, GREEDY, SEEDED]),
            adaptive_draft=draw.random() < 0.5,
        )
        ends = draw.choice([None, None, begins + draw.randrange(40)])
        stalls = draw.choice([range(0), range(stall, stall + draw.randrange(60))])
        readers.append(Reader(engine_request, begins, ends, stalls))
    served = engine(runs_ahead=bool(seed % 2))
    driven(served, readers)
    assert_as_alone(readers)
    assert served.live_requests == 0 and served.cache_bytes() == 0


@both_ways
def test_what_follows_is_computed_first_only_where_that_takes_nobodys_time(
    monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    """On a CPU those that wait for a token would wait for two."""
    forwards, further, forward = list[int](), list[int](), FamilyTarget.forward_batch

    def counted(target: FamilyTarget, *args: Any) -> Any:
        forwards.append(1)
        return forward(target, *args)

    class Listener(Reader):
        def take(self, event: object) -> None:
            super().take(event)
            if self.end is None:
                further.append(len(forwards) - max(0, len(self.rounds) - 1))

    monkeypatch.setattr(FamilyTarget, "forward_batch", counted)
    driven(engine(runs_ahead=ahead), [Listener(request(prompt(i), 0, 20)) for i in range(3)])
    assert max(further) == (2 if ahead else 0)


@pytest.mark.parametrize("is_same", [True, False])
def test_prompts_share_forwards_only_where_that_was_measured_to_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, *, is_same: bool
) -> None:
    sizes, build = list[int](), prefill_forward.PrefillForward._build

    def counted(self: prefill_forward.PrefillForward, *args: Any) -> Any:
        sizes.append(len(self.requests))
        return build(self, *args)

    monkeypatch.setattr(prefill_forward.PrefillForward, "_build", counted)
    served = engine()
    served.measurements.shares_prompts = is_same
    driven(served, readers := [Reader(request(prompt(i), 0, 4)) for i in range(3)])
    assert (max(sizes) > 1) == is_same
    assert_as_alone(readers)


def test_what_is_not_batched_says_why() -> None:
    served, reason = engine(batching=False), "EXO_BATCHING_ENABLED is 0"
    readers = [Reader(request(prompt(i), 1, 8)) for i in range(2)]
    driven(served, readers)
    for reader in readers:
        assert reader.end is not None and reader.end.stats.batching_reason == reason
        assert {r.forward.batch for r in reader.rounds} == {1}


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3n"])
def test_windows_turn_in_a_batch_as_they_do_alone(family: str) -> None:
    """Windows of 8 rows: prompts shorter and longer than one, joins, one that goes on alone.

    gpt_oss has sinks; layers of gemma3n attend to the keys of others.
    """
    config = tiny_config(family)
    model = small(config)
    sizes = [(3, 30), (8, 44), (21, 17), (37, 25)]
    engine_request = [
        request([(7 * i + j) % VOCABULARY for j in range(rows)], 0, tokens, ignore_eos=True)
        for i, (rows, tokens) in enumerate(sizes)
    ]
    served, solo = (zoo_engine(model, config, batching=on) for on in (True, False))
    readers = [Reader(each, begins=(0, 0, 7, 3)[i]) for i, each in enumerate(engine_request)]
    driven(served, readers)
    assert all(max(r.forward.batch for r in each.rounds) >= 3 for each in readers)
    assert readers[1].rounds[-1].forward.batch == 1
    served.measurements.measure()
    assert served.measurements.batch_identity == "bitwise"
    assert [tuple(r.ids) for r in readers] == [answer(solo, each).ids for each in engine_request]


def test_a_model_whose_probe_fails_is_decoded_alone_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, served = FamilyTarget.forward_batch, engine()

    def no_batch(target: FamilyTarget, tokens: mx.array, caches: Sequence[object]) -> Any:
        if tokens.shape[0] > 1:
            raise TypeError("offset must be an int\nSignatures: ...")
        return forward(target, tokens, caches)

    monkeypatch.setattr(FamilyTarget, "forward_batch", no_batch)
    served.measurements.measure()
    readers = [Reader(request(prompt(i), 1, 8)) for i in range(2)]
    driven(served, readers)
    expected = "this model cannot be computed in batches (TypeError: offset must be an int)"
    for reader in readers:
        assert reader.end is not None and reader.end.stats.batching_reason == expected
        assert tuple(reader.ids) == alone(reader.request).ids


def zoo_engine(model: Any, config: dict[str, Any], *, batching: bool) -> TextEngine:
    options = EngineOptions("float32", 4096, prefill_chunk=160, batching=batching)
    stage = StageModel(model, 0, len(model.layers))
    limits = StageLimits("p", 0, "float32", hidden_size(config), 160, 4096, VOCABULARY)
    return TextEngine(Loaded(stage, limits, TextCodec.load(DEMO)), options)
