"""Nodes that never loaded the model answer before they have measured it, and with the same ids.

What comes in the middle of a measurement loses nothing: there pieces take longer than they would,
so that each disturbance meets one.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engines import STORY
from models import make_checkpoint
from nodes import Node, copy_key, eventually, grpc_address, node, python_path, sees

from exo_node.shard.model.fusing import may_begin_unfused

WHILE_IDLE = {"EXO_MEASURE_AT_LOAD": "0"}
LIMIT_S = 600.0
"""Long: other processes may keep the machine busy."""
FIELDS: dict[str, Any] = {"max_tokens": len(STORY["greedy_ids"]), "return_token_ids": True}

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Node]:
    flags = ("--no-mdns", "--dtype", "float32")
    with node(tmp_path / "fresh", *flags, env=WHILE_IDLE, measures=True) as running:
        yield running


def model(running: Node) -> Any:
    return running.call("GET", "/v1/models/demo").body


def is_measured(running: Node) -> bool:
    entry = model(running)
    lookup = entry["prompt_lookup"]
    if lookup is None or not lookup["enabled"]:
        return False
    return entry["native_mtp"]["greedy_identity"] == "bitwise"


def story(running: Node) -> Any:
    """The statistics of an answer that has the oracle's ids."""
    body = running.chat(STORY["prompt"], **FIELDS)
    assert body["choices"][0]["token_ids"] == STORY["greedy_ids"]
    return body["generation_stats"]


def held_compiler(folder: Path) -> dict[str, str]:
    """Variables of a node that has compiled nothing and whose g++ works once `folder/go` exists.

    Until then nothing is measured, however long the first answer takes to come. Ten minutes end it.
    """
    folder.mkdir()
    wait = f"for second in $(seq 600); do [ -e {folder}/go ] && break; sleep 1; done"
    text = f"""#!/bin/sh
[ "$1" = --version ] || {{ {wait}; }}
PATH="{os.environ["PATH"]}" exec g++ "$@"
"""
    _ = (folder / "g++").write_text(text)
    (folder / "g++").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(folder), "XDG_CACHE_HOME": str(folder)}


@pytest.mark.skipif(not may_begin_unfused(), reason="loads wait for a compiler, or need none")
def test_the_first_answer_waits_for_no_compiler_and_no_measurement(tmp_path: Path) -> None:
    flags, held = ("--no-mdns", "--dtype", "float32"), tmp_path / "held"
    env = WHILE_IDLE | held_compiler(held)
    with node(tmp_path / "fresh", *flags, env=env, measures=True) as fresh:
        first = story(fresh)
        assert (first["drafter_kind"], first["num_draft_tokens"]) == ("none", 0)
        for field in ("drafting_reason", "lookup_reason", "batching_reason"):
            assert first[field].startswith("not measured yet"), (field, first[field])
        assert not model(fresh)["native_mtp"]["parked"], "it is only not measured"
        (held / "go").touch()
        _ = story(fresh)  # while it is compiled or measured, perhaps
        eventually(lambda: is_measured(fresh), LIMIT_S)
        later = story(fresh)
        assert later["drafter_kind"] == "native_mtp" and later["accepted_draft_tokens"] > 0
        assert (later["greedy_identity"], later["lookup_reason"]) == ("bitwise", "")
        drafting = fresh.call("GET", "/v1/placements").body["data"][0]["drafting"]
        assert drafting["drafter_kind"] == "native_mtp" and drafting["prompt_lookup"]["enabled"]
        eventually(lambda: model(fresh)["native_mtp"]["depth_reason"].startswith("K = "), LIMIT_S)
        assert fresh.stop() == 0
        assert "Traceback" not in fresh.log.read_text()


def test_an_answer_that_drafted_goes_on_at_a_node_that_never_loaded_the_model(
    tmp_path: Path,
) -> None:
    flags = ("--no-mdns", "--dtype", "float32")
    with node(tmp_path / "spare", *flags, env=WHILE_IDLE, measures=True) as spare:
        home = copy_key(spare, tmp_path / "first")
        peer = ("--peer", grpc_address(spare))
        with node(home, *flags, *peer, measures=True) as first:
            eventually(lambda: sees(spare, 2), LIMIT_S)
            body = {"model": "demo", "nodes": ["first"]}
            assert spare.call("POST", "/v1/placements", body).status in (200, 201, 202)
            eventually(lambda: is_measured(spare), LIMIT_S)
            runner = first.stages()[0]["pid"]
            ids, stats = list[int](), dict[str, Any]()
            fields = {"num_draft_tokens": 1, "stream_options": {"include_usage": True}}
            with spare.stream(STORY["prompt"], **(FIELDS | fields)) as events:
                for event in events:
                    for choice in () if event == "[DONE]" else event.get("choices", ()):
                        ids += choice.get("token_ids") or ()
                    if len(ids) > 1 and first.process.poll() is None:
                        first.process.kill()
                        os.kill(runner, signal.SIGKILL)
                        _ = first.process.wait()
                    if event != "[DONE]":
                        stats = event.get("generation_stats") or stats
            assert ids == STORY["greedy_ids"]
            assert stats["resumes"] == 1 and stats["resume_exact"]


def test_a_machine_compiles_beside_its_first_answers_and_later_loads_begin_with_that(
    tmp_path: Path,
) -> None:
    flags, home = ("--no-mdns", "--dtype", "float32"), tmp_path / "home"
    home.mkdir()
    begins, ends = "compiles this model's functions beside", "functions are compiled and fused"
    for name, compiles in (("one", True), ("other", False)):
        env = {**WHILE_IDLE, "HOME": str(home), "XDG_CACHE_HOME": str(home)}
        with node(tmp_path / name, *flags, env=env, measures=True) as running:
            _ = story(running)
            if compiles:
                eventually(lambda log=running.log: ends in log.read_text(), LIMIT_S)
                eventually(lambda: any(home.rglob("kept/cpu/*.fused")), LIMIT_S)  # not at its end
            _ = story(running)
            os.kill(running.stages()[0]["pid"], signal.SIGKILL)
            log = running.log.read_text()
            assert (begins in log, ends in log) == (compiles, compiles), log
    assert len(list(home.rglob("kept/cpu/*.so"))) >= 8


# ------------------------------------------------------ what comes in the middle of a measurement

FLOOD = 8
SLOW_PIECES = """
import pathlib, sys, time

if "exo_node.shard.runner.main" in sys.orig_argv:
    from exo_node.shard.model import loader_import
    from exo_node.shard.engine.measuring import Measuring

    step = Measuring.step
    count = pathlib.Path(__file__).parent / "pieces"

    def slow(self, **options):
        done = step(self, **options)
        if done and not self.is_done and count.exists():
            with count.open("a") as file:
                file.write(".")
            time.sleep(0.1)
        return done

    Measuring.step = slow
"""
"""The code of each runner's start: pieces are slow and counted as long as the file is there."""


class Pieces:
    """The pieces of all runners that were started with this folder in their path."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        _ = (folder / "sitecustomize.py").write_text(SLOW_PIECES)
        self._count = folder / "pieces"
        self._count.touch()
        self.env = {"EXO_MEASURE_AT_LOAD": "0", "PYTHONPATH": python_path(folder)}

    def wait_for_more(self) -> None:
        """Returns in the middle of a measurement, with more pieces to come."""
        before = self._count.stat().st_size
        eventually(lambda: self._count.stat().st_size > before, LIMIT_S)

    def hurry(self) -> None:
        self._count.unlink()


@pytest.fixture
def pieces(tmp_path: Path) -> Pieces:
    return Pieces(tmp_path / "site")


@pytest.fixture
def disturbed(tmp_path: Path, pieces: Pieces) -> Iterator[Node]:
    models = tmp_path / "models"
    _ = make_checkpoint(models / "other", "llama", dtype="float32", hidden=64, vocab=4096, seed=7)
    flags = ("--no-mdns", "--dtype", "float32", "--models-dir", str(models))
    with node(tmp_path / "disturbed", *flags, env=pieces.env, measures=True) as running:
        yield running


def load(running: Node, model: str, **options: Any) -> str:
    reply = running.call("POST", "/v1/placements", {"model": model, **options})
    assert reply.status in (200, 201, 202), reply
    return reply.body["id"]


def require_calm(running: Node) -> None:
    """The node answers, has measured all, and logged no traceback."""
    eventually(lambda: is_measured(running), LIMIT_S)  # chats would keep it from measuring
    stats = story(running)
    assert stats["drafting_reason"] == stats["lookup_reason"] == stats["batching_reason"] == ""
    assert running.call("GET", "/health/ready").status == 200
    assert "Traceback" not in running.log.read_text(errors="replace")


def test_a_flood_of_chats_and_a_kill_in_the_middle_of_a_measurement(
    disturbed: Node, pieces: Pieces
) -> None:
    _ = load(disturbed, "demo")
    pieces.wait_for_more()
    with ThreadPoolExecutor(FLOOD) as flood:
        answers = [flood.submit(story, disturbed) for _ in range(FLOOD)]
        assert all(a.result(LIMIT_S)["batching_reason"] for a in answers)
        pieces.wait_for_more()
        answers = [flood.submit(story, disturbed) for _ in range(FLOOD)]
        os.kill(disturbed.stages()[0]["pid"], signal.SIGKILL)
        assert all(a.result(LIMIT_S)["resumes"] <= 1 for a in answers)
    pieces.hurry()
    require_calm(disturbed)


LONG_PIECES = """
import sys, time

if "exo_node.shard.runner.main" in sys.orig_argv:
    from exo_node.shard.engine.attempts import Attempts

    guard = Attempts.guard

    def long(pieces):
        for wait_s in pieces:
            time.sleep(0.2)
            yield wait_s

    Attempts.guard = lambda self, name, pieces, refuse: guard(self, name, long(pieces), refuse)
"""


def test_unloads_in_the_middle_of_a_measurement_do_not_count_against_it(tmp_path: Path) -> None:
    """Else two of them would turn off what it allows until another version comes."""
    site = tmp_path / "site"
    site.mkdir()
    _ = (site / "sitecustomize.py").write_text(LONG_PIECES)
    env, home = {**WHILE_IDLE, "PYTHONPATH": python_path(site)}, tmp_path / "home"

    def counts() -> list[int]:
        return [f.stat().st_size for f in (home / "profiles").glob("*") if f.suffix != ".json"]

    with node(home, "--no-mdns", "--dtype", "float32", env=env, measures=True) as running:
        placement = load(running, "demo")
        eventually(lambda: any(counts()), LIMIT_S)
        assert running.call("DELETE", f"/v1/placements/{placement}").status == 200
        assert not any(counts())
        _ = load(running, "demo")
        eventually(lambda: any(counts()), LIMIT_S)
        assert running.stop() == 0
        assert not any(counts())


def test_two_real_stages_are_measured_between_answers(tmp_path: Path, pieces: Pieces) -> None:
    flags = ("--no-mdns", "--dtype", "float32")
    with ExitStack() as stack:
        first = stack.enter_context(node(tmp_path / "first", *flags, env=pieces.env, measures=True))
        home = copy_key(first, tmp_path / "second")
        peer = ("--peer", grpc_address(first))
        second = stack.enter_context(node(home, *flags, *peer, env=pieces.env, measures=True))
        eventually(lambda: sees(first, 2) and sees(second, 2), LIMIT_S)
        _ = load(first, "demo", min_nodes=2, max_nodes=2)
        pieces.wait_for_more()
        stats = story(second)
        assert len(stats["placement"]["stages"]) == 2
        assert stats["batching_reason"].startswith("not measured yet"), stats
        with ThreadPoolExecutor(FLOOD) as flood:
            answers = [flood.submit(story, running) for running in (first, second) * 4]
            for each in answers:
                _ = each.result(LIMIT_S)
        pieces.hurry()
        eventually(lambda: not story(first)["batching_reason"], LIMIT_S)
        eventually(lambda: bool(_shared(first)), LIMIT_S)
        for running in (first, second):
            assert "Traceback" not in running.log.read_text(errors="replace")


def _shared(running: Node) -> int:
    """Tokens in rounds that answers shared, of eight at once."""
    with ThreadPoolExecutor(FLOOD) as flood:
        answers = [flood.submit(story, running) for _ in range(FLOOD)]
        return sum(each.result(LIMIT_S)["batched_tokens"] for each in answers)
