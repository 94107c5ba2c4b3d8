"""Runners that a GPU fault ends: their answers resume with a shorter chunk, which is remembered.

The faults are false ones, in the words of MLX: written to stderr by a process that aborts, or
raised by a forward over more rows of a prompt than a file allows.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from listening import events
from models import make_checkpoint
from nodes import Node, eventually, node, python_path

WITHIN_S = 120.0
PROMPT = "Tell me of the river and of the mill that it drives. " * 60
CHUNK = 512
WATCHDOG = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
)
ABORTS = "libc++abi: terminating due to uncaught exception of type std::runtime_error: "
TOO_LARGE = (
    "[metal::malloc] Attempting to allocate 68719476736 bytes which is greater than the maximum "
    "allowed buffer size of 22906503168 bytes."
)
NO_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)."
)
FAULTY = """
import os, pathlib, sys

if "exo_node.shard.runner.main" in sys.orig_argv:
    from exo_node.shard.model import loader_import
    from exo_node.shard.engine.prefill_forward import PrefillForward

    plan, advance = pathlib.Path(__file__).parent / "fault", PrefillForward.advance

    def faulty(self):
        how, rows, words = plan.read_text().split(" ", 2)
        if any(end - start > int(rows) for start, end in zip(self._starts, self.ends)):
            if how == "abort":
                os.write(2, words.encode() + b"\\n")
                os.abort()
            raise RuntimeError(words)
        return advance(self)

    PrefillForward.advance = faulty
"""
"""The code of each runner's start; `fault` says how a forward fails, beyond how many rows."""


class Faults:
    """A node, and the faults that its runners have."""

    def __init__(self, running: Node, plan: Path) -> None:
        self.node = running
        self._plan = plan

    def set(self, how: str, rows: int, words: str) -> None:
        _ = self._plan.write_text(f"{how} {rows} {words}")

    def answer(self, model: str, prompt: str = PROMPT) -> Any:
        body = {"max_tokens": 12, "return_token_ids": True, "cache": False}
        return self.node.chat(prompt, model=model, **body)

    def events(self, model: str) -> list[Any]:
        faults = [event for event in events(self.node) if event["kind"] == "gpu_fault"]
        return [event for event in faults if event["facts"]["model"] == model]

    def metric(self, model: str, fault: str) -> float:
        with urlopen(f"http://127.0.0.1:{self.node.port}/metrics") as reply:
            text = reply.read().decode()
        name = f'exo_node_gpu_faults_total{{fault="{fault}",model_name="{model}"}}'
        [value] = [line.split()[-1] for line in text.splitlines() if line.startswith(name)]
        return float(value)

    def placement(self, model: str) -> Any:
        placements = self.node.call("GET", "/v1/placements").body["data"]
        return next(each for each in placements if each["model"] == model)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose checkpoints differ, since a limit is one of a checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    for layers, name in enumerate(("aborts", "raises", "thirsts", "starves"), 2):
        sizes: dict[str, Any] = {"dtype": "float32", "layers": layers, "hidden": 64, "vocab": 4096}
        _ = make_checkpoint(folder / name, "llama", **sizes, raw=False, seed=7)
    return folder


@contextmanager
def started(folder: Path, models: Path) -> Generator[Faults]:
    (folder / "site").mkdir(parents=True, exist_ok=True)
    _ = (folder / "site" / "sitecustomize.py").write_text(FAULTY)
    _ = (folder / "site" / "fault").write_text("off 999999 -")
    flags = ("--no-mdns", "--offline", "--dtype", "float32", "--models-dir", str(models))
    env = {"PYTHONPATH": python_path(folder / "site")}
    with node(folder / "node", *flags, env=env, sound=False) as running:
        yield Faults(running, folder / "site" / "fault")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Faults]:
    with started(tmp_path_factory.mktemp("faults"), models) as running:
        yield running


@pytest.mark.parametrize(
    ("how", "model", "words"),
    [("abort", "aborts", ABORTS + WATCHDOG), ("raise", "raises", WATCHDOG)],
)
def test_an_answer_that_the_watchdog_ended_resumes_with_half_of_the_chunk(
    faults: Faults, how: str, model: str, words: str
) -> None:
    assert faults.node.call("POST", "/v1/placements", {"model": model}).status == 200
    chunk = faults.placement(model)["prefill_chunk"]
    faults.set(how, chunk // 2, words)
    body = faults.answer(model)
    stats = body["generation_stats"]
    assert (stats["resumes"], stats["resume_exact"]) == (1, False)
    assert body["choices"][0]["token_ids"] == faults.answer(model)["choices"][0]["token_ids"]
    [event] = faults.events(model)
    assert event["facts"]["fault"] == "watchdog"
    assert event["facts"]["prefill_chunk"] == chunk // 2
    assert f"prompts are read {chunk // 2} tokens at a time" in event["text"]
    assert "watchdog stopped the GPU" in event["text"]
    assert faults.metric(model, "watchdog") == 1
    placement = faults.placement(model)
    assert placement["prefill_chunk"] == chunk // 2
    assert "the system's watchdog stopped the GPU" in placement["reason"]


def test_later_loads_and_starts_remember_the_chunk_that_the_watchdog_left(
    models: Path, tmp_path: Path
) -> None:
    model = "aborts"
    with started(tmp_path, models) as faults:
        assert faults.node.call("POST", "/v1/placements", {"model": model}).status == 200
        chunk = faults.placement(model)["prefill_chunk"]
        faults.set("abort", chunk // 2, WATCHDOG)
        assert faults.answer(model)["generation_stats"]["resumes"] == 1
        name = faults.placement(model)["id"]
        assert faults.node.call("DELETE", f"/v1/placements/{name}").status == 200
        assert faults.answer(model)["generation_stats"]["resumes"] == 0
        assert faults.placement(model)["prefill_chunk"] == chunk // 2
        assert faults.node.stop() == 0
    with started(tmp_path, models) as faults:
        assert faults.node.call("POST", "/v1/placements", {"model": model}).status == 200
        assert faults.placement(model)["prefill_chunk"] == chunk // 2


@pytest.mark.parametrize(
    ("model", "words", "runner_lives"),
    [("thirsts", TOO_LARGE, True), ("starves", NO_MEMORY, False)],
)
def test_want_of_memory_gets_one_retry_with_a_shorter_chunk_and_then_an_error_with_the_remedy(
    faults: Faults, model: str, words: str, runner_lives: bool
) -> None:
    assert faults.node.call("POST", "/v1/placements", {"model": model}).status == 200
    chunk = faults.placement(model)["prefill_chunk"]
    faults.set("raise", chunk // 4, words)
    body = {"messages": [{"role": "user", "content": PROMPT}], "model": model, "max_tokens": 4}
    refused = faults.node.call("POST", "/v1/chat/completions", body)
    assert refused.status >= 500, refused
    assert "send a shorter prompt" in refused.body["error"]["message"]
    assert "shorter context" in refused.body["error"]["message"]
    count = 1 if runner_lives else 2
    eventually(lambda: len(faults.events(model)) == count, WITHIN_S)
    assert {event["facts"]["fault"] for event in faults.events(model)} == {"memory"}
    assert faults.placement(model)["prefill_chunk"] == chunk // 2
    short = faults.answer(model, "Tell me of the mill.")
    assert short["usage"]["completion_tokens"] > 0
    assert len(faults.events(model)) == count
