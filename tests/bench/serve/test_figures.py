"""`exo-node bench serve`: what it asks, how it reads a stream, how its figures are computed."""

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest

from exo_node_bench.serve.answer import Answer, AnswerFailure, AnswerReader, Usage
from exo_node_bench.serve.figures import (
    BenchRun,
    counted_by,
    failures,
    figures,
    ratios,
    same_answers,
)
from exo_node_bench.serve.runs import BenchPlan
from exo_node_bench.serve.server import Server
from exo_node_bench.serve.workloads import Calibration, Conversation, TurnMessage, Workload

COUNTED = Calibration(fixed=9, each=1.25, source="usage")
AGENTS = Workload("agent", 200, turns=3, tool_tokens=40)


# --------------------------------------------------------------------------- workloads


def test_words_are_chosen_so_that_the_prompt_has_the_tokens_asked_for() -> None:
    measured = Calibration.between((16, 29), (216, 279))
    assert measured == COUNTED
    [conversation] = Workload("512", 512).conversations(measured, 1, "s")
    words = len(conversation.turns[0].text.split())
    assert abs(9 + 1.25 * words - 512) <= 1.25


def test_a_server_without_usage_gets_a_word_a_token_and_it_is_said() -> None:
    assert Calibration.between((16, 9), (216, 9)).source == "assumed"
    [conversation] = Workload("32", 32).conversations(Calibration(), 1, "s")
    assert len(conversation.turns[0].text.split()) == 32


def test_no_two_prompts_begin_alike_but_the_same_seed_gives_the_same() -> None:
    one, again, other = (
        Workload("32", 32).conversations(COUNTED, 8, seed) for seed in ("1/0", "1/0", "1/1")
    )
    assert one == again
    beginnings = {tuple(each.turns[0].text.split()[:6]) for each in (*one, *other)}
    assert len(beginnings) == 16


def test_agents_share_their_system_prompt_and_nothing_else() -> None:
    agents = AGENTS.conversations(COUNTED, 4, "s")
    assert len({agent.system for agent in agents}) == 1
    assert len({turn.text for agent in agents for turn in agent.turns}) == 12
    assert [turn.role for turn in agents[0].turns] == ["user", "tool", "tool"]
    assert len(agents[0].system.split()) == 160


def test_an_agents_next_request_repeats_the_servers_answers() -> None:
    conversation = Conversation(
        (TurnMessage("user", "do"), TurnMessage("tool", "done"), TurnMessage("tool", "x")),
        "be good",
    )
    assert conversation.messages([]) == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "do"},
    ]
    assert conversation.messages(["I call"])[2:] == [
        {"role": "assistant", "content": "I call"},
        {"role": "tool", "content": "done", "tool_call_id": "call_1"},
    ]


def test_questions_begin_anywhere_each_behind_a_number_that_no_cache_knows() -> None:
    asks = Workload("questions", questions=("a", "b", "c"))
    texts = [c.turns[0].text for c in asks.conversations(COUNTED, 40, "s")]
    numbers, questions = zip(*(text.split(". ") for text in texts), strict=True)
    assert "".join(questions) in "abc" * 20
    assert len(set(numbers)) > 35
    first = {asks.conversations(COUNTED, 1, str(seed))[0].turns[0].text[-1] for seed in range(20)}
    assert first == {"a", "b", "c"}


def test_every_cell_is_run_on_all_servers_one_after_the_other_and_each_begins() -> None:
    servers = (Server("a", "", ""), Server("b", "", ""))
    workloads = (Workload("32", 32), AGENTS)
    plan = BenchPlan(servers, workloads, (1, 4), 3, 5, 8, 1, 1.0)
    steps = [step for repeat in range(3) for step in plan.steps(repeat)]
    assert len(steps) == plan.runs == 3 * 2 * 2 * 2
    pairs = [steps[at : at + 2] for at in range(0, len(steps), 2)]
    assert all(a[:2] == b[:2] and a[2] != b[2] for a, b in pairs)
    assert {pair[0][2].name for pair in islice(pairs, 2)} == {"a", "b"}
    assert len(plan.conversations(COUNTED, AGENTS, 1, 0)) == 2, "5 requests of 3 turns each"
    assert len(plan.conversations(COUNTED, AGENTS, 4, 0)) == 4, "one a client"
    first, later = (plan.conversations(COUNTED, AGENTS, 1, repeat)[0] for repeat in (0, 1))
    assert first.system != later.system, "a prefix cache would know it"


# ------------------------------------------------------------------------------ streams


def chunk(text: str | None = None, **fields: Any) -> str:
    delta = {} if text is None else {"content": text}
    return json.dumps({"choices": [{"delta": delta, **fields}], "usage": None})


USAGE = json.dumps(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 30,
            "completion_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 20},
        },
    }
)


def read(*events: tuple[float, str], ended: float = 9.0) -> Answer:
    reading = AnswerReader(1.0)
    for at, data in events:
        reading.take(at, data)
    return reading.answer(ended, 0)


def test_only_events_with_text_count_as_tokens() -> None:
    role = json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    thought = json.dumps({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    last = chunk(finish_reason="length")
    result = read((2, role), (3, thought), (4, chunk("a")), (5, last), (6, USAGE), (7, "[DONE]"))
    assert result.failure is None
    assert result.chunks == (3, 4)
    assert (result.text, result.finish_reason) == ("hma", "length")
    assert result.usage is not None
    assert result.usage.completion_tokens == 7
    assert result.usage.cached_tokens == 20


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (((2, chunk("a")),), "the stream ended before the answer did"),
        (((2, chunk(finish_reason="stop")), (3, "[DONE]")), "an answer without text"),
        (((2, chunk("a")), (3, '{"error": {"message": "gone"}}'), (4, "[DONE]")), "gone"),
        *(
            (((2, chunk("a")), (3, garbage), (4, "[DONE]")), "no chat chunk")
            for garbage in (
                "<html>",
                "[1]",
                "7",
                '{"choices": [7]}',
                '{"choices": {}}',
                '{"choices": [{"delta": "text"}]}',
                '{"choices": [{"delta": {"content": ["a"]}}]}',
                '{"usage": {"prompt_tokens": -1, "completion_tokens": 1e99}}',
                '{"generation_stats": {"accepted_draft_tokens": "many"}}',
                "[" * 100_000,
            )
        ),
    ],
)
def test_a_stream_that_is_no_answer_says_why(
    events: Sequence[tuple[float, str]], error: str
) -> None:
    assert error in str(read(*events).failure)


# ------------------------------------------------------------------------------ figures


def answer(*chunks: float, tokens: int | None = None, cached: int = 0, turn: int = 0) -> Answer:
    usage = None if tokens is None else counts(tokens, cached)
    return Answer(0.0, chunks[-1] + 0.5, chunks, "text", usage, "length", turn=turn)


def counts(tokens: int, cached: int) -> Usage:
    details = {"cached_tokens": cached}
    return Usage.model_validate(
        {"prompt_tokens": 30, "completion_tokens": tokens, "prompt_tokens_details": details}
    )


def failed(kind: str, refused: bool = False) -> Answer:
    return Answer(0.0, 0.001, failure=AnswerFailure(kind), refused=refused)


def run(*answers: Answer, server: str = "a", repeat: int = 0, duration: float = 2.0) -> BenchRun:
    return BenchRun(server, "32", 4, repeat, duration, 0.1, answers)


def test_latencies_are_those_of_the_events() -> None:
    both = run(answer(1.0, 1.1, 1.4, tokens=9), answer(2.0, 2.2, tokens=3))
    row = figures(both)
    assert row["mean_ttft_ms"] == pytest.approx(1500)
    assert row["mean_itl_ms"] == pytest.approx(200)
    assert row["max_itl_ms"] == pytest.approx(300)
    assert row["mean_tpot_ms"] == pytest.approx((400 / 8 + 200 / 2) / 2)
    assert row["mean_e2el_ms"] == pytest.approx((1900 + 2700) / 2)
    assert (row["total_output_tokens"], counted_by(both.good)) == (12, "usage")
    assert row["output_throughput"] == 6
    assert (row["min_output_len"], row["max_output_len"]) == (3, 9)


def test_tokens_without_usage_are_counted_by_events_and_it_is_said() -> None:
    without = run(answer(1.0, 1.1, 1.2))
    row = figures(without)
    assert (row["total_output_tokens"], counted_by(without.good)) == (3, "events")
    assert row["total_input_tokens"] is None
    assert counted_by([answer(1.0), answer(1.0, tokens=4)]) == "both"


def test_failures_are_counted_and_are_in_no_latency() -> None:
    lost, full = failed("cut"), failed("HTTP 503", refused=True)
    row = figures(run(answer(1.0, 1.1, tokens=2), lost, full, full))
    assert (row["completed"], row["failed"], row["refused"]) == (1, 3, 2)
    assert row["mean_ttft_ms"] == pytest.approx(1000)
    assert row["request_throughput"] == 0.5
    assert failures([run(lost, full, full)]) == {"a": {"HTTP 503": 2, "cut": 1}}


def test_a_run_without_any_answer_has_no_latency_rather_than_zero() -> None:
    row = figures(run(failed("cut")))
    assert row["mean_ttft_ms"] is row["p99_itl_ms"] is row["min_output_len"] is None
    assert row["output_throughput"] == 0


def test_first_and_later_turns_have_their_own_ttft() -> None:
    row = figures(run(answer(3.0, tokens=1), answer(1.0, tokens=1, cached=25, turn=1)))
    assert row["mean_ttft_first_turn_ms"] == 3000
    assert row["mean_ttft_later_turns_ms"] == 1000
    assert (row["cached_input_tokens"], row["total_input_tokens"]) == (25, 60)


def test_a_ratio_is_the_median_of_those_within_a_repeat() -> None:
    """Seeded drift: the machine is ten times slower in the second repeat, for both."""
    runs = [
        run(answer(at, tokens=1), server=server, repeat=repeat)
        for repeat, server, at in (
            (0, "a", 1.0),
            (0, "b", 2.0),
            (1, "b", 20.0),
            (1, "a", 10.0),
            (2, "a", 1.0),
            (2, "b", 4.0),
        )
    ]
    [result] = ratios(runs, "a", "b").values()
    ttft = result["mean_ttft_ms"]
    assert (ttft.median, ttft.least, ttft.most) == (0.5, 0.25, 0.5)


def test_equal_texts_are_counted_up_to_where_the_slower_server_came() -> None:
    good = answer(1.0, tokens=1)
    runs = [run(good, good, good), run(good, server="b")]
    assert same_answers(runs, "a", "b") == (1, 1)


def test_accepted_drafts_are_those_of_all_answers_together() -> None:
    def drafted(proposed: int, accepted: int) -> Answer:
        counts = {"proposed_draft_tokens": proposed, "accepted_draft_tokens": accepted}
        stats = {"drafter_kind": "native_mtp", "spec_decode_rounds": 3, **counts}
        last = json.dumps({"choices": [], "generation_stats": stats})
        done = chunk(finish_reason="stop")
        return read((2, chunk("a")), (3, done), (4, last), (5, "[DONE]"))

    row = figures(run(drafted(10, 9), drafted(30, 1)))
    assert row["spec_decode_acceptance_rate"] == 25
    assert row["spec_decode_num_drafts"] == 6
    assert figures(run(answer(1.0)))["spec_decode_acceptance_rate"] is None
