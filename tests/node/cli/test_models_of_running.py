"""Commands about models search the folders of a node that runs on the data folder."""

from pathlib import Path

import pytest

from exo_node.node.cli.models import this_machine
from exo_node.node.machine.data_dir_lock import DataDirLock


@pytest.mark.parametrize("runs", [True, False])
def test_a_models_folder_of_a_running_node_is_searched_too(tmp_path: Path, runs: bool) -> None:
    mine, data = tmp_path / "mine", tmp_path / "data"
    with DataDirLock.acquire(data) as presence:
        if runs:
            presence.announce("127.0.0.1", 9, (mine,))
        settings, _, _ = this_machine(str(data), None)
        assert settings.models_dirs == ((mine,) if runs else ())
        other, _, _ = this_machine(str(data), [str(tmp_path)])
        assert other.models_dirs == (tmp_path,), "a flag says which"
