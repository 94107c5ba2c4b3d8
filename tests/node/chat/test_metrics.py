"""A node's metrics for Prometheus: names, labels, times, and the endings of answers."""

import asyncio
import random
from collections.abc import Mapping
from contextlib import aclosing, nullcontext, suppress
from typing import Any, get_args

import pytest
from clocks import Clock
from fakes import FakeFacts, FakeGenerators, FakeStages, OneHead, leading
from prometheus_client.parser import text_string_to_metric_families
from samples import PLAIN, Samples, of_demo, sampled, stats_of, wire_stats_of

from exo_node.mtp.types import FinishReason, Sampling
from exo_node.node.chat.chat import ChatService
from exo_node.node.chat.metrics import Ending, Metrics
from exo_node.node.chat.requests import Event, Finished, GenerationRequest, Started, TextDelta
from exo_node.node.chat.scrape import NodeState
from exo_node.node.chat.totals import Totals
from exo_node.node.machine.timing import LOCAL
from exo_node.node.placements.placements import Placements
from exo_node.placement.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    NumericError,
    PeerLost,
    QueueFull,
)
from exo_node.placement.ids import ModelId, RequestId
from exo_node.proto import peer_pb2 as pb

DEMO = ModelId("demo")
STATE = NodeState(
    version="1.2.3",
    nodes={"alive": 2, "suspect": 0, "dead": 1},
    placements={"ready": 1, "failed": 0},
    gpu_faults={("demo", "watchdog"): 2},
    runners=[
        pb.StageState(
            model="demo",
            weight_bytes=300,
            cache_bytes=20,
            prefix_cache_bytes=30,
            prefix_disk_bytes=35,
            prefix_memory_rows=7,
            prefix_disk_rows=8,
            prefix_peer_rows=9,
            peak_memory_bytes=400,
        )
    ],
)


def finished(tokens: int, reason: FinishReason = "stop", **changes: Any) -> Finished:
    return Finished(reason, 5, tokens, 0, 4, stats_of(tokens, **changes))


VLLM: Mapping[str, str] = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
}
"""The names and types that vLLM's own dashboards select, as its source has them."""


def answered_in(metrics: Metrics, clock: Clock, *steps: float | Event) -> None:
    """One answer of these events, with the given seconds between them."""
    with metrics.answer(DEMO) as meter:
        for step in steps:
            if isinstance(step, int | float):
                clock.now += step
            else:
                if isinstance(step, Started):
                    meter.mark_running()
                meter.record(step)


def test_names_types_and_labels_are_those_of_vllm() -> None:
    totals, clock = Totals(), Clock()
    metrics = Metrics(totals, clock)
    answered_in(
        metrics, clock, Started((1,)), TextDelta("a", (1,)), TextDelta("b", (2,)), finished(2)
    )
    totals.add(DEMO, 2, stats_of(2))
    families = list(text_string_to_metric_families(metrics.render(STATE).decode()))
    of_vllm = {family.name: family.type for family in families if family.name.startswith("vllm:")}
    assert {n: t for n, t in of_vllm.items() if not n.endswith("_created")} == VLLM
    more = {"vllm:request_success": "finished_reason"}
    more["vllm:spec_decode_num_accepted_tokens_per_pos"] = "position"
    for family in families:
        if family.name in VLLM:
            named = {name for sample in family.samples for name in sample.labels} - {"le"}
            assert named == {"model_name", "engine", more.get(family.name, "engine")}
    assert {f.name.partition("_")[0] for f in families} <= {"exo"} | {
        name.partition("_")[0] for name in VLLM
    }


def test_times_are_measured_from_the_requests_arrival() -> None:
    clock = Clock()
    metrics = Metrics(Totals(), clock)
    answered_in(
        metrics,
        clock,
        *(2.0, Started((1,) * 5), 1.0, TextDelta("", (1,)), 0.5, TextDelta("ab", (2, 3))),
        *(TextDelta("held back", ()), 0.25, TextDelta("c", (4,)), 4.0, finished(4)),
    )
    samples = sampled(metrics.render(STATE))
    sums = {
        "vllm:time_to_first_token_seconds": (3.0, 1),
        "vllm:inter_token_latency_seconds": (0.75, 2),
        "vllm:request_time_per_output_token_seconds": (0.25, 1),
        "vllm:e2e_request_latency_seconds": (7.75, 1),
        "vllm:request_queue_time_seconds": (2.0, 1),
        "vllm:request_prefill_time_seconds": (1.0, 1),
        "vllm:request_decode_time_seconds": (0.75, 1),
        "vllm:request_prompt_tokens": (5, 1),
        "vllm:request_generation_tokens": (4, 1),
    }
    got = {
        name: (of_demo(samples, f"{name}_sum"), of_demo(samples, f"{name}_count")) for name in sums
    }
    assert got == sums


FAULTS: list[tuple[BaseException, Ending]] = [
    (GeneratorExit(), "abort"),
    (asyncio.CancelledError(), "abort"),
    (PeerLost("x"), "error"),
    (RuntimeError("a defect"), "error"),
    (InvalidRequest("x"), "rejected"),
    (ContextLengthExceeded("x"), "rejected"),
    (QueueFull("x"), "rejected"),
]


@pytest.mark.parametrize("has_begun", [False, True], ids=["waiting", "running"])
@pytest.mark.parametrize(("fault", "how"), FAULTS, ids=[repr(fault) for fault, _ in FAULTS])
def test_an_answer_that_breaks_off_counts_once_by_its_cause(
    fault: BaseException, how: Ending, has_begun: bool
) -> None:
    metrics = Metrics(Totals(), Clock())
    with pytest.raises(type(fault)), metrics.answer(DEMO) as meter:
        if has_begun:
            meter.mark_running()
            meter.record(Started((1, 2)))
            meter.record(TextDelta("a", (3,)))
        raise fault
    samples = sampled(metrics.render(STATE))
    counted = {
        each: of_demo(samples, "vllm:request_success_total", finished_reason=each)
        for each in get_args(Ending)
    }
    assert counted == {**dict.fromkeys(counted, 0), how: 1}
    for name in ("running", "waiting"):
        assert not of_demo(samples, f"vllm:num_requests_{name}")
    assert of_demo(samples, "vllm:prompt_tokens_total") == (2 if has_begun else 0)
    assert of_demo(samples, "vllm:generation_tokens_total") == (1 if has_begun else 0)
    assert of_demo(samples, "vllm:e2e_request_latency_seconds_count") is None


@pytest.mark.parametrize("reason", get_args(FinishReason))
def test_a_client_that_leaves_after_the_end_has_the_whole_answer(reason: FinishReason) -> None:
    metrics = Metrics(Totals(), Clock())
    with suppress(GeneratorExit), metrics.answer(DEMO) as meter:
        meter.mark_running()
        meter.record(finished(1, reason))
        raise GeneratorExit
    samples = sampled(metrics.render(STATE))
    assert of_demo(samples, "vllm:request_success_total", finished_reason=reason) == 1
    assert of_demo(samples, "vllm:request_success_total", finished_reason="abort") == 0


def test_the_nodes_own_state_is_what_it_is_when_asked() -> None:
    metrics = Metrics(Totals())
    samples = sampled(metrics.render(STATE))
    runner = (("model_name", "demo"), ("stage", "0"))
    assert samples["exo_node_build_info", (("version", "1.2.3"),)] == 1
    assert samples["exo_node_nodes", (("status", "alive"),)] == 2
    assert samples["exo_node_nodes", (("status", "suspect"),)] == 0
    assert samples["exo_node_placements", (("status", "ready"),)] == 1
    assert samples["exo_node_runner_weights_bytes", runner] == 300
    assert samples["exo_node_runner_cache_bytes", runner] == 20
    assert samples["exo_node_runner_prefix_cache_bytes", runner] == 30
    assert samples["exo_node_runner_prefix_disk_bytes", runner] == 35
    for tier, count in (("memory", 7), ("disk", 8), ("peer", 9)):
        labels = (*runner, ("tier", tier))
        assert samples["exo_node_runner_prefix_tokens_total", labels] == count
    assert samples["exo_node_runner_peak_memory_bytes", runner] == 400
    later = NodeState("1.2.3", {"alive": 1}, {}, [], {})
    assert ("exo_node_runner_cache_bytes", runner) not in sampled(metrics.render(later))


def test_drafts_are_counted_as_the_totals_have_them() -> None:
    totals = Totals()
    for _ in range(2):
        totals.add(DEMO, 7, stats_of(7))
    totals.add(ModelId("other"), 6, stats_of(6, **PLAIN))
    samples = sampled(Metrics(totals).render(STATE))
    spec = "vllm:spec_decode_num"
    assert of_demo(samples, f"{spec}_drafts_total") == 6
    assert of_demo(samples, f"{spec}_draft_tokens_total") == 12
    assert of_demo(samples, f"{spec}_accepted_tokens_total") == 8
    assert of_demo(samples, f"{spec}_accepted_tokens_per_pos_total", position="0") == 6
    assert of_demo(samples, f"{spec}_accepted_tokens_per_pos_total", position="1") == 2
    assert of_demo(samples, "exo_node_draft_rounds_total", k="2") == 6
    by_rule = {"draft_policy": "fixed", "acceptance_rule": "greedy"}
    assert of_demo(samples, "exo_node_answers_total", **by_rule) == 2
    other = {"engine": "0", "model_name": "other"}
    assert samples[f"{spec}_drafts_total", tuple(other.items())] == 0


def test_an_answer_counts_as_running_once_however_many_attempts_it_takes() -> None:
    metrics = Metrics(Totals(), Clock())

    def flow() -> list[float]:
        samples, names = sampled(metrics.render(STATE)), ("waiting", "running")
        return [of_demo(samples, f"vllm:num_requests_{name}") or 0 for name in names]

    with metrics.answer(DEMO) as meter:
        assert flow() == [1, 0]
        for _ in range(3):
            meter.mark_running()
            assert flow() == [0, 1]
        meter.record(finished(1))
    assert flow() == [0, 0]


def test_numbers_that_are_not_finite_are_counted() -> None:
    totals = Totals()
    metrics = Metrics(totals, Clock())
    with pytest.raises(NumericError), metrics.answer(DEMO):
        raise NumericError("stage 1 gave NaN")
    totals.add(DEMO, 3, stats_of(3, head_parked=True, drafting_reason="NaN", loop_reason="a loop"))
    samples = sampled(metrics.render(STATE))
    assert of_demo(samples, "exo_node_numeric_errors_total") == 1
    assert of_demo(samples, "exo_node_head_parked_answers_total") == 1
    assert of_demo(samples, "exo_node_looped_answers_total") == 1
    assert of_demo(samples, "vllm:request_success_total", finished_reason="error") == 1


def counters(text: bytes) -> Samples:
    families = [f for f in text_string_to_metric_families(text.decode())]
    cumulative = {f.name for f in families if f.type in ("counter", "histogram")}
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for f in families
        if f.name in cumulative
        for s in f.samples
    }


def test_no_counter_ever_falls_or_goes_away() -> None:
    draw = random.Random(3)
    totals, clock = Totals(), Clock()
    metrics = Metrics(totals, clock)
    before: Samples = {}
    for _ in range(60):
        fault = draw.choice([None, None, *(fault for fault, _ in FAULTS)])
        tokens = draw.randrange(1, 9)
        end = finished(tokens)
        expected = nullcontext() if fault is None else pytest.raises(type(fault))
        with expected, metrics.answer(DEMO) as meter:
            clock.now += draw.random()
            if draw.random() < 0.8:
                meter.mark_running()
                meter.record(Started((1,)))
                meter.record(TextDelta("a", (1,) * tokens))
            if fault is not None:
                raise fault
            totals.add(DEMO, tokens, end.stats)
            meter.record(end)
        after = counters(metrics.render(STATE))
        assert before.keys() <= after.keys()
        assert [key for key in before if after[key] < before[key]] == []
        before = after
    assert before


# ------------------------------------------------------------- through the chat service

STARTED = pb.GenerateEvent(started=pb.Started(prompt_ids=[7, 8, 9]))
SPOKEN = pb.GenerateEvent(delta=pb.Delta(round=pb.Round(tokens=[1, 2]), text="ab"))
ENDED = pb.GenerateEvent(finished=pb.Finished(reason="stop", stats=wire_stats_of(2)))
REQUEST = GenerationRequest(RequestId("r"), DEMO, ({"role": "user"},), Sampling())


def service(
    stages: FakeStages, generators: FakeGenerators
) -> tuple[ChatService, Metrics, Placements]:
    totals, facts = Totals(), FakeFacts()
    metrics, placements = Metrics(totals), leading(stages, facts)
    chat = ChatService(OneHead(placements, facts), generators, metrics, LOCAL)
    return chat, metrics, placements


async def test_a_request_waits_for_its_model_then_runs_then_is_gone() -> None:
    def flow(metrics: Metrics) -> tuple[float, float]:
        samples = sampled(metrics.render(STATE))
        names = ("vllm:num_requests_waiting", "vllm:num_requests_running")
        waiting, running = (of_demo(samples, name) or 0 for name in names)
        return waiting, running

    may_load = asyncio.Event()
    generators = FakeGenerators(events=[STARTED, ENDED])
    chat, metrics, placements = service(FakeStages(may_load), generators)
    async with aclosing(chat.stream(REQUEST)) as events:
        first = asyncio.ensure_future(anext(events))
        async with asyncio.timeout(60):
            while not (placements.records and flow(metrics)[0]):
                await asyncio.sleep(0)
        assert flow(metrics) == (1, 0)
        may_load.set()
        assert isinstance(await first, Started)
        assert flow(metrics) == (0, 1)
        assert [type(event) async for event in events] == [Finished]
    samples = sampled(metrics.render(STATE))
    assert flow(metrics) == (0, 0)
    assert of_demo(samples, "vllm:request_success_total", finished_reason="stop") == 1
    assert of_demo(samples, "vllm:spec_decode_num_drafts_total") == 3
    await placements.close()


@pytest.mark.parametrize("leaves", ["by closing", "by cancellation"])
async def test_a_client_that_leaves_is_an_abort_with_the_tokens_it_got(leaves: str) -> None:
    chat, metrics, placements = service(FakeStages(), FakeGenerators(events=[STARTED, SPOKEN]))
    async with aclosing(chat.stream(REQUEST)) as events:
        assert isinstance(await anext(events), Started)
        assert isinstance(await anext(events), TextDelta)
        if leaves == "by cancellation":
            silence = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            silence.cancel()
            with suppress(asyncio.CancelledError):
                _ = await silence
    samples = sampled(metrics.render(STATE))
    assert of_demo(samples, "vllm:request_success_total", finished_reason="abort") == 1
    assert of_demo(samples, "vllm:generation_tokens_total") == 2
    assert of_demo(samples, "vllm:num_requests_running") == 0
    await placements.close()


async def test_a_model_that_the_node_does_not_know_is_no_label() -> None:
    chat, metrics, _ = service(FakeStages(), FakeGenerators(events=[]))
    unknown = GenerationRequest(RequestId("r"), ModelId("nope"), (), Sampling())
    with pytest.raises(ModelNotFound):
        _ = await anext(chat.stream(unknown))
    assert b"nope" not in metrics.render(STATE)


# ------------------------------------------------------------------------ over HTTP
