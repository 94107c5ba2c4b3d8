"""Two real nodes with memory for one model each, and concurrent requests for three models."""

import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from cards import stage_bytes
from nodes import Node, Reply, chat_body, copy_key, eventually, grpc_address, node, sees
from small import small_checkpoint
from test_bad_input import CHAT

from exo_node.node.store.library import ModelLibrary
from exo_node.placement.card import ModelCard
from exo_node.placement.ids import ModelId

pytestmark = pytest.mark.timeout(900)

MODELS = ("first", "second", "third")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two nodes; `card` is that of each of the models."""

    one: Node
    two: Node
    card: ModelCard
    limit: int
    """One model, and a quarter of another: two such quarters hold no third one."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("memory")
    for name in MODELS:
        _ = shutil.copytree(small_checkpoint(), root / "models" / name)
    card = ModelLibrary((root / "models",), offline=True).get(ModelId(MODELS[0])).card
    limit = stage_bytes(card, 0, card.num_layers, True, card.context_length, True) * 5 // 4
    flags = ("--no-mdns", "--models-dir", str(root / "models"), "--memory-limit", str(limit))
    with ExitStack() as stack:
        one = stack.enter_context(node(root / "one", *flags, sound=True))
        folder = copy_key(one, root / "two")
        two = stack.enter_context(node(folder, *flags, "--peer", grpc_address(one), sound=True))
        eventually(lambda: sees(one, 2) and sees(two, 2), 180)
        yield Pair(one, two, card, limit)


def promised_by_node(pair: Pair) -> Counter[str]:
    """Bytes that the placements may take, by node: each is a whole model here."""
    sizes_by_node: Counter[str] = Counter()
    for placed in pair.one.call("GET", "/v1/placements").body["data"]:
        if placed["status"] != "failed":
            for stage in placed["stages"]:
                first, end = stage["layers"]
                sizes = (first, end, first == 0, placed["context_length"], True)
                sizes_by_node[stage["node"]] += stage_bytes(pair.card, *sizes)
    return sizes_by_node


def used_by_node(door: Node) -> Counter[str]:
    """Bytes of weights and caches in the runners' reports, by node."""
    nodes = door.call("GET", "/v1/cluster").body["nodes"]
    return Counter(
        {n["id"]: sum(s["weight_bytes"] + s["cache_bytes"] for s in n["stages"]) for n in nodes}
    )


def test_concurrent_loads_are_never_planned_over_the_limit(pair: Pair) -> None:
    one, two = pair.one, pair.two

    def request_chat(door: Node, model: str) -> Reply:
        body = chat_body("Who are you?", model=model, max_tokens=8)
        return door.call("POST", CHAT, body, timeout_s=240)

    def assert_within_limit(answers: list[Future[Reply]]) -> None:
        eventually(lambda: not exceeds() and all(each.done() for each in answers), 240)

    def exceeds() -> bool:
        for tally in (promised_by_node(pair), used_by_node(one)):
            assert all(size <= pair.limit for size in tally.values()), tally
        return False

    with ThreadPoolExecutor(len(MODELS)) as pool:
        doors = (one, two, one)
        answers = [pool.submit(request_chat, *each) for each in zip(doors, MODELS, strict=True)]
        assert_within_limit(answers)
    replies = {model: each.result() for model, each in zip(MODELS, answers, strict=True)}
    well = {model for model, reply in replies.items() if reply.status == 200}
    assert len(well) == 2, replies
    [refused] = [reply for reply in replies.values() if reply.status != 200]
    assert refused.status == 503, refused
    error = refused.body["error"]
    assert error["code"] == "insufficient_memory", refused
    placed = one.call("GET", "/v1/placements").body["data"]
    assert {p["model"] for p in placed if p["status"] == "ready"} == well
    assert len({stage["node"] for p in placed for stage in p["stages"]}) == 2
    # The refused model left no claim: once one is removed, it fits.
    [removed_placement] = [p for p in placed if p["model"] == min(well)]
    assert one.call("DELETE", f"/v1/placements/{removed_placement['id']}").status == 200
    [third] = set(MODELS) - well
    # At once, without a heartbeat of the node that had the removed model.
    assert request_chat(two, third).status == 200
    _ = exceeds()
