"""`exo-node models unload`, over a stub of the node."""

from api_stub import as_json, serve_stub
from typer.testing import CliRunner

from exo_node.node.cli.main import app


def test_a_loaded_model_is_unloaded_by_its_name_and_another_one_is_refused() -> None:
    with serve_stub() as stub:
        loaded = [{"id": "p0", "model": "demo"}, {"id": "p 1", "model": "owner/large"}]
        stub.replies["/v1/placements"] = as_json({"data": loaded})
        stub.replies["/v1/placements/p%201"] = as_json(b"")
        words = ["models", "unload", "--port", str(stub.port)]
        result = CliRunner().invoke(app, [*words, "owner/large"])
        assert (result.exit_code, stub.deleted) == (0, ["/v1/placements/p%201"]), result.output
        refused = CliRunner().invoke(app, [*words, "another"])
        assert refused.exit_code != 0
        assert "another is not loaded; demo, owner/large now" in refused.output
        assert len(stub.deleted) == 1
