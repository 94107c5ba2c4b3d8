"""`exo-node bench serve` against a real node, and its page in a browser."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_stub import exo_node
from browser import DARK, DESK, PHONE, browsers, visit
from nodes import Node, node

LENGTH = ("--extra-body", '{"logit_bias": {"4095": -100, "4093": -100}}')
"""Answers of the demo model do not end before --output-tokens."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("node"), "--name", "leonoras-mac") as served:
        yield served


@pytest.fixture(scope="module")
def folder(served: Node, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "out"
    result = exo_node(
        *("bench", "serve", "--data-dir", str(served.data_dir), "--model", "demo"),
        *("--workloads", "questions,32,agent", "--concurrency", "1,2", "--requests", "2"),
        *("--repeats", "1", "--limit", "0", "--output-tokens", "6", "--turns", "2", *LENGTH),
        *("--system-tokens", "150", "--tool-tokens", "20", "--output", str(out)),
    )
    assert result.returncode == 0, result.stderr
    return out


def test_a_real_node_answers_all_and_its_second_turns_are_cached(folder: Path) -> None:
    with (folder / "serve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["failed"] for row in rows] == ["0"] * 6
    for row in rows:
        lengths = (row["min_output_len"], row["max_output_len"], row["output_tokens_by"])
        assert lengths == ("6", "6", "usage")
        per_prompt = float(row["total_input_tokens"]) / float(row["completed"])
        if row["workload"] == "32 tokens":
            assert 26 <= per_prompt <= 38
        if row["workload"] == "agent":
            assert per_prompt > 150
            assert float(row["cached_input_tokens"]) > 0


@pytest.mark.parametrize(
    "look",
    [DESK, DARK, PHONE, {**PHONE, "color_scheme": "dark"}],
    ids=("desk", "dark", "phone", "dark phone"),
)
def test_the_page_is_readable_asks_for_nothing_and_fits(
    folder: Path, look: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with browsers() as browser, visit(browser, folder.as_uri(), **look) as view:
        page = view.go("index.html")
        assert page.title() == f"{page.locator('h1').inner_text()}: exo-node bench serve"
        assert page.locator("table").count() == 3
        assert page.locator("figure svg").count() == 9
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        view.shot(f"bench-serve-{request.node.callspec.id}")
        assert view.violations() == []
        assert [each.url for each in view.requests] == [f"{folder.as_uri()}/index.html"]
