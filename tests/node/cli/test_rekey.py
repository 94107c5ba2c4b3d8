"""`exo-node rekey`, over a stub of the node."""

from pathlib import Path
from typing import Any

import pytest
from api_stub import as_json, serve_stub
from typer.testing import CliRunner

from exo_node.node.cli.main import app


@pytest.mark.parametrize(
    ("missed", "status", "problem"),
    [([], 0, ""), (["desk"], 1, "some nodes have the old key still")],
)
def test_a_new_key_that_missed_a_node_is_a_failure(
    missed: list[str], status: int, problem: str
) -> None:
    answer: dict[str, Any] = {"kept": ["attic"], "missed": missed}
    with serve_stub() as stub:
        stub.replies["/v1/join/rekey"] = as_json(answer)
        result = CliRunner().invoke(app, ["rekey", "--yes", "--port", str(stub.port)])
    assert result.exit_code == status, result.output
    assert "attic restart with the new cluster key" in result.stderr
    assert problem in result.stderr


def test_a_folder_without_a_cluster_is_told_before_the_question(tmp_path: Path) -> None:
    for words in (["leave"], ["leave", "--yes"]):
        result = CliRunner().invoke(app, [*words, "--data-dir", str(tmp_path)])
        assert result.exit_code == 1 and "it is in no cluster" in result.stderr, result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nonsense", "no other node is called 'nonsense'; there are attic (a1), attic (a2)"),
        ("attic", "several nodes are called 'attic'; there are attic (a1), attic (a2)"),
    ],
)
def test_a_name_is_checked_before_the_question(name: str, problem: str) -> None:
    nodes = [{"name": "attic", "id": id, "status": "alive"} for id in ("a1", "a2")]
    with serve_stub() as stub:
        stub.replies["/v1/cluster"] = as_json({"nodes": [{"self": True, "name": "x"}, *nodes]})
        words = ["rekey", "--without", name, "--port", str(stub.port)]
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 1 and result.stderr.strip() == f"exo-node: {problem}"
