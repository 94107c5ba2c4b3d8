"""DataDirLock: one node a data folder; a run file is believed only while its lock is held."""

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from exo_node.node.machine.data_dir_lock import DataDirLock, Running, find_running
from exo_node.placement.errors import InvalidSettings

_HOLD = """
import sys
from pathlib import Path
from exo_node.node.machine.data_dir_lock import DataDirLock
held = DataDirLock.acquire(Path(sys.argv[1]))
held.announce("127.0.0.1", 7001)
print("held", flush=True)
sys.stdin.read()
"""


def _hold(data_dir: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(data_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_running_node_is_found_until_it_closes(tmp_path: Path) -> None:
    data_dir = tmp_path / "new" / "data"
    assert find_running(data_dir) is None
    with DataDirLock.acquire(data_dir) as presence:
        assert find_running(data_dir) == Running(os.getpid())
        presence.announce("127.0.0.1", 7000)
        assert find_running(data_dir) == Running(os.getpid(), "127.0.0.1", 7000)
    assert find_running(data_dir) is None
    assert not (data_dir / "node.json").exists()
    presence.close()


def test_the_data_folder_and_its_files_are_the_owners_own(tmp_path: Path) -> None:
    with DataDirLock.acquire(tmp_path / "data"):
        assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "data" / "node.lock").stat().st_mode) == 0o600


def test_a_second_node_on_the_folder_names_the_first(tmp_path: Path) -> None:
    with DataDirLock.acquire(tmp_path):
        with pytest.raises(InvalidSettings, match=f"pid {os.getpid()}") as caught:
            DataDirLock.acquire(tmp_path)
        assert caught.value.param == "--data-dir"
        assert find_running(tmp_path) == Running(os.getpid()), "the first still holds it"
    DataDirLock.acquire(tmp_path).close()


def test_a_command_that_looks_at_the_lock_does_not_stop_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = os.open(tmp_path / "node.lock", os.O_RDONLY | os.O_CREAT, 0o600)
    fcntl.flock(looking, fcntl.LOCK_SH)

    def look_away(seconds: float) -> None:
        os.close(looking)

    monkeypatch.setattr("time.sleep", look_away)
    DataDirLock.acquire(tmp_path).close()


def test_another_process_is_seen_and_a_killed_one_is_not(tmp_path: Path) -> None:
    process = _hold(tmp_path)
    try:
        running = find_running(tmp_path)
        assert running is not None
        assert (running.pid, running.http_port) == (process.pid, 7001)
        with pytest.raises(InvalidSettings, match=f"pid {process.pid}"):
            DataDirLock.acquire(tmp_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (tmp_path / "node.json").exists(), "kill -9 leaves the run file"
    assert find_running(tmp_path) is None
    with DataDirLock.acquire(tmp_path):
        assert find_running(tmp_path) == Running(os.getpid()), "the old address is not believed"


def _record(pid: int) -> str:
    address = {"http_host": "127.0.0.1", "http_port": 7000}
    return json.dumps({"pid": pid, **address, "models_dirs": []})


def test_the_address_of_a_dead_node_with_this_pid_is_not_believed(tmp_path: Path) -> None:
    """In a container every start has the same pid."""
    (tmp_path / "node.json").write_text(_record(os.getpid()))
    with DataDirLock.acquire(tmp_path):
        assert find_running(tmp_path) == Running(os.getpid())


@pytest.mark.parametrize(
    "record",
    ["", "[]", "{}", '{"pid": 1}', _record(os.getpid() + 1)],
    ids=["empty", "list", "nothing", "pid 1", "another"],
)
def test_a_run_file_that_the_holder_did_not_write_gives_no_address(
    tmp_path: Path, record: str
) -> None:
    with DataDirLock.acquire(tmp_path):
        (tmp_path / "node.json").write_text(record)
        assert find_running(tmp_path) == Running(os.getpid())


def test_the_lock_is_not_handed_to_child_processes(tmp_path: Path) -> None:
    presence = DataDirLock.acquire(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        presence.close()
        assert find_running(tmp_path) is None
    finally:
        child.communicate(b"\n")


def test_a_folder_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSettings, match=r"--data-dir: .*cannot be used"):
        DataDirLock.acquire(tmp_path / "file" / "data")
    assert find_running(tmp_path / "file" / "data") is None


def test_a_disk_without_room_for_the_run_file_is_a_wrong_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with DataDirLock.acquire(tmp_path) as presence:
        monkeypatch.setattr("pathlib.Path.replace", full)
        with pytest.raises(InvalidSettings, match=r"--data-dir: .*: No space left on device"):
            presence.announce("127.0.0.1", 1)
