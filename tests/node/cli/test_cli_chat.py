"""`exo-node chat`: the stream, its numbers, and every way in which it can fail."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from api_stub import (
    COMMAND,
    DEMO,
    QWEN,
    Reply,
    Stub,
    as_events,
    as_json,
    environment,
    exo_node,
    in_process,
)
from interrupts import ending_on_interrupt
from typer.testing import Result

from exo_node.node.cli.client import Comment, parse_sse
from exo_node.node.cli.output import print_answer, stats_line

_CHAT = "/v1/chat/completions"
_STATS = {
    "drafter_kind": "native_mtp",
    "num_draft_tokens": 3,
    "drafting_reason": "",
    "proposed_draft_tokens": 60,
    "accepted_draft_tokens": 40,
    "generation_tps": 23.44,
    "time_to_first_token_s": 0.412,
}
_STATS_LINE = "drafter native_mtp, K 3, accepted 40/60, 23.4 tok/s, TTFT 0.41 s"


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def final(stats: Mapping[str, Any] = _STATS) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": 3}, "generation_stats": stats}


def failure(code: str) -> dict[str, Any]:
    return {"error": {"message": f"it is {code}", "type": "x", "param": None, "code": code}}


def chat(stub: Stub, *arguments: str, **options: str) -> Result:
    return in_process("chat", *arguments, "--port", str(stub.port), **options)


def test_a_model_before_the_prompt_or_no_quotes_get_the_right_form(stub: Stub) -> None:
    for words in (("demo", "Tell me a story."), ("Tell", "me", "a", "story.")):
        result = chat(stub, *words)
        assert result.exit_code == 2
        assert "PROMPT" in result.stderr and "quotes" in result.stderr
        assert "--model" in result.stderr
    assert not stub.bodies


def test_chat_streams_the_answer_to_stdout_and_its_numbers_to_stderr(stub: Stub) -> None:
    stub.replies = {
        "/v1/models": as_json({"object": "list", "data": [DEMO, QWEN]}),
        _CHAT: as_events(": prefill 1/2", delta("Hel"), delta("lo\x1b["), final(), "data: [DONE]"),
    }
    result = chat(stub, "hi")
    assert (result.exit_code, result.stdout) == (0, "Hello\x1b[\n")
    assert result.stderr == _STATS_LINE + "\n"
    assert stub.bodies == [
        {
            "model": "Qwen/Qwen3.6-27B",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_a_load_is_told_once_and_apart_from_the_time_to_the_first_token(stub: Stub) -> None:
    steps = [": reading 10 %", ": reading 90 %", ": warming up", ": prefill 1/2"]
    last = final({**_STATS, "load_s": 41.31})
    stub.replies = {_CHAT: as_events(*steps, delta("ok\n"), last, "data: [DONE]")}
    loaded = "23.4 tok/s, loaded in 41.3 s, TTFT 0.41 s"
    hint = "the first load on a machine also times layers; later ones are shorter"
    stats = f"{_STATS_LINE.partition('23.4')[0]}{loaded}\n"
    expected = f"loading the model: reading 10 % ({hint})\n{stats}"
    assert chat(stub, "hi", "--model", "m").stderr == expected


def test_chat_passes_its_options_on_and_reads_stdin(stub: Stub) -> None:
    stub.replies = {_CHAT: as_events(delta("ok\n"), "data: [DONE]")}
    flags = ["--model", "m", "--max-tokens", "5", "--temperature", "0", "--num-draft-tokens", "0"]
    result = chat(stub, "-", *flags, stdin="from a pipe\n", EXO_API_KEY="k-1")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "ok\n", "")
    body = stub.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "from a pipe\n"}]
    options = [body[key] for key in ("model", "max_tokens", "temperature", "num_draft_tokens")]
    assert options == ["m", 5, 0, 0]
    assert stub.keys == ["Bearer k-1"]


def test_chat_falls_back_to_the_demo_and_says_how_to_get_a_real_model(stub: Stub) -> None:
    profile = {**DEMO, "id": "z", "profile_of": "demo", "fits": {"nodes": 1}, "size_bytes": 5}
    stub.replies = {
        "/v1/models": as_json({"object": "list", "data": [DEMO, profile]}),
        _CHAT: as_events(delta("ok"), "data: [DONE]"),
    }
    result = chat(stub, "hi")
    assert (result.exit_code, result.stdout) == (0, "ok\n")
    assert "`exo-node models recommend` names" in result.stderr and "Qwen" not in result.stderr
    assert stub.bodies[0]["model"] == "demo"


def test_chat_takes_what_is_on_disk_and_fits_before_the_demo(stub: Stub) -> None:
    fits, not_at_all = {"nodes": 1}, {"nodes": 0}
    data = [
        {**DEMO, "fits": fits, "size_bytes": 10**12},
        {**DEMO, "id": "small", "fits": fits, "size_bytes": 1},
        {**DEMO, "id": "large", "fits": fits, "size_bytes": 2},
        {**DEMO, "id": "huge", "fits": not_at_all, "size_bytes": 3},
        {"id": "broken", "fits": None, "error": "truncated", "size_bytes": 4},
        {"id": "embedder", "fits": fits, "size_bytes": 5, "capabilities": ["embeddings"]}
        | {"loaded": True},
    ]
    stub.replies = {
        "/v1/models": as_json({"object": "list", "data": data}),
        _CHAT: as_events(delta("ok"), "data: [DONE]"),
    }
    assert chat(stub, "hi").exit_code == 0
    assert stub.bodies[0]["model"] == "large"


def test_chat_json_prints_the_final_body_alone(stub: Stub) -> None:
    body = {"choices": [{"message": {"content": "ok"}}], "generation_stats": _STATS}
    stub.replies = {_CHAT: as_json(body)}
    result = chat(stub, "hi", "--model", "m", "--json")
    assert (result.exit_code, json.loads(result.stdout), result.stderr) == (0, body, "")
    assert "stream" not in stub.bodies[0]


@pytest.mark.parametrize(
    ("reply", "code", "words"),
    [
        (as_json(failure("load_failed"), 503, {"Retry-After": "9"}), 75, "try again in 9 s"),
        (
            as_json(failure("insufficient_memory"), 503, {"Retry-After": "9"}),
            1,
            "insufficient_memory",
        ),
        (as_events(failure("insufficient_memory")), 1, "it is insufficient_memory"),
        (as_json(failure("model_not_found"), 404), 1, "it is model_not_found"),
        (as_json(b"<html>", 502), 1, "answered 502"),
        (as_json([1]), 1, "ended the connection before"),
        (as_events(delta("par"), failure("peer_lost")), 75, "it is peer_lost"),
        (as_events(delta("par"), failure("internal_error")), 1, "it is internal_error"),
        (as_events(delta("par")), 1, "before the answer was complete"),
        (as_events(delta("par"), "data: {not json"), 1, "does not answer like an exo-node"),
        (as_events({"error": {"message": "a\nb\x1b[2J"}}), 1, r"a b\x1b[2J"),
    ],
)
def test_a_failed_chat_is_one_line_and_an_exit_code(
    stub: Stub, reply: Reply, code: int, words: str
) -> None:
    stub.replies = {_CHAT: reply}
    result = chat(stub, "hi", "--model", "m")
    assert (result.exit_code, result.stdout) in [(code, ""), (code, "par\n")]
    (line,) = result.stderr.splitlines()
    assert line.startswith("exo-node: ") and words in line
    assert ("try again" in result.stderr) is ("try again" in words)


def test_text_that_stdout_cannot_show_does_not_end_the_answer(stub: Stub) -> None:
    stub.replies = {_CHAT: as_events(delta("a\ud83d→b"), "data: [DONE]")}
    command = ("chat", "hi", "--model", "m", "--port", str(stub.port))
    result = exo_node(*command, PYTHONIOENCODING="latin-1")
    assert (result.returncode, result.stdout) == (0, "a??b\n")


def test_ctrl_c_ends_a_chat_with_130(stub: Stub) -> None:
    release = threading.Event()
    stub.replies = {_CHAT: as_events(delta("Hel"), then=lambda: release.wait(60))}
    with ending_on_interrupt():
        process = subprocess.Popen(
            [*COMMAND, "chat", "hi", "--model", "m"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(EXO_PORT=str(stub.port)),
        )
    assert process.stdout is not None
    assert process.stdout.read(3) == b"Hel"
    process.send_signal(signal.SIGINT)
    rest, notes = process.communicate(timeout=60)
    release.set()
    assert (process.returncode, rest, notes) == (130, b"\n", b"")


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("data: a\n\ndata:b\n\n", ["a", "b"]),
        ("data: a\r\ndata: b\r\n\r\n", ["a\nb"]),
        (": ping\n\n:\n\n", [Comment("ping"), Comment("")]),
        ("event: x\nid: 1\nretry: 5\ndatabase: 1\n\n", []),
        ("data: cut off", []),
        ("data:  ü\u2028\x85\n\n", [" ü\u2028\x85"]),
    ],
)
def test_sse_lines_become_events(text: str, events: list[Comment | str]) -> None:
    assert list(parse_sse([text])) == list(parse_sse(text)) == events, "chunks may end anywhere"


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        (_STATS, _STATS_LINE),
        (
            {"drafter_kind": "none", "drafting_reason": "2 stages", "generation_tps": 9},
            "drafter none (2 stages), 9.0 tok/s, TTFT 0.00 s",
        ),
        (
            {"drafter_kind": "none", "resumes": 2, "resume_exact": True},
            "drafter none (no reason given), 0.0 tok/s, TTFT 0.00 s, resumed 2x, exact",
        ),
        ({}, "drafter -, K -, accepted -/-, 0.0 tok/s, TTFT 0.00 s"),
    ],
)
def test_the_stats_line_says_how_it_was_drafted(stats: Mapping[str, Any], line: str) -> None:
    assert stats_line(stats) == line


def test_a_terminal_gets_no_escape_sequences_and_sees_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    events = [Comment("prefill 1/2"), delta("a\n\x1b[2J"), final()]
    assert print_answer(events) == _STATS
    printed = capsys.readouterr()
    assert printed.out == "a\n\\x1b[2J\n"
    assert printed.err == "\rprefill 1/2" + "\r" + " " * 11 + "\r"


def test_progress_within_an_answers_line_does_not_write_over_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    heartbeat: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": None}]}
    quiet = [heartbeat, Comment("")]
    events = [
        delta("Once"),
        *quiet,
        Comment("resuming"),
        heartbeat,
        Comment("resuming: 1/9"),
        delta(" upon"),
        final(),
    ]
    assert print_answer(events) == _STATS
    printed = capsys.readouterr()
    assert printed.out == "Once upon\n"
    assert printed.err == "\nresuming" + "\rresuming: 1/9" + "\r" + " " * 13 + "\r"
