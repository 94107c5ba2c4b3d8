"""Nodes and commands of the tests read no profiles and cards of the user who runs the tests."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import api_stub
import nodes
import pytest

_SHOW = """
from exo_node.node.machine.settings import load_settings
settings = load_settings({}, {})
print(settings.profiles_file, settings.cards_dir, sep="\\n")
"""


@pytest.mark.parametrize("environment", [nodes.environment, api_stub.environment])
def test_processes_of_tests_have_a_configuration_folder_of_their_own(
    environment: Callable[[], dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _SHOW],
        env=environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    folder = Path(os.environ["XDG_CONFIG_HOME"])
    assert folder.is_relative_to(tmp_path_factory.getbasetemp())
    for path in result.stdout.splitlines():
        assert Path(path).is_relative_to(folder)
