"""A node whose placements name a block drafter: loaded, kept by restarts, missed by its name."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from drafters import drafter_config, make_drafter
from nodes import Node, Reply, eventually, node
from small import small_checkpoint

WITHIN_S = 120.0
TARGET, DRAFTER = "target", "a/drafter"
NEVER_END = {"logit_bias": {"4095": -100}}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Node]:
    models = tmp_path / "models"
    _ = shutil.copytree(small_checkpoint(), models / TARGET)
    _ = (models / TARGET / "exo-card.toml").write_text("[native_mtp]\ndefault_k = 1\nmax_k = 2\n")
    _ = make_drafter(models / DRAFTER, drafter_config(4096))
    _ = make_drafter(models / "a" / "other", drafter_config(4095))
    flags = ("--no-mdns", "--offline", "--dtype", "float32", "--models-dir", str(models))
    with node(tmp_path / "node", *flags, sound=False) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def place(served: Node, drafter: str, **fields: Any) -> Reply:
    return served.call("POST", "/v1/placements", {"model": TARGET, "drafter": drafter, **fields})


def answer(served: Node, k: int) -> tuple[list[int], Any]:
    """The ids and the final stats of a greedy answer."""
    fields = {"num_draft_tokens": k, "max_tokens": 24, "return_token_ids": True}
    body = served.chat("Who are you?", model=TARGET, **fields)
    return body["choices"][0]["token_ids"], body["generation_stats"]


def placement(served: Node) -> Any:
    [only] = served.call("GET", "/v1/placements").body["data"]
    return only


def test_a_drafter_is_placed_kept_over_a_restart_and_missed_once_it_is_deleted(
    served: Node, tmp_path: Path
) -> None:
    assert served.call("POST", "/v1/placements", {"model": TARGET}).status == 200
    plain, stats = answer(served, 0)
    for name in (DRAFTER, str(tmp_path / "models" / DRAFTER)):
        placed = place(served, name)
        assert (placed.status, placed.body["asked_for"]) == (200, "drafter a/drafter"), placed
        assert placed.body["drafting"]["drafter_kind"] == "block_drafter"
    ids, stats = answer(served, 3)
    assert (ids, stats["drafter_kind"]) == (plain, "block_drafter")
    entry = served.call("GET", f"/v1/models/{TARGET}").body
    assert entry["native_mtp"]["drafter"] == DRAFTER
    os.kill(served.stages()[0]["pid"], signal.SIGKILL)
    ids, stats = answer(served, 3)
    assert (ids, stats["drafter_kind"]) == (plain, "block_drafter")
    shutil.rmtree(tmp_path / "models" / DRAFTER)
    ids, stats = answer(served, 3)
    assert (ids, stats["drafter_kind"]) == (plain, "block_drafter"), "it is in memory"
    os.kill(served.stages()[0]["pid"], signal.SIGKILL)
    eventually(lambda: not served.stages(), WITHIN_S)
    reply = served.call("POST", "/v1/chat/completions", chat())
    assert reply.status >= 400 and "a/drafter is not on this machine" in str(reply.body)
    refused = place(served, DRAFTER)
    assert (refused.status, refused.body["error"]["param"]) == (400, "drafter")
    assert place(served, "none").status == 200
    assert answer(served, 2)[0] == plain


def test_status_says_which_of_a_head_and_a_drafter_drafts(served: Node) -> None:
    """Each drafts until its speed is known, the drafter first."""
    assert place(served, DRAFTER).status == 200
    kinds = list[str]()
    for _ in range(6):
        stats = served.chat("Tell me a story.", model=TARGET, max_tokens=60)["generation_stats"]
        kinds.append(stats["drafter_kind"])
        eventually(lambda: placement(served)["drafting"]["drafter_kind"] == kinds[-1], WITHIN_S)
        assert "drafts" in stats["depth_reason"] or "tried again" in stats["depth_reason"]
    assert {*kinds} == {"block_drafter", "native_mtp"}, kinds


def test_an_answer_whose_runner_is_killed_while_the_drafter_drafts_is_resumed(
    served: Node,
) -> None:
    assert place(served, DRAFTER).status == 200
    fields = {"model": TARGET, "max_tokens": 300, "return_token_ids": True, **NEVER_END}
    text, ids, stats = "Tell me a story.", list[int](), dict[str, Any]()
    plain = served.chat(text, num_draft_tokens=0, **fields)["choices"][0]["token_ids"]
    with served.stream(text, num_draft_tokens=3, **fields) as events:
        for event in events:
            if event == "[DONE]":
                break
            before, choice = len(ids), event["choices"][0]
            ids += choice.get("token_ids") or []
            stats = event.get("generation_stats") or stats
            if before < 20 <= len(ids):
                os.kill(served.stages()[0]["pid"], signal.SIGKILL)
    assert ids == plain
    assert (stats["drafter_kind"], stats["resumes"]) == ("block_drafter", 1)
    assert stats["proposed_draft_tokens"] > 0


@pytest.mark.parametrize("first", [DRAFTER, "none"])
def test_loads_at_once_with_different_drafters_leave_one_that_answers(
    served: Node, tmp_path: Path, first: str
) -> None:
    _ = shutil.copytree(tmp_path / "models" / DRAFTER, tmp_path / "models" / "a" / "second")
    with ThreadPoolExecutor(4) as pool:
        names = [first, "a/second", first, "a/second"]
        replies = list(pool.map(partial(place, served), names))
    assert {reply.status for reply in replies} <= {200, 409}, replies
    assert any(reply.status == 200 for reply in replies)
    plain = answer(served, 0)[0]
    assert answer(served, 2)[0] == plain
    assert placement(served)["asked_for"] in ("drafter a/second", f"drafter {first}")


def chat() -> dict[str, Any]:
    message = {"role": "user", "content": "Who are you?"}
    return {"model": TARGET, "messages": [message], "max_tokens": 4}


def test_one_that_does_not_fit_is_refused_and_the_placement_before_answers(served: Node) -> None:
    assert place(served, DRAFTER).status == 200
    before = placement(served)["id"]
    for name, why in (
        ("a/other", "a vocabulary of 4095 ids, and this one has 4096"),
        (TARGET, "is no block drafter that is implemented here"),
        ("a/none", "is not on this machine"),
        ("/etc", "none of the head's folders of models"),
    ):
        for refused in (
            place(served, name),
            served.call("GET", f"/v1/placements/preview?model={TARGET}&drafter={name}"),
        ):
            error = refused.body["error"]
            assert (refused.status, error["param"]) == (400, "drafter"), refused
            assert why in error["message"] and "leave it out" in error["message"]
    assert placement(served)["id"] == before
    assert answer(served, 2)[1]["drafter_kind"] == "block_drafter"
