"""`exo-node models import` as a command, its kills, and what it leaves."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from api_stub import COMMAND, environment, exo_node
from gguf_files import tiny_model, write_model

from exo_node.shard.checkpoint.checkpoint import read_checkpoint


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    model, config = tiny_model("llama")
    return write_model(path, "llama", model, config)


def test_a_listed_file_becomes_a_listed_model(tmp_path: Path) -> None:
    home, root = tmp_path / "home", tmp_path / "models"
    settings = {
        "HF_HOME": str(tmp_path / "hf"),
        "EXO_DATA_DIR": str(tmp_path / "data"),
        "EXO_MODELS_DIR": str(root),
        "HOME": str(home),
    }
    file = made(root / "me" / "tiny" / "tiny-F32.gguf")
    blob = made(home / ".ollama" / "models" / "blobs" / f"sha256-{'0' * 64}")
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'0' * 64}"}
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/small/135m"
    manifest.parent.mkdir(parents=True)
    _ = manifest.write_text(json.dumps({"layers": [layer]}))

    listed = exo_node("models", **settings).stdout
    assert "exo-node models import me/tiny/tiny-F32.gguf" in " ".join(listed.split())
    assert "small:135m" in listed
    refused = exo_node("models", "show", "me/tiny/tiny-F32.gguf", **settings)
    assert refused.returncode == 1 and "`exo-node models import" in refused.stderr, refused.stderr

    process = exo_node("models", "import", "me/tiny/tiny-F32.gguf", **settings)
    assert process.returncode == 0 and "tiny-F32 is ready" in process.stderr, process.stderr
    named = exo_node("models", "import", "small:135m", "me/own", "--bits", "8", **settings)
    assert named.returncode == 0, named.stderr
    assert "me/own is ready in" in named.stderr and blob.exists()
    entries = json.loads(exo_node("models", "--json", **settings).stdout)["data"]
    ids = {entry["id"]: entry for entry in entries}
    assert "me/tiny/tiny-F32.gguf" not in ids  # it was imported under its own name
    assert (ids["tiny-F32"]["format"], ids["me/own"]["format"]) == ("bfloat16", "8-bit")
    assert exo_node("models", "show", "tiny-F32", **settings).returncode == 0

    for arguments, reason in (
        ((str(file),), "tiny-F32 is on this machine already"),
        ((str(file), "demo"), "demo is on this machine already"),
        ((str(file), "../x"), "no name of a model"),
        ((str(file), "/tmp/x"), "no name of a model"),
        (("nothing.gguf",), "no GGUF file nothing.gguf"),
        ((str(file), "seven", "--bits", "7"), "choose 6 or 8"),
    ):
        refused = exo_node("models", "import", *arguments, **settings)
        assert refused.returncode in (1, 2) and "Traceback" not in refused.stderr
        assert reason in " ".join(refused.stderr.split()), refused.stderr
    assert {path.name for path in (tmp_path / "data" / "models").iterdir()} == {"tiny-F32", "me"}


def test_a_killed_import_leaves_nothing_that_is_listed_and_the_next_one_cleans_up(
    tmp_path: Path,
) -> None:
    settings = {"HF_HOME": str(tmp_path / "hf"), "EXO_DATA_DIR": str(tmp_path / "data")}
    settings["HOME"] = str(tmp_path)
    file = made(tmp_path / "tiny.gguf")
    models = tmp_path / "data" / "models"
    part = models / ".tiny.exo-part"
    process = subprocess.Popen(
        [*COMMAND, "models", "import", str(file)],
        env=environment(**settings),
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    while not part.exists() and process.poll() is None:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    _ = process.wait()
    assert not (models / "tiny").exists() or read_checkpoint(models / "tiny")
    again = exo_node("models", "import", str(file), "again", **settings)
    assert again.returncode == 0, again.stderr
    names = {path.name for path in models.iterdir()}
    assert names <= {"tiny", "again"} and "again" in names
