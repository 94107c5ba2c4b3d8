"""Metrics and totals of a real node are the sums over its answers."""

from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest
from nodes import Node, eventually, node
from samples import Samples, of_demo, sampled
from trials import NEVER_END

from exo_node.node.chat.metrics import CONTENT_TYPE


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("counted"), "--no-mdns") as running:
        yield running


def scrape(running: Node) -> Samples:
    with urlopen(f"http://127.0.0.1:{running.port}/metrics") as reply:
        assert reply.headers["Content-Type"] == CONTENT_TYPE
        return sampled(reply.read())


def test_a_real_nodes_metrics_are_the_sums_of_its_answers_stats(demo: Node) -> None:
    before = scrape(demo)
    fields: list[dict[str, Any]] = [
        {"num_draft_tokens": 3},
        {"num_draft_tokens": 0, "max_tokens": 5},
        {"temperature": 1, "seed": 5, "draft_policy": "fixed", "max_tokens": 24},
    ]
    bodies = [demo.chat("Tell me a story.", **each) for each in fields]
    stats = [body["generation_stats"] for body in bodies]
    after = scrape(demo)

    def growth(name: str, **labels: str) -> float:
        now = of_demo(after, f"{name}_total", **labels) or 0
        return now - (of_demo(before, f"{name}_total", **labels) or 0)

    assert growth("vllm:spec_decode_num_accepted_tokens") > 0
    for name, field in {
        "vllm:spec_decode_num_drafts": "spec_decode_rounds",
        "vllm:spec_decode_num_draft_tokens": "proposed_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens": "accepted_draft_tokens",
    }.items():
        assert growth(name) == sum(each[field] for each in stats)
    for name, field in {
        "vllm:prompt_tokens": "prompt_tokens",
        "vllm:generation_tokens": "completion_tokens",
    }.items():
        assert growth(name) == sum(body["usage"][field] for body in bodies)
    for k in range(4):
        rounds = sum((*each["draft_k_histogram"], 0, 0, 0, 0)[k] for each in stats)
        assert growth("exo_node_draft_rounds", k=str(k)) == rounds
        accepted = sum((*each["accepted_per_position"], 0, 0, 0, 0)[k] for each in stats)
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        assert growth(name, position=str(k)) == accepted
    reasons = [body["choices"][0]["finish_reason"] for body in bodies]
    for reason in ("stop", "length"):
        assert growth("vllm:request_success", finished_reason=reason) == reasons.count(reason) > 0
    assert after["exo_node_nodes", (("status", "alive"),)] == 1
    assert after["exo_node_placements", (("status", "ready"),)] == 1
    runner = (("model_name", "demo"), ("stage", "0"))
    assert after["exo_node_runner_weights_bytes", runner] > 30e6
    with demo.stream("Tell me a story.", max_tokens=4000, **NEVER_END) as events:
        assert next(events)
    success, aborts = "vllm:request_success_total", {"finished_reason": "abort"}
    eventually(lambda: of_demo(scrape(demo), success, **aborts) == 1, 180)


def test_totals_and_models_show_policy_rule_and_identity(demo: Node) -> None:
    wishes: list[dict[str, Any]] = [{"draft_policy": "fixed"}, {"draft_policy": "adaptive"}]
    drafted = [demo.chat("Who are you?", **wish)["generation_stats"] for wish in wishes]
    assert [stats["draft_policy"] for stats in drafted] == ["fixed", "adaptive"]
    totals = demo.call("GET", "/v1/mtp/stats").body["models"]["demo"]
    assert sum(totals["requests_by_draft_policy"].values()) == totals["requests"]
    assert set(totals["requests_by_draft_policy"]) >= {"fixed", "adaptive"}
    assert sum(totals["requests_by_acceptance_rule"].values()) == totals["requests"]
    assert sum(totals["accepted_per_position"]) == totals["accepted_draft_tokens"]
    assert totals["greedy_identity"] == drafted[1]["greedy_identity"] == "bitwise"
    entry = demo.call("GET", "/v1/models/demo").body
    assert entry["native_mtp"]["greedy_identity"] == "bitwise"
    placement = demo.call("GET", "/v1/placements").body["data"][0]
    assert placement["drafting"]["draft_policy"] == drafted_by_default(demo)
    cards = {each["id"]: each for each in demo.call("GET", "/v1/models?catalog=1").body["data"]}
    assert cards["Qwen/Qwen3.6-27B"]["native_mtp"]["greedy_identity"] is None


def drafted_by_default(running: Node) -> str:
    return running.chat("Who are you?", max_tokens=2)["generation_stats"]["draft_policy"]
