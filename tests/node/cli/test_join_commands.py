"""`exo-node deny`, `join` and `leave`, over a stub of the node."""

from pathlib import Path

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


def test_a_folder_without_a_cluster_is_told_before_the_question(tmp_path: Path) -> None:
    for words in (["leave"], ["leave", "--yes"]):
        result = CliRunner().invoke(app, [*words, "--data-dir", str(tmp_path)])
        assert result.exit_code == 1 and "it is in no cluster" in result.stderr, result.stderr
    assert list(tmp_path.iterdir()) == []


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
