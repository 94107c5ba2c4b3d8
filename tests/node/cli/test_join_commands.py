"""`exo-node deny`, `join`, `leave` and `rekey`, over a stub of the node."""

from pathlib import Path
from typing import Any

import pytest
from api_stub import Stub, as_json
from typer.testing import CliRunner, Result

from exo_node.node.cli.main import app

DESKS = [{"node": "a1", "name": "desk"}, {"node": "b2", "name": "desk"}]


def invoke(stub: Stub, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--port", str(stub.port)])


@pytest.mark.parametrize(
    ("requests", "name", "problem"),
    [
        ([], "", "no node asks to join this cluster"),
        (DESKS[:1], "mini", "means none of the nodes that ask to join"),
        (DESKS, "desk", "means several of the nodes that ask to join"),
        (DESKS, "", "say which node is meant, by its name or id"),
    ],
)
def test_a_name_that_means_no_single_request_is_refused_with_those_that_ask(
    stub: Stub, requests: list[dict[str, str]], name: str, problem: str
) -> None:
    stub.replies["/v1/join/requests"] = as_json({"data": requests})
    result = invoke(stub, "deny", *name.split())
    assert result.exit_code == 1 and problem in result.stderr
    assert all(f"desk ({each['node']})" in result.stderr for each in requests)


@pytest.mark.parametrize(
    ("missed", "status", "problem"),
    [([], 0, ""), (["desk"], 1, "some nodes have the old key still")],
)
def test_a_new_key_that_missed_a_node_is_a_failure(
    stub: Stub, missed: list[str], status: int, problem: str
) -> None:
    answer: dict[str, Any] = {"kept": ["attic"], "missed": missed}
    stub.replies["/v1/join/rekey"] = as_json(answer)
    result = invoke(stub, "rekey", "--yes")
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
        ("nonsense", "'nonsense' means none of the other nodes"),
        ("attic", "'attic' means several of the other nodes"),
    ],
)
def test_a_name_is_checked_before_the_question(stub: Stub, name: str, problem: str) -> None:
    nodes = [{"name": "attic", "id": id, "status": "alive"} for id in ("a1", "a2")]
    stub.replies["/v1/cluster"] = as_json({"nodes": [{"self": True, "name": "x"}, *nodes]})
    result = invoke(stub, "rekey", "--without", name)
    assert result.exit_code == 1 and problem in result.stderr
    assert result.stderr.endswith(": attic (a1), attic (a2)\n")


def test_a_key_beside_again_is_refused_and_nothing_is_asked(stub: Stub) -> None:
    result = invoke(stub, "join", "--again", "a-key")
    assert result.exit_code == 2 and "either KEY or --again" in result.stderr
    assert stub.bodies == []


def test_a_node_that_restarts_instead_of_answering_is_told_in_words(stub: Stub) -> None:
    stub.replies["/v1/join/key"] = lambda handler: handler.connection.close()
    result = invoke(stub, "join", "abcdefghijklmnopqrstuvwxyz234567")
    assert result.exit_code == 1
    assert "ended the connection before it had answered; it may be restarting" in result.stderr
    assert "Error" not in result.stderr, "no name of a class"
