"""`exo-node models pull` and `rm` as commands, against a hub on loopback."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_stub import exo_node
from hub import REPOSITORY, FakeHub, serve
from models import DEMO, make_checkpoint

from exo_node.shard.checkpoint.checkpoint import read_checkpoint


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = make_checkpoint(tmp_path / "source", "qwen3_5", hidden=256)
    hub = FakeHub({path.name: path.read_bytes() for path in folder.iterdir()})
    hub.files["README.md"] = b"# not needed"
    hub.files["tokenizer.json"] = (DEMO / "tokenizer.json").read_bytes()
    with serve(hub):
        yield hub


def settings(hub: FakeHub, root: Path, **extra: str) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(root / "hf"),
        "EXO_DATA_DIR": str(root / "data"),
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "",
        **extra,
    }


def pull(
    hub: FakeHub, root: Path, *arguments: str, **extra: str
) -> "subprocess.CompletedProcess[str]":
    return exo_node("models", "pull", *(arguments or (REPOSITORY,)), **settings(hub, root, **extra))


def test_a_model_is_pulled_shown_listed_and_removed(hub: FakeHub, tmp_path: Path) -> None:
    process = pull(hub, tmp_path, REPOSITORY, "--json")
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["id"] == REPOSITORY
    assert read_checkpoint(Path(report["folder"])).tensors
    assert "README.md" not in hub.fetched()
    environment = settings(hub, tmp_path)
    listed = json.loads(exo_node("models", "--json", **environment).stdout)["data"]
    assert [entry["id"] for entry in listed] == ["demo", REPOSITORY]
    description = exo_node("models", "show", REPOSITORY, **environment).stdout
    assert "qwen3_5, 4 layers" in description and report["folder"] in description
    refused = exo_node("models", "rm", REPOSITORY, **environment)
    assert (refused.returncode, refused.stderr.count("--yes")) == (2, 1)
    removal = exo_node("models", "rm", REPOSITORY, "--yes", **environment)
    assert removal.returncode == 0, removal.stderr
    assert not Path(report["folder"]).exists()
    again = exo_node("models", "rm", REPOSITORY, "--yes", **environment)
    assert again.returncode == 1 and "`exo-node models`" in again.stderr


@pytest.mark.parametrize(
    ("fault", "arguments", "extra", "message"),
    [
        ("lie", (), {}, "arrived damaged"),
        ("token", (), {"HF_TOKEN": ""}, "set HF_TOKEN"),
        ("down", (), {}, "could not be reached"),
        ("", (), {"EXO_OFFLINE": "1"}, "Unset EXO_OFFLINE"),
        ("", (REPOSITORY, "--revision", "../x"), {}, "is no revision"),
        ("", ("no-owner",), {}, "Write owner/name"),
        ("", ("demo",), {}, "ships with exo-node"),
        ("", (REPOSITORY, "--quant", "4"), {}, "--quant"),
    ],
)
def test_a_failed_pull_prints_one_line_with_the_remedy(
    hub: FakeHub,
    tmp_path: Path,
    fault: str,
    arguments: tuple[str, ...],
    extra: dict[str, str],
    message: str,
) -> None:
    hub.lie = fault == "lie"
    hub.token = "hf_right" if fault == "token" else ""
    if fault == "down":
        hub.url = "http://127.0.0.1:9"
    process = pull(hub, tmp_path, *arguments, **extra)
    assert process.returncode in (1, 2)
    [line] = [text for text in process.stderr.splitlines() if text.startswith("exo-node: ")]
    assert message in line
    assert "Traceback" not in process.stderr
