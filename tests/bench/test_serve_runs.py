"""`bench/serve.py` against servers with fixed gaps and faults, and against a real node."""

import asyncio
import csv
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import serve
from http_node import serving
from nodes import node
from serve_output import write as write_both
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TOKENS = 5
Row = dict[str, str]


@dataclass
class Stub:
    """Streams `TOKENS` words, `gap_s` before each; every nth request is spoiled by `fault`."""

    gap_s: float = 0.01
    usage: bool = True
    fault: str = ""
    every: int = 3
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    active: int = 0
    most: int = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "m"}]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        words = sum(len(message["content"].split()) for message in body["messages"])
        usage = {"prompt_tokens": 10 + 2 * words, "completion_tokens": TOKENS}
        if not body.get("stream"):
            return JSONResponse({"usage": usage if self.usage else None})
        self.bodies.append(body)
        spoiled = bool(self.fault) and len(self.bodies) % self.every == 0
        if spoiled and self.fault == "refuse":
            return JSONResponse({"error": "full"}, 503)
        events = self._events(usage, self.fault if spoiled else "")
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(self, usage: dict[str, int], fault: str) -> AsyncIterator[str]:
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            yield 'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
            for number in range(TOKENS):
                await asyncio.sleep(self.gap_s)
                yield f'data: {{"choices": [{{"delta": {{"content": "w{number} "}}}}]}}\n\n'
                if fault == "cut":
                    return
                if fault == "hang":
                    await asyncio.sleep(20)
            yield 'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n'
            if self.usage:
                yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.active -= 1


def bench(folder: Path, *arguments: str, **stubs: Stub) -> tuple[int, list[Row]]:
    """The exit status and the rows of the CSV."""
    with ExitStack() as stack:
        named: list[str] = []
        for name, stub in stubs.items():
            port = stack.enter_context(serving(stub.app()))
            named += ["--server", f"{name}=http://127.0.0.1:{port}/v1"]
        status = serve.main([*named, *arguments, "--output", str(folder)])
    with (folder / "serve.csv").open() as file:
        return status, list(csv.DictReader(file))


def test_fixed_gaps_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sleeps may be late, never early, and a slow machine is late for both servers."""
    fast, slow = Stub(gap_s=0.01), Stub(gap_s=0.15)
    status, rows = bench(
        tmp_path,
        *("--workloads", "32,agent", "--concurrency", "1,3", "--requests", "3"),
        *("--repeats", "1", "--turns", "2", "--system-tokens", "50", "--tool-tokens", "20"),
        fast=fast,
        slow=slow,
    )
    assert status == 0
    assert len(rows) == 8
    for row in rows:
        gap_ms = 10 if row["server"] == "fast" else 150
        assert float(row["mean_e2el_ms"]) >= 0.95 * TOKENS * gap_ms
        assert float(row["mean_ttft_ms"]) >= 0.95 * gap_ms, "the role's event is no token"
        assert row["output_tokens_by"] == "usage"
        assert row["failed"] == "0"
        if row["server"] == "slow":
            assert float(row["p50_itl_ms"]) >= 0.8 * gap_ms
    tokens = [float(row["total_input_tokens"]) for row in rows if row["workload"] == "32 tokens"]
    assert tokens == [96.0] * 4, "three prompts of 32 tokens, at two a word and ten around them"
    assert (fast.most, slow.most) == (3, 3)
    bodies = [sorted(map(json.dumps, stub.bodies)) for stub in (fast, slow)]
    assert bodies[0] == bodies[1]
    output = capsys.readouterr().out
    assert "Same text in 16 of 16 answers" in output
    report = json.loads((tmp_path / "serve.json").read_text())
    assert len(report["runs"][0]["answers"]) == 3
    assert (tmp_path / "serve.svg").stat().st_size > 1000
    slower = [line for line in output.splitlines() if line.startswith("| 32 tokens | 1 |")]
    assert float(slower[0].split("|")[-2].split()[0]) < 0.9, "end to end, fast over slow"


@pytest.mark.parametrize(
    ("fault", "refused", "output"),
    [
        ("refuse", "2", "2 failed: HTTP 503"),
        ("cut", "0", "2 failed: the stream ended before the answer did"),
        ("hang", "0", "2 failed: ReadTimeout"),
    ],
)
def test_a_servers_faults_are_counted_not_hidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, refused: str, output: str
) -> None:
    # Its first request is the warm-up.
    status, [row] = bench(
        tmp_path,
        *("--workloads", "32", "--concurrency", "2", "--requests", "6", "--repeats", "1"),
        *("--silence", "3"),
        bad=Stub(fault=fault),
    )
    assert status == 1
    assert (row["completed"], row["failed"], row["refused"]) == ("4", "2", refused)
    assert output in capsys.readouterr().out


def test_the_turns_behind_a_lost_one_count_as_lost(tmp_path: Path) -> None:
    arguments = ("--workloads", "agent", "--concurrency", "1", "--requests", "3", "--turns", "3")
    # The warm-up takes the first three requests, so the second turn is spoiled.
    stub = Stub(fault="cut", every=5)
    status, [row] = bench(tmp_path, *arguments, "--repeats", "1", bad=stub)
    assert status == 1
    assert (row["completed"], row["failed"]) == ("1", "2")
    assert len(stub.bodies) == 5


def test_a_server_without_usage_is_counted_by_events(tmp_path: Path) -> None:
    arguments = ("--workloads", "32", "--concurrency", "1", "--requests", "2", "--repeats", "1")
    status, [row] = bench(tmp_path, *arguments, plain=Stub(usage=False))
    assert status == 0
    assert (row["output_tokens_by"], row["total_output_tokens"]) == ("events", str(2 * TOKENS))
    assert row["total_input_tokens"] == ""


def test_an_interrupted_bench_reports_its_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(folder: Path, *output: Any) -> None:
        write_both(folder, *output)
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "write", write)
    arguments = ("--workloads", "32", "--concurrency", "1", "--requests", "2", "--repeats", "9")
    status, rows = bench(tmp_path, *arguments, slow=Stub())
    assert (status, len(rows)) == (130, 1)
    assert "| 1 | slow |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (("--server", "x=http://127.0.0.1:1"), "x: GET http://127.0.0.1:1/v1/models"),
        (("--server", "x=http://127.0.0.1:1", "--key", "x=NO_SUCH_KEY"), "NO_SUCH_KEY"),
    ],
)
def test_an_unusable_server_ends_the_bench_with_a_message(
    arguments: tuple[str, ...], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(arguments) == 2
    assert output in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (("--server", "x"), "'x' is not NAME=VALUE"),
        (("--server", "x=u", "--server", "x=v"), "two have the same name"),
        (("--server", "x=u", "--model", "y=m"), "there is no server 'y'"),
        (("--server", "x=u", "--workloads", "32,lots"), "'lots' is not a number of tokens"),
        (("--server", "x=u", "--workloads", "questions"), "needs --questions FILE"),
        (("--server", "x=u", "--concurrency", "0"), "'0' is no whole number from 1"),
        (("--server", "x=u", "--extra-body", "[]"), "no JSON object"),
    ],
)
def test_a_bad_argument_is_refused_by_name(
    arguments: tuple[str, ...], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _ = serve.main(arguments)
    assert output in capsys.readouterr().err


def test_a_real_node_answers_all_and_its_second_turns_are_cached(tmp_path: Path) -> None:
    with node(tmp_path / "node") as served:
        arguments = (
            *("--server", f"ours=http://127.0.0.1:{served.port}", "--model", "ours=demo"),
            *("--workloads", "32,agent", "--concurrency", "1,2", "--requests", "2"),
            *("--repeats", "1", "--output-tokens", "6", "--turns", "2"),
            *("--system-tokens", "150", "--tool-tokens", "20"),
            *("--extra-body", '{"logit_bias": {"4095": -100, "4093": -100}}'),
        )
        assert serve.main([*arguments, "--output", str(tmp_path / "out")]) == 0
    with (tmp_path / "out" / "serve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["failed"] for row in rows] == ["0"] * 4
    for row in rows:
        lengths = (row["min_output_len"], row["max_output_len"], row["output_tokens_by"])
        assert lengths == ("6", "6", "usage")
        per_prompt = float(row["total_input_tokens"]) / float(row["completed"])
        if row["workload"] == "32 tokens":
            assert 26 <= per_prompt <= 38
        else:
            assert per_prompt > 150
            assert float(row["cached_input_tokens"]) > 0
