"""The generated modules are those of `proto/peer.proto`, by the pinned generators."""

import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).parents[2] / "proto"
REMEDY = "run `python proto/generate.py` and commit what it writes"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("generated")
    subprocess.run([sys.executable, PROTO / "generate.py", out], check=True)
    return {file.name: file.read_text() for file in out.iterdir()}


def test_generated_modules_match_the_proto_file(fresh: dict[str, str]) -> None:
    checked_in = {file.name: file.read_text() for file in PROTO.glob("*_pb2*")}
    assert checked_in.keys() == fresh.keys(), REMEDY
    assert [name for name, text in fresh.items() if checked_in[name] != text] == [], REMEDY


def test_generated_modules_import_each_other_relatively(fresh: dict[str, str]) -> None:
    assert "from . import peer_pb2" in fresh["peer_pb2_grpc.py"]
    assert not [name for name, text in fresh.items() if "from exo_node" in text]
