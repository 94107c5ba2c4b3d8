"""`exo-node deny`, over a stub of the node."""

import pytest
from api_stub import as_json, serve_stub
from typer.testing import CliRunner

from exo_node.node.cli.main import app

DESKS = [{"node": "a1", "name": "desk"}, {"node": "b2", "name": "desk"}]


@pytest.mark.parametrize(
    ("requests", "name", "problem"),
    [
        ([], "", "no node asks to join this cluster"),
        (DESKS[:1], "mini", "no node called 'mini' asks to join; these ask: desk (a1)"),
        (DESKS, "desk", "say which node is meant, by its name or id: desk (a1), desk (b2)"),
    ],
)
def test_a_name_that_means_no_single_request_is_refused_with_those_that_ask(
    requests: list[dict[str, str]], name: str, problem: str
) -> None:
    with serve_stub() as stub:
        stub.replies["/v1/join/requests"] = as_json({"data": requests})
        result = CliRunner().invoke(app, ["deny", *name.split(), "--port", str(stub.port)])
    assert (result.exit_code, result.stderr.strip()) == (1, f"exo-node: {problem}")
