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
    none = [0] * 8
    for k in range(8):
        rounds = sum((*each["draft_k_histogram"], *none)[k] for each in stats)
        assert growth("exo_node_draft_rounds", k=str(k)) == rounds
        accepted = sum((*each["accepted_per_position"], *none)[k] for each in stats)
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
