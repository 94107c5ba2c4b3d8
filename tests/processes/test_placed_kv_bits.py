"""A node whose placements ask for quantised caches, by their field and by EXO_KV_BITS."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import make_checkpoint
from nodes import Node, Reply, eventually, node
from small import small_checkpoint

WITHIN_S = 120.0
PROMPT = "Tell me of the river and of the mill that it drives. " * 12
QUANTISED, WINDOWS = "quantised", "windows"
HIDDEN = 128
"""Of four heads of 32 numbers, which is one group."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose caches can be quantised, and one that keeps sliding windows."""
    folder = tmp_path_factory.mktemp("models")
    _ = shutil.copytree(small_checkpoint(hidden=HIDDEN), folder / QUANTISED)
    head = "[native_mtp]\ndefault_k = 1\nmax_k = 3\n"
    _ = (folder / QUANTISED / "exo-card.toml").write_text(head)
    sizes: dict[str, Any] = {"dtype": "float32", "layers": 2, "hidden": HIDDEN, "vocab": 4096}
    windows = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    _ = make_checkpoint(folder / WINDOWS, "llama", **sizes, raw=False, seed=7, changes=windows)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Node]:
    with started(tmp_path_factory.mktemp("placed"), models) as running:
        yield running


def started(folder: Path, models: Path, **variables: str) -> Any:
    flags = ("--no-mdns", "--offline", "--dtype", "float32", "--models-dir", str(models))
    return node(folder, *flags, env=variables)


def place(served: Node, model: str = QUANTISED, **fields: Any) -> Reply:
    return served.call("POST", "/v1/placements", {"model": model, **fields})


def answer(served: Node, model: str = QUANTISED, **fields: Any) -> tuple[list[int], Any]:
    """The ids and the final stats of a greedy answer."""
    fields |= {"num_draft_tokens": 0, "max_tokens": 24, "return_token_ids": True}
    body = served.chat(PROMPT, model=model, **fields)
    return body["choices"][0]["token_ids"], body["generation_stats"]


def test_a_prompt_of_other_bits_is_never_read_from_the_disk(served: Node) -> None:
    assert place(served, kv_bits=8).status == 200
    eight, _ = answer(served)
    eventually(lambda: served.stages()[0]["prefix_disk_bytes"] > 0, WITHIN_S)
    assert place(served, kv_bits=0).body["kv_bits"] is None
    _, stats = answer(served)
    assert (stats["kv_bits"], stats["cached_tokens"]) == (None, 0)
    assert place(served, kv_bits=4).body["kv_bits"] == 4
    _, stats = answer(served)
    assert (stats["kv_bits"], stats["cached_tokens"]) == (4, 0)
    assert place(served, kv_bits=8).status == 200
    again, stats = answer(served)
    assert stats["kv_bits"] == 8 and stats["cached_tokens"] > 0
    assert again == eight


def test_a_stage_that_is_killed_comes_back_with_the_bits_of_its_placement(served: Node) -> None:
    assert place(served, kv_bits=8).status == 200
    before, _ = answer(served)
    os.kill(served.stages()[0]["pid"], signal.SIGKILL)
    after, stats = answer(served)
    assert (after, stats["kv_bits"]) == (before, 8)
    [placement] = served.call("GET", "/v1/placements").body["data"]
    assert (placement["kv_bits"], placement["kv_bits_reason"]) == (8, "kv_bits = 8 was requested")


def test_caches_that_cannot_be_quantised_are_refused_by_the_field_and_nothing_is_lost(
    served: Node,
) -> None:
    assert place(served, WINDOWS).status == 200
    before, _ = answer(served, model=WINDOWS)
    for _ in range(2):  # found by a load, then known
        refused = place(served, WINDOWS, kv_bits=8)
        assert (refused.status, refused.body["error"]["param"]) == (400, "kv_bits"), refused
        message = refused.body["error"]["message"]
        assert message.startswith("kv_bits is 8, and the caches of mlx_lm.models.llama cannot be ")
        assert message.endswith("; leave kv_bits out of the placement, or send 0")
    assert answer(served, model=WINDOWS)[0] == before
    assert "Traceback" not in served.log.read_text()


def test_a_setting_applies_where_it_can_and_the_placement_says_where_it_does_not(
    tmp_path: Path, models: Path
) -> None:
    with started(tmp_path, models, EXO_KV_BITS="8") as running:
        assert answer(running)[1]["kv_bits"] == 8
        assert answer(running, model=WINDOWS)[1]["kv_bits"] is None
        data = running.call("GET", "/v1/placements").body["data"]
        reasons = {each["model"]: each["reason"] for each in data}
        assert "attention caches have 8 bits a number" in reasons[QUANTISED]
        assert "EXO_KV_BITS=8 on the head" in reasons[QUANTISED]
        why = (
            "attention caches are not quantised: EXO_KV_BITS=8 on the head does not apply, because"
        )
        assert why in reasons[WINDOWS]
        assert place(running, kv_bits=0).body["kv_bits"] is None
        best = running.call("GET", f"/v1/placements/preview?model={QUANTISED}").body["best"]
        assert (best["kv_bits"], best["kv_bits_reason"]) == (8, "EXO_KV_BITS=8 on the head")
        assert "Traceback" not in running.log.read_text()
