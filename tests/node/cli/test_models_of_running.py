"""Commands about models search the folders of a node that runs on the data folder."""

import json
from pathlib import Path

import pytest

from exo_node.node.cli.models import this_machine
from exo_node.node.machine.data_dir_lock import DataDirLock, find_running


@pytest.mark.parametrize("runs", [True, False])
def test_a_models_folder_of_a_running_node_is_searched_too(tmp_path: Path, runs: bool) -> None:
    mine, data = tmp_path / "mine", tmp_path / "data"
    with DataDirLock.acquire(data) as presence:
        if runs:
            presence.announce("127.0.0.1", 9, version="1", models_dirs=(mine,))
        settings, _, _ = this_machine(str(data), None)
        assert settings.models_dirs == ((mine,) if runs else ())
        other, _, _ = this_machine(str(data), [str(tmp_path)])
        assert other.models_dirs == (tmp_path,), "a flag says which"


def test_a_record_of_an_older_node_has_no_folders(tmp_path: Path) -> None:
    with DataDirLock.acquire(tmp_path) as presence:
        presence.announce("127.0.0.1", 9, version="1")
        record = json.loads((tmp_path / "node.json").read_text())
        del record["models_dirs"]
        _ = (tmp_path / "node.json").write_text(json.dumps(record))
        running = find_running(tmp_path)
        assert running is not None and (running.http_port, running.models_dirs) == (9, ())
