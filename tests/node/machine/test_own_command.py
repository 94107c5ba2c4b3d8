"""How a text names the commands of this program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from exo_node.node.machine.own_command import command_for, data_dir_for


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "my tools" / "bin" / "exo-node"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_a_program_on_the_path_is_called_by_its_name(program: Path, tmp_path: Path) -> None:
    link = tmp_path / "exo-node"
    link.symlink_to(program)
    assert command_for(str(program), str(link), tmp_path) == "exo-node"


def test_a_program_that_a_shell_does_not_find_is_called_by_its_path(
    program: Path, tmp_path: Path
) -> None:
    other = tmp_path / "exo-node"
    other.touch()
    for on_path in (None, str(other)):
        assert command_for(str(program), on_path, tmp_path) == "~/'my tools/bin/exo-node'"
        assert command_for(str(program), on_path, Path("/nobody")) == f"'{program}'"


def test_another_program_names_the_command_as_people_do() -> None:
    assert command_for(sys.executable, None, Path("/")) == "exo-node"
    assert command_for("-c", None, Path("/")) == "exo-node"


def test_the_data_folder_of_a_flag_goes_along() -> None:
    assert data_dir_for(["start", "--data-dir", "/my data"]) == "EXO_DATA_DIR='/my data' "
    assert data_dir_for(["start", "--data-dir=/d"]) == "EXO_DATA_DIR=/d "
    assert data_dir_for(["start", "--data-dir", "d"]) == f"EXO_DATA_DIR={Path.cwd() / 'd'} "
    for words in ([], ["start"], ["start", "--data-dir"], ["chat", "--", "--data-dir", "d"]):
        assert data_dir_for(words) == ""


@pytest.mark.parametrize("flagged", [True, False])
def test_printed_commands_can_be_typed_where_the_program_is_not_on_the_path(
    tmp_path: Path, flagged: bool
) -> None:
    program = Path(sys.executable).parent / "exo-node"
    clean = {"PATH": os.defpath, "HOME": str(tmp_path), "EXO_DATA_DIR": str(tmp_path)}

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*words], capture_output=True, text=True, env=clean, check=False)

    folder = tmp_path / "my data"
    error = run(str(program), "status", *(["--data-dir", str(folder)] if flagged else [])).stderr
    command = error[error.index("`") + 1 : error.rindex("`")]
    assert command.endswith("exo-node start")
    helped = run("sh", "-c", f"{command} --help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert command.removeprefix(f"EXO_DATA_DIR='{folder}' ").removesuffix(" start") in (
        run(str(program), "--help").stdout
    )
    same = run("sh", "-c", command.replace("exo-node start", "exo-node status")).stderr
    assert same == error.replace(f"EXO_DATA_DIR='{folder}' ", ""), "another data folder"
