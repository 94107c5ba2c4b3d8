"""`exo-node models show`, `graft` and `convert` as commands."""

import json
import shutil
from pathlib import Path

from api_stub import exo_node
from conversions import strip_head
from hub import REPOSITORY, FakeHub, serve
from models import DEMO, make_checkpoint

from exo_node.shard.checkpoint.checkpoint import indexed_tensors, read_checkpoint
from exo_node.shard.checkpoint.head_tensors import HeadFound, find_head


def test_a_graft_downloads_only_the_files_that_hold_the_head(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}
    holding = {file for name, file in (indexed_tensors(DEMO) or {}).items() if "mtp." in name}
    shards = {name for name in files if name.endswith(".safetensors")}
    assert holding < shards
    folder = strip_head(DEMO, tmp_path / "models" / "me" / "conversion")
    environment = {"HF_HOME": str(tmp_path / "hf"), "EXO_DATA_DIR": str(tmp_path / "data")}
    models_dir = ("--models-dir", str(tmp_path / "models"))
    before = exo_node("models", "show", "me/conversion", *models_dir, **environment)
    assert before.returncode == 0, before.stderr
    assert "they were stripped" in before.stdout and "models graft" in before.stdout
    hub = FakeHub(files)
    with serve(hub):
        process = exo_node(
            "models", "graft", "me/conversion", "--from", REPOSITORY, "--mtp-bits", "8",
            *models_dir, HF_ENDPOINT=hub.url, **environment,
        )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert "with its MTP head" in process.stderr
    assert {name for name in hub.fetched() if name.endswith(".safetensors")} == holding
    assert isinstance(find_head(read_checkpoint(folder)), HeadFound)
    after = exo_node("models", "show", "me/conversion", *models_dir, **environment)
    assert "MTP head    found" in after.stdout and ", quantised, in mtp.saf" in after.stdout
    again = exo_node(
        "models", "graft", "me/conversion", "--from", str(DEMO), *models_dir, **environment
    )
    assert again.returncode == 1 and "nothing to graft" in again.stderr


def test_a_conversion_is_listed_and_has_its_head(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "raw", "qwen3_5", vocab=4096)
    environment = {"HF_HOME": str(tmp_path / "hf"), "EXO_DATA_DIR": str(tmp_path / "data")}
    process = exo_node("models", "convert", str(source), "--bits", "4", **environment)
    assert process.returncode == 0 and "with its MTP head" in process.stderr, process.stderr
    listed = json.loads(exo_node("models", "--json", **environment).stdout)["data"]
    entry = {each["id"]: each for each in listed}["raw-4bit-mtp"]
    assert (entry["quantization"], entry["format"]) == (4, "4-bit")
    assert "head found" in entry["mtp"]
    unknown = exo_node("models", "convert", "me/nothing", "--bits", "4", **environment)
    assert unknown.returncode == 1 and "pull me/nothing" in unknown.stderr


def test_a_checkpoint_that_would_not_load_is_named_with_file_and_remedy(tmp_path: Path) -> None:
    environment = {"HF_HOME": str(tmp_path / "hf"), "EXO_DATA_DIR": str(tmp_path / "data")}
    folder = make_checkpoint(tmp_path / "models" / "m", "llama", vocab=4096)
    environment["EXO_MODELS_DIR"] = str(tmp_path / "models")
    assert exo_node("models", "show", "m", **environment).returncode == 0
    (folder / "tokenizer.json").rename(folder / "away")
    lacking = exo_node("models", "show", "m", **environment)
    assert lacking.returncode == 1 and "tokenizer.json" in lacking.stderr
    (folder / "away").rename(folder / "tokenizer.json")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    broken = exo_node("models", "show", "m", **environment)
    assert broken.returncode == 1 and "truncated" in broken.stderr
    shutil.rmtree(folder)
    missing = exo_node("models", "show", "m", **environment)
    assert missing.returncode == 1 and "Traceback" not in missing.stderr
