"""What may come in the middle of a measurement between answers, over HTTP: it loses nothing.

Pieces take longer than they would, so that each disturbance meets one.
"""

import base64
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from coloured_squares import Picture, copy_model, unseen
from engines import STORY
from models import make_checkpoint
from nodes import Node, copy_key, eventually, grpc_address, node, sees

LIMIT_S = 600.0
"""Long: other processes may keep the machine busy."""
TOKENS = 24
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

pytestmark = pytest.mark.timeout(1800)


class Pieces:
    """The pieces of all runners that were started with this folder in their path."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        _ = (folder / "sitecustomize.py").write_text(SLOW_PIECES)
        self._count = folder / "pieces"
        self._count.touch()
        self.env = {"EXO_MEASURE_AT_LOAD": "0", "PYTHONPATH": str(folder)}

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
def fresh(tmp_path: Path, pieces: Pieces) -> Iterator[Node]:
    models = tmp_path / "models"
    copy_model(models / "squares")
    _ = make_checkpoint(models / "other", "llama", dtype="float32", hidden=64, vocab=4096, seed=7)
    flags = ("--no-mdns", "--dtype", "float32", "--models-dir", str(models))
    with node(tmp_path / "fresh", *flags, env=pieces.env, measures=True) as running:
        yield running


def load(running: Node, model: str, **options: Any) -> str:
    reply = running.call("POST", "/v1/placements", {"model": model, **options})
    assert reply.status in (200, 201, 202), reply
    return reply.body["id"]


def story(running: Node, **fields: Any) -> Any:
    """The statistics of an answer that has the oracle's ids."""
    fields = {"max_tokens": TOKENS, "return_token_ids": True, **fields}
    body = running.chat(STORY["prompt"], model="demo", **fields)
    assert body["choices"][0]["token_ids"] == STORY["greedy_ids"][:TOKENS]
    return body["generation_stats"]


def batching_reason(running: Node) -> str:
    return story(running, max_tokens=TOKENS)["batching_reason"]


def is_measured(running: Node) -> bool:
    lookup = running.call("GET", "/v1/models/demo").body["prompt_lookup"]
    return lookup is not None and lookup["enabled"]


def require_calm(running: Node) -> None:
    """The node answers, has measured all, and logged no traceback."""
    eventually(lambda: is_measured(running), LIMIT_S)  # chats would keep it from measuring
    stats = story(running)
    assert stats["drafting_reason"] == stats["lookup_reason"] == stats["batching_reason"] == ""
    assert running.call("GET", "/health/ready").status == 200
    assert "Traceback" not in running.log.read_text(errors="replace")


def test_an_unload_and_a_load_in_the_middle_of_a_measurement(fresh: Node, pieces: Pieces) -> None:
    for _ in range(2):
        name = load(fresh, "demo")
        pieces.wait_for_more()
        assert fresh.call("DELETE", f"/v1/placements/{name}").status == 200
        assert fresh.stages() == []
    _ = load(fresh, "demo")
    pieces.wait_for_more()
    assert story(fresh)["batching_reason"].startswith("not measured yet")
    pieces.hurry()
    require_calm(fresh)


def test_a_load_of_another_model_in_the_middle_of_a_measurement(
    fresh: Node, pieces: Pieces
) -> None:
    _ = load(fresh, "demo")
    pieces.wait_for_more()
    _ = load(fresh, "other")
    assert fresh.chat("Hello.", model="other", max_tokens=8)["usage"]["completion_tokens"] > 0
    assert story(fresh)["batching_reason"].startswith("not measured yet")
    assert {stage["status"] for stage in fresh.stages()} == {"ready"}
    pieces.hurry()
    require_calm(fresh)


def test_a_flood_of_chats_and_a_kill_in_the_middle_of_a_measurement(
    fresh: Node, pieces: Pieces
) -> None:
    _ = load(fresh, "demo")
    pieces.wait_for_more()
    with ThreadPoolExecutor(FLOOD) as flood:
        answers = [flood.submit(story, fresh) for _ in range(FLOOD)]
        assert all(a.result(LIMIT_S)["batching_reason"] for a in answers)
        pieces.wait_for_more()
        answers = [flood.submit(story, fresh) for _ in range(FLOOD)]
        os.kill(fresh.stages()[0]["pid"], signal.SIGKILL)
        assert all(a.result(LIMIT_S)["resumes"] <= 1 for a in answers)
    pieces.hurry()
    require_calm(fresh)


def test_pictures_in_the_middle_of_a_measurement(fresh: Node, pieces: Pieces) -> None:
    def answer(picture: Picture) -> str:
        question = {"type": "text", "text": "How many squares are there, and of what colour?"}
        data = f"data:image/png;base64,{base64.b64encode(picture.file('PNG')).decode()}"
        image = {"type": "image_url", "image_url": {"url": data}}
        messages = [{"role": "user", "content": [image, question]}]
        body = {"model": "squares", "temperature": 0, "messages": messages}
        reply = fresh.call("POST", "/v1/chat/completions", body)
        assert reply.status == 200, reply
        return reply.body["choices"][0]["message"]["content"]

    shown = [unseen(number) for number in (0, 1, 2, 3)]
    _ = load(fresh, "squares")
    pieces.wait_for_more()
    assert [answer(picture) for picture in shown] == [picture.answer for picture in shown]
    pieces.wait_for_more()
    assert [answer(picture) for picture in shown] == [picture.answer for picture in shown]
    pieces.hurry()
    assert "Traceback" not in fresh.log.read_text(errors="replace")


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
        eventually(lambda: not batching_reason(first), LIMIT_S)
        eventually(lambda: bool(_shared(first)), LIMIT_S)
        for running in (first, second):
            assert "Traceback" not in running.log.read_text(errors="replace")


def _shared(running: Node) -> int:
    """Tokens in rounds that answers shared, of eight at once."""
    with ThreadPoolExecutor(FLOOD) as flood:
        answers = [flood.submit(story, running) for _ in range(FLOOD)]
        return sum(each.result(LIMIT_S)["batched_tokens"] for each in answers)
