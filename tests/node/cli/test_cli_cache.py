"""`exo-node cache` lists, shows and clears the prompts on a data folder, with no node."""

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from exo_node.node.cli.main import app
from exo_node.shard.checkpoint.prefix_files import StoredTensor, pieces_of


def cache(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["cache", *arguments, "--data-dir", str(folder)])


def as_json(folder: Path, *arguments: str) -> Any:
    result = cache(folder, *arguments, "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)


def folder_of(folder: Path, model: str) -> Path:
    return folder / "prefixes" / f"4-{sha256(model.encode()).hexdigest()[:32]}"


def write(folder: Path, model: str, begin: int, rows: int, used: int) -> Path:
    path = folder_of(folder, model) / f"{rows:040}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"0": StoredTensor("U8", (rows,), memoryview(bytes(rows)))}
    description = {"model": model, "begin": begin, "rows": rows}
    _ = path.write_bytes(b"".join(pieces_of(description, tensors, lambda: None)))
    os.utime(path, (used, used))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of one model, and one of another."""
    _ = write(tmp_path, "demo", 0, 300, 60)
    _ = write(tmp_path, "demo", 300, 460, 120)
    _ = write(tmp_path, "large", 0, 900, 30)
    return tmp_path


def test_models_are_listed_with_rows_bytes_and_last_use(folder: Path) -> None:
    demo, large = as_json(folder, "list")["data"]
    size = sum(path.stat().st_size for path in folder_of(folder, "demo").iterdir())
    assert demo == {
        "model": "demo",
        "files": 2,
        "rows": 460,
        "longest_rows": 460,
        "bytes": size,
        "last_used": "1970-01-01 00:02Z",
    }
    assert (large["model"], large["rows"]) == ("large", 900)
    lines = cache(folder, "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["MODEL", "demo", "large"]


def test_the_files_of_one_model_are_shown(folder: Path) -> None:
    later, earlier = as_json(folder, "show", "demo")["data"]
    assert (later["begin"], later["rows"]) == (300, 460)
    assert (folder / "prefixes" / later["file"]).exists()
    assert (earlier["begin"], earlier["rows"]) == (0, 300)
    assert "300-460" in cache(folder, "show", "demo").stdout


def test_one_model_or_all_of_them_are_cleared(folder: Path) -> None:
    assert as_json(folder, "clear", "demo")["removed"] == 2
    assert [each["model"] for each in as_json(folder, "list")["data"]] == ["large"]
    assert "removed 1 file," in cache(folder, "clear").stderr
    assert as_json(folder, "list")["data"] == []
    assert "no prompts are on disk" in cache(folder, "list").stderr


@pytest.mark.parametrize("command", ["show", "clear"])
def test_a_model_without_prompts_is_an_error(command: str, folder: Path) -> None:
    result = cache(folder, command, "absent")
    assert result.exit_code != 0
    assert "no prompts of 'absent' are on disk" in result.stderr
    assert len([*folder.glob("prefixes/*/*")]) == 3


def test_what_cannot_be_read_is_listed_without_a_model_and_cleared(folder: Path) -> None:
    parent = folder_of(folder, "demo")
    _ = (parent / f"{460:040}.safetensors.1f001f00").write_bytes(b"half")
    os.mkfifo(parent / f"{'a' * 40}.safetensors")
    (parent / f"{'b' * 40}.safetensors").symlink_to("/etc/passwd")
    _ = (parent / "model.safetensors").write_bytes(b"a person's")
    listed = as_json(folder, "list")["data"]
    (unreadable,) = (each for each in listed if each["model"] is None)
    assert (unreadable["files"], unreadable["rows"]) == (3, 0)
    assert "(unreadable)" in cache(folder, "list").stdout
    assert as_json(folder, "clear")["removed"] == 6
    assert [each.name for each in folder.glob("prefixes/*/*")] == ["model.safetensors"]
    assert Path("/etc/passwd").exists()
