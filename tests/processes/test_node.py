"""One node as a user runs it: a process, HTTP, the demo model."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import ORACLE, STORY
from nodes import Node, alive, eventually, node, struck
from trials import NEVER_END


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """In float32, as the oracle; without peers."""
    with node(tmp_path_factory.mktemp("demo"), "--no-mdns", "--dtype", "float32") as running:
        yield running


def test_a_fresh_node_answers_at_once_with_native_mtp_and_ends_cleanly(tmp_path: Path) -> None:
    """Started without a flag and without earlier measurements."""
    with node(tmp_path / "fresh", measures=True) as running:
        body = running.chat("Who are you?")
        assert "exo demo model" in body["choices"][0]["message"]["content"]
        stats = body["generation_stats"]
        assert (stats["drafter_kind"], stats["num_draft_tokens"]) == ("native_mtp", 7)
        assert stats["depth_reason"].startswith("K = ")
        assert stats["accepted_draft_tokens"] > 0
        assert stats["greedy_identity"] == "bitwise"
        assert stats["load_s"] > stats["time_to_first_token_s"] > 0
        assert running.chat("Who are you?")["generation_stats"]["load_s"] is None
        pid = running.stages()[0]["pid"]
        assert running.stop() == 0
        assert not alive(pid)
        assert not (running.data_dir / "node.json").exists()
        assert "Traceback" not in running.log.read_text()


def test_a_stream_carries_the_same_tokens_and_ends_with_its_stats(demo: Node) -> None:
    with demo.stream("Tell me a story.", return_token_ids=True) as events:
        *chunks, end_marker = list(events)
    assert end_marker == "[DONE]"
    last = chunks[-1]
    assert last["generation_stats"]["drafter_kind"] == "native_mtp"
    assert last["usage"]["completion_tokens"] == len(STORY["greedy_ids"])
    choices = [
        chunk["choices"][0] for chunk in chunks
    ]  # every chunk has one, as simple clients expect
    # The model may be loaded first: heartbeats, which are chunks without content, come before.
    deltas = [choice["delta"] for choice in choices if "content" in choice["delta"]]
    assert deltas[0]["role"] == "assistant"
    assert choices[-1]["finish_reason"] == "stop"
    assert "".join(c["delta"].get("content") or "" for c in choices) == STORY["text"]
    assert [t for c in choices for t in c.get("token_ids") or ()] == STORY["greedy_ids"]


def test_a_client_that_goes_away_frees_the_cache_long_before_the_end(demo: Node) -> None:
    fields = {"max_tokens": 4000, "num_draft_tokens": 0, **NEVER_END}
    started_at = time.monotonic()
    with demo.stream("Tell me a story.", **fields) as events:
        _ = list(islice(events, 20))
        whole_s = (time.monotonic() - started_at) * 4000 / 20
        eventually(lambda: demo.stages()[0]["cache_bytes"] > 0, 180)
    closed_at = time.monotonic()
    eventually(
        lambda: not demo.stages()[0]["cache_bytes"] and not demo.stages()[0]["live_requests"], 60
    )
    assert time.monotonic() - closed_at < max(5, whole_s / 4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node without a prefix cache that evaluates drafts at once; its last test kills it."""
    env = {"EXO_PREFIX_CACHE_ENABLED": "0", "EXO_NATIVE_MTP_ASYNC_DRAFT_EVAL": "0"}
    flags = ("--no-mdns", "--dtype", "float32")
    with node(tmp_path_factory.mktemp("plain"), *flags, env=env) as running:
        yield running


def test_a_second_turn_prefills_new_tokens_only_and_gives_the_ids_of_a_node_without_cache(
    demo: Node, plain: Node
) -> None:
    system = "Once upon a time a little dog lived in a house with a garden. " * 12
    turns = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Tell me a story."},
    ]

    def ask(node: Node, turns: list[dict[str, str]]) -> Any:
        fields = {"messages": turns, "max_tokens": 16, "num_draft_tokens": 3}
        return node.chat("", return_token_ids=True, **fields)

    first = ask(demo, turns)
    reply = first["choices"][0]["message"]["content"]
    turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
    second = ask(demo, turns)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 128 < cached == second["generation_stats"]["cached_tokens"]
    assert cached < second["usage"]["prompt_tokens"]
    assert demo.stages()[0]["prefix_cache_bytes"] > 0
    alone = ask(plain, turns)
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    drafts = ("proposed_draft_tokens", "accepted_draft_tokens", "spec_decode_rounds")
    mine, theirs = second["generation_stats"], alone["generation_stats"]
    assert [mine[name] for name in drafts] == [theirs[name] for name in drafts]


def test_a_conversation_continues_from_disk_after_restarts(tmp_path: Path) -> None:
    """Each turn goes to a node that was just started. The node's default bound counts."""
    story = "Once upon a time a little dog lived in a house with a garden. " * 24
    turns = [
        {"role": "system", "content": story},
        {"role": "user", "content": "Tell me a story. " * 40},
    ]
    cached: list[int] = []
    drafts = ("proposed_draft_tokens", "accepted_draft_tokens")
    for turn in range(3):
        with node(tmp_path, "--no-mdns", "--dtype", "float32") as running:
            # A fixed K: an adaptive one follows from measured times.
            fields = {"max_tokens": 16, "return_token_ids": True, "num_draft_tokens": 2}
            body = running.chat("", messages=turns, **fields)
            cold = running.chat("", messages=turns, **fields, cache=False)
            if turn == 2:
                eventually(lambda: running.stages()[0]["prefix_disk_rows"] > 0, 60)
                assert running.stages()[0]["prefix_disk_bytes"] > 0
            _ = running.stop()
        assert body["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
        mine, theirs = body["generation_stats"], cold["generation_stats"]
        assert [mine[name] for name in drafts] == [theirs[name] for name in drafts]
        assert theirs["cached_tokens"] == 0
        cached.append(mine["cached_tokens"])
        answer = body["choices"][0]["message"]["content"]
        turns += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "And then? " * 60},
        ]
    assert cached[0] == 0 < cached[1] < cached[2]
    assert any((tmp_path / "prefixes").glob("*/*.safetensors"))


def test_concurrent_answers_share_forwards_and_are_the_oracles(demo: Node) -> None:
    def ask(number: int) -> Any:
        row = ORACLE[number % len(ORACLE)]
        k, budget = number % 4, len(row["greedy_ids"]) + 4
        drafts = {} if k == 3 else {"num_draft_tokens": k}  # else the node decides
        return row, demo.chat(row["prompt"], max_tokens=budget, return_token_ids=True, **drafts)

    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(ask, range(8)))
    for row, body in answers:
        assert body["choices"][0]["token_ids"] == row["greedy_ids"]
        assert body["choices"][0]["message"]["content"] == row["text"]
    stats_of_answers = [body["generation_stats"] for _, body in answers]
    shared = [stats for stats in stats_of_answers if stats["batched_tokens"]]
    assert shared  # how many depends on when each arrived
    assert {stats["batch_identity"] for stats in shared} == {"bitwise"}


def test_the_native_mtp_setting_applies_to_the_next_request(demo: Node) -> None:
    on = demo.chat("Who are you?", return_token_ids=True, max_tokens=12)
    assert demo.call("PATCH", "/v1/settings", {"native_mtp_enabled": False}).status == 200
    try:
        off = demo.chat("Who are you?", return_token_ids=True, max_tokens=12)
    finally:
        demo.call("PATCH", "/v1/settings", {"native_mtp_enabled": True})
    again = demo.chat("Who are you?", return_token_ids=True, max_tokens=12)
    assert [b["generation_stats"]["drafter_kind"] for b in (on, off, again)] == [
        "native_mtp",
        "none",
        "native_mtp",
    ]
    assert "settings page" in off["generation_stats"]["drafting_reason"]
    ids = [b["choices"][0]["token_ids"] for b in (on, off, again)]
    assert ids[0] == ids[1] == ids[2]


def test_synchronous_drafts_give_the_same_ids_and_a_killed_nodes_runner_ends(
    plain: Node,
) -> None:
    body = plain.chat("Tell me a story.", return_token_ids=True, max_tokens=40)
    assert body["choices"][0]["token_ids"] == STORY["greedy_ids"][:40]
    assert body["generation_stats"]["drafter_kind"] == "native_mtp"
    pid = plain.stages()[0]["pid"]
    assert alive(pid)
    plain.process.kill()
    eventually(lambda: not alive(pid), 180)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no such signal")
def test_a_killed_nodes_runner_and_helper_end_though_they_are_stopped(tmp_path: Path) -> None:
    with node(tmp_path / "node", "--no-mdns") as running:
        _ = running.chat("Who are you?", max_tokens=1)
        runner = psutil.Process(running.stages()[0]["pid"])
        stopped = [runner, *runner.children(recursive=True)]
        assert len(stopped) >= 2
        for each in stopped:
            each.suspend()
    try:
        eventually(lambda: not any(alive(each.pid) for each in stopped), 60)
    finally:
        for each in stopped:
            with suppress(psutil.NoSuchProcess):
                each.kill()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_an_mtp_answer_resumes_with_the_same_ids_after_its_runner_is_lost(
    demo: Node, sign: signal.Signals
) -> None:
    def resumed() -> tuple[int, Any] | None:
        demo.chat("Who are you?", max_tokens=2)
        pid = demo.stages()[0]["pid"]
        ids, stats = answer_under_signal(demo, pid, sign)
        assert ids == STORY["greedy_ids"]
        assert stats["drafter_kind"] == "native_mtp"
        return (pid, stats) if stats["resumes"] == 1 else None

    pid, stats = struck(resumed)
    assert (stats["resumes"], stats["resume_exact"]) == (1, True), stats
    assert demo.stages()[0]["pid"] != pid
    eventually(lambda: not alive(pid), 180)


def answer_under_signal(demo: Node, pid: int, sign: signal.Signals) -> tuple[list[int], Any]:
    """The ids and stats of an answer; its runner gets the signal after more than ten ids."""
    ids: list[int] = []
    stats: Any = None
    signal_sent = False
    fields = {"return_token_ids": True, "stream_options": {"include_usage": True}}
    with demo.stream("Tell me a story.", **fields) as events:
        for event in events:
            assert "error" not in event, event
            if event == "[DONE]":
                break
            stats = event.get("generation_stats", stats)
            ids += [i for choice in event["choices"] for i in choice.get("token_ids", [])]
            if len(ids) > 10 and not signal_sent:
                # On a stalled machine the node may have ended it already.
                with suppress(ProcessLookupError):
                    os.kill(pid, sign)
                signal_sent = True
    assert stats is not None
    return ids, stats


def test_the_memory_of_node_and_runner_is_bounded(demo: Node) -> None:
    demo.chat("Who are you?", max_tokens=2)
    stage = demo.stages()[0]
    assert psutil.Process(demo.process.pid).memory_info().rss < 150e6
    runner = psutil.Process(stage["pid"]).memory_info().rss
    assert runner < stage["weight_bytes"] + 400e6
