"""A node that left a cluster: it says so, and a person has it ask again."""

from pathlib import Path

from typer.testing import CliRunner

from exo_node.node.cli.join import nodes_text
from exo_node.node.cli.main import app
from exo_node.node.trust.certificates import cluster_fingerprint
from exo_node.node.trust.cluster_key import KeyFolder


def test_a_left_cluster_is_asked_again_once_a_person_says_so(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    fingerprint = cluster_fingerprint(folder.load())
    result = CliRunner().invoke(app, ["leave", "--yes", "--data-dir", str(tmp_path)])
    assert "it does not ask that one again before `exo-node join --again`" in result.stderr
    own = cluster_fingerprint(folder.load())
    assert folder.left_clusters() == {fingerprint} and folder.is_fresh(own)
    again = CliRunner().invoke(app, ["join", "--again", "--data-dir", str(tmp_path)])
    assert again.exit_code == 0, again.output
    assert folder.left_clusters() == frozenset()
    assert folder.is_fresh(own), "it may be let in still, and keeps its own cluster until then"


def test_the_clusters_that_are_not_asked_are_named_with_the_remedy() -> None:
    joining = {"not_asked": [{"cluster": "c" * 16, "name": "studio"}]}
    text = nodes_text({"nodes": []}, joining)
    assert f"left the cluster of studio ({'c' * 16})" in text
    assert "`exo-node join --again` does" in text
