"""Real nodes cut a prompt into the same forwards for ever: at a first load, once its layers were
timed, over stages and on copies. So what is on disk is found, and ids stay."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import DEMO
from nodes import Node, copy_key, eventually, grpc_address, node, sees

MODEL = "longer"
"""The demo with a longer context: room for caches, which once lengthened chunks, and layers that
take a CPU long enough to have once shortened them."""
WITHIN_S = 180.0
"""Long, so that a loaded machine fails no test."""
PROMPT = "Once upon a time a little dog lived in a house with a garden. " * 60
"""Many rows, so that chunks of any length that was ever chosen end within it."""

pytestmark = pytest.mark.timeout(600)


def copy_of_the_demo(folder: Path) -> None:
    _ = shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 65_536
    _ = (folder / "config.json").write_text(json.dumps(config))


def ready(running: Node) -> list[Any]:
    placements = running.call("GET", "/v1/placements").body["data"]
    return [placement for placement in placements if placement["status"] == "ready"]


def chunk(running: Node) -> int:
    """The rows of a forward on every copy of the model, as those of a next load would be."""
    preview = running.call("GET", f"/v1/placements/preview?model={MODEL}").body["best"]
    chunks = {preview["prefill_chunk"], *(each["prefill_chunk"] for each in ready(running))}
    [rows] = chunks
    return rows


def read(running: Node, **fields: Any) -> tuple[list[int], int]:
    """The ids of an answer, and how much of its prompt was cached."""
    body = running.chat(
        PROMPT,
        model=MODEL,
        max_tokens=24,
        return_token_ids=True,
        num_draft_tokens=0,
        **fields,
    )
    choice, stats = body["choices"][0], body["generation_stats"]
    return choice["token_ids"], stats["cached_tokens"]


def retime(folder: Path, factor: float) -> None:
    """As if another moment, or another version, had timed the layers."""
    paths = list((folder / "profiles").glob("layers-*.json"))
    assert paths, "its layers were never timed"
    for path in paths:
        stored = json.loads(path.read_text())
        for name in ("decode_s", "verify_s", "prefill_s", "tail_s"):
            stored[name] = min(max(stored[name] * factor, 1e-6), 50.0)
        _ = path.write_text(json.dumps(stored))


def stop(running: Node) -> None:
    eventually(lambda: running.stages()[0]["prefix_disk_bytes"] > 0, WITHIN_S)
    _ = running.stop()
    _ = running.process.wait(WITHIN_S)


def test_restarts_stages_and_copies_read_alike(tmp_path: Path) -> None:
    one_dir = tmp_path / "one"
    copy_of_the_demo(tmp_path / "models" / MODEL)
    flags = ("--no-mdns", "--dtype", "float32", "--models-dir", str(tmp_path / "models"))
    with node(one_dir, *flags, measures=True) as one:
        ids, cached = read(one)
        rows = chunk(one)
        assert (cached, len(ids)) == (0, 24)
        eventually(lambda: list((one_dir / "profiles").glob("layers-*.json")), WITHIN_S)
        assert chunk(one) == rows
        stop(one)
    for factor in (1e-3, 1e6):  # far below and above any limit
        retime(one_dir, factor)
        with node(one_dir, *flags, measures=True) as one:
            found, cached = read(one)
            assert (found, chunk(one)) == (ids, rows)
            assert cached > 2 * rows, "what earlier runs left on disk"
            stop(one)
    retime(one_dir, 1e-9)
    with node(one_dir, *flags, measures=True) as one:
        flags = (*flags, "--peer", grpc_address(one))
        with node(copy_key(one, tmp_path / "two"), *flags, measures=True) as two:
            eventually(lambda: sees(one, 2) and sees(two, 2), WITHIN_S)
            check_over_two_nodes(one, two, ids, rows)


def check_over_two_nodes(one: Node, two: Node, ids: list[int], rows: int) -> None:
    halves = [{"node": running.itself()["id"], "layers": 8} for running in (one, two)]
    options: list[tuple[int, dict[str, Any]]] = [(1, {"layers": halves}), (2, {"replicas": 2})]
    for copies, asked in options:
        assert one.call("POST", "/v1/placements", {"model": MODEL, **asked}).status == 200
        eventually(lambda copies=copies: len(ready(one)) == copies, WITHIN_S)
        assert chunk(one) == rows
        assert {s["node"] for each in ready(one) for s in each["stages"]} == {
            running.itself()["id"] for running in (one, two)
        }
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(read, one, cache=False) for _ in range(2 * copies)]
        assert [answer.result()[0] for answer in answers] == [ids] * len(answers)
        for each in ready(one):
            assert one.call("DELETE", f"/v1/placements/{each['id']}").status == 200
        eventually(lambda: not ready(one), WITHIN_S)
