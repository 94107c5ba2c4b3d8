"""`exo-node top`: its text from fixed readings, and the command against a stub of the node."""

import json
import os
import pty
import select
import signal
import subprocess
import time
from typing import Any

import pytest
from api_stub import COMMAND, Stub, as_json, environment, exo_node
from interrupts import ending_on_interrupt

from exo_node.node.cli.client import CallFailed
from exo_node.node.cli.top import Reading, parse_metrics, screens, snapshot, top_text


def _stage(**load: int) -> dict[str, Any]:
    return {"placement": "p1", "layers": [0, 40], **load}


_CLUSTER: dict[str, Any] = {
    "self": "n1",
    "head": "n2",
    "version": "0.1.0",
    "nodes": [
        {
            "id": "n1", "name": "alpha", "memory_bytes": 48 * 10**9, "status": "alive",
            "self": True, "head": False,
            "stages": [
                _stage(weight_bytes=9 * 10**9, cache_bytes=10**9, live_requests=2),
                _stage(weight_bytes=2 * 10**9, prefix_cache_bytes=10**9, live_requests=1)
                | {"model": "demo", "prefix_disk_rows": 460, "prefix_peer_rows": 300},
            ],
        },
        {"id": "n2", "name": "be\x1b[2Jta", "status": "suspect", "head": True},
    ],
}  # fmt: skip
_PLACEMENT = {
    "model": "some/model",
    "status": "ready",
    "stages": [{"node": "n1", "layers": [0, 40]}, {"node": "n2", "layers": [40, 64]}],
    "drafting": {"drafter_kind": "none", "num_draft_tokens": 0, "reason": "2 stages"},
}
_ANSWERED = {
    "some/model": {
        "requests": 12,
        "completion_tokens": 500,
        "proposed_draft_tokens": 30,
        "accepted_draft_tokens": 20,
    }
}


def metrics(tokens: float, running: int = 2, waiting: int = 1) -> str:
    labels = '{engine="0",model_name="some/model"}'
    return (
        "# HELP vllm:num_requests_running Requests.\n"
        f"vllm:num_requests_running{labels} {running}.0\n"
        f"vllm:num_requests_waiting{labels} {waiting}.0\n"
        f"vllm:generation_tokens_total{labels} {tokens}\n"
        "exo_node_nodes 2.0\n"
    )


def reading(at: float, tokens: float) -> Reading:
    return Reading(at, _CLUSTER, [_PLACEMENT], _ANSWERED, parse_metrics(metrics(tokens)))


def test_a_reading_becomes_tables() -> None:
    state = snapshot(reading(12.0, 150.0), reading(10.0, 100.0))
    assert (
        top_text(state, "10:31:05")
        == r"""alpha, exo-node 0.1.0, 2 nodes, head be\x1b[2Jta  10:31:05

NODE                STATUS   MODELS HOLD  OF MEMORY  LIVE REQUESTS
alpha (self)        alive    13.0 GB      48.0 GB    3
be\x1b[2Jta (head)  suspect  0 MB         -          0

MODEL       STATUS  STAGES                                        MTP
some/model  ready   alpha layers 0-39 → be\x1b[2Jta layers 40-63  off
some/model: MTP off: 2 stages

ASKED HERE  RUNNING  WAITING  TOKENS/S  ANSWERS  TOKENS  ACCEPTED
some/model  2        1        25.0      12       500     67 %

PROMPTS CACHED ON  MODEL  MEMORY  DISK  TOKENS FROM MEMORY  FROM DISK  FROM COPIES
alpha (self)       demo   1.0 GB  0 MB  0                   460        300"""
    )


def test_a_placement_that_drafts_is_not_said_to_be_off() -> None:
    drafting = {
        "drafter_kind": "native_mtp",
        "num_draft_tokens": 3,
        "depth_reason": "K = 2: expected speeds 1.00, 1.40",
        "prompt_lookup": {"enabled": False, "reason": "a: b"},
    }
    placement = {**_PLACEMENT, "drafting": drafting}
    now = reading(12.0, 150.0)
    state = snapshot(Reading(12.0, _CLUSTER, [placement], now.answered, now.totals), now)
    text = top_text(state, "10:31:05")
    assert "  on, 3 a round\n" in text
    assert "MTP off" not in text


_WHY = "the cluster's EXO_MTP is off; exo-node mtp on turns it on for every node of the cluster"
_MANY: dict[str, Any] = {
    "model": "mlx-community/Qwen3.8-122B-A10B-Instruct-MLX-4bit",
    "status": "failed",
    "error": "the runner on alpha ended: it ran out of memory as it read layer 17 of its 24 layers",
    "stages": [{"node": "n1", "layers": [at, at + 4]} for at in range(0, 64, 4)],
    "drafting": {"drafter_kind": "none", "num_draft_tokens": 0, "reason": _WHY},
}


@pytest.mark.parametrize("width", [68, 80, 120])
def test_every_line_fits_the_terminal_and_reasons_stay_whole(width: int) -> None:
    now = reading(12.0, 150.0)
    state = snapshot(Reading(12.0, _CLUSTER, [_PLACEMENT, _MANY], now.answered, now.totals), now)
    lines = top_text(state, "10:31:05", f"no node answers; {_WHY}", width).splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert text.count(_WHY) == 2 and _MANY["error"] in text
    assert "some/model ready" in text and "off" in text and "mlx-communit" in text


@pytest.mark.parametrize(
    ("before", "rate"),
    [(None, None), (reading(10.0, 140.0), 5.0), (reading(10.0, 900.0), None)],
    ids=["nothing to compare with", "two readings", "a counter that went back"],
)
def test_a_rate_is_between_two_readings_of_one_process(
    before: Reading | None, rate: float | None
) -> None:
    state = snapshot(reading(12.0, 150.0), before)
    assert state["requests"]["some/model"]["tokens_per_second"] == rate


def test_a_model_that_is_new_begins_at_nothing() -> None:
    before = Reading(10.0, _CLUSTER, [], {}, {})
    state = snapshot(reading(12.0, 150.0), before)
    assert state["requests"]["some/model"]["tokens_per_second"] == 75.0


def test_metrics_are_read_by_model_whatever_its_name() -> None:
    odd = 'a{engine="0",model_name="x\\"} 7\\\\\\n"} 2.5\na{model_name="y"} 1e+06\na{k="1"} 3\n'
    odd += 'a{model_name="y",k="2"} 1\na{model_name="y"} NaN\n'
    assert parse_metrics(odd) == {"a": {'x"} 7\\\n': 2.5, "y": 1_000_001.0}}


def test_another_format_in_place_of_metrics_is_a_failed_reading() -> None:
    with pytest.raises(CallFailed, match="metrics cannot be read"):
        _ = parse_metrics("<html>")


def test_fields_of_another_version_may_be_missing() -> None:
    text = top_text(snapshot(Reading(0.0, {"nodes": [{}]}, [], {}, {}), None), "now")
    assert (
        text
        == """\
-, exo-node -, 1 node, head -  now

NODE  STATUS  MODELS HOLD  OF MEMORY  LIVE REQUESTS
-     -       0 MB         -          0

no model is loaded; `exo-node chat` loads one"""
    )


def test_a_node_that_is_lost_is_looked_for_again_and_the_last_text_stays() -> None:
    fault = CallFailed("no node answers at 127.0.0.1:1")
    results = iter([reading(11.0, 130.0), fault, fault, reading(20.0, 200.0), reading(21.0, 204.0)])

    def read() -> Reading:
        result = next(results)
        if isinstance(result, CallFailed):
            raise result
        return result

    clock = iter(["t0", "t1", "t2", "t3"])
    texts = screens(read, reading(10.0, 100.0), lambda: next(clock), lambda: None)
    screen_texts = [next(texts) for _ in range(6)]
    assert (
        "t0" in screen_texts[0] and "TROUBLE" not in screen_texts[1] and "30.0" in screen_texts[1]
    )
    for text in screen_texts[2:4]:
        assert "TROUBLE  no node answers at 127.0.0.1:1; asked again, this is of t1" in text
        assert "some/model  ready" in text
    assert "TROUBLE" not in screen_texts[4] and "30.0" not in screen_texts[4]
    assert " -         12" in screen_texts[4], "its counters are another process's"
    assert "4.0" in screen_texts[5]


# ---------------------------------------------------------------------------- the command


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.replies = {
        "/v1/cluster": as_json(_CLUSTER),
        "/v1/placements": as_json({"object": "list", "data": [_PLACEMENT]}),
        "/v1/mtp/stats": as_json({"models": _ANSWERED}),
        "/metrics": as_json(metrics(100.0).encode()),
    }
    return stub


@pytest.mark.parametrize("flags", [(), ("--once",)])
def test_without_a_terminal_it_is_one_snapshot(stub: Stub, flags: tuple[str, ...]) -> None:
    result = exo_node("top", *flags, "--port", str(stub.port))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("ASKED HERE") == 1
    assert "\x1b" not in result.stdout
    assert "some/model  2        1        0.0 " in result.stdout


def test_json_is_one_snapshot(stub: Stub) -> None:
    result = exo_node("top", "--json", "--port", str(stub.port))
    state = json.loads(result.stdout)
    assert state["cluster"] == _CLUSTER and state["placements"] == [_PLACEMENT]
    assert state["loads"]["n1"] == {"held_bytes": 13 * 10**9, "live_requests": 3}
    assert state["requests"] == {"some/model": {"running": 2, "waiting": 1, "tokens_per_second": 0}}
    assert state["answered"] == _ANSWERED


def test_without_a_node_it_fails_as_others_do() -> None:
    result = exo_node("top", "--json")
    assert (result.returncode, json.loads(result.stderr)["error"]["code"]) == (69, "no_node")


def _read_until(screen: int, text: bytes) -> bytes:
    output, until = b"", time.monotonic() + 60
    while text not in output and time.monotonic() < until:
        if select.select([screen], [], [], 1)[0]:
            output += os.read(screen, 65536)
    assert text in output, output
    return output


def test_on_a_terminal_it_continues_without_its_node_and_ends_with_ctrl_c(stub: Stub) -> None:
    screen, terminal = pty.openpty()
    size = {"COLUMNS": "120", "LINES": "30", "TERM": "xterm"}
    with ending_on_interrupt():
        process = subprocess.Popen(
            [*COMMAND, "top", "--port", str(stub.port)],
            stdin=terminal,
            stdout=terminal,
            stderr=subprocess.PIPE,
            env=environment(**size),
        )
    os.close(terminal)
    try:
        _ = _read_until(screen, b"some/model")
        replies, stub.replies = stub.replies, {}
        _ = _read_until(screen, b"TROUBLE")
        stub.replies = {**replies, "/metrics": as_json(metrics(9.0, running=7).encode())}
        _ = _read_until(screen, b"some/model  7 ")
        process.send_signal(signal.SIGINT)
        assert _read_until(screen, b"\x1b[?1049l")  # the screen is as it was before
        _, notes = process.communicate(timeout=60)
    finally:
        process.kill()
        _ = process.wait()
        os.close(screen)
    assert (process.returncode, notes) == (0, b"")
