"""A node whose disk takes no term does not lead, reports why, and leads once it can store one."""

from pathlib import Path
from typing import Protocol

from disks import FilledDisk, small_disk
from nodes import Node, eventually, grpc_address, node, sees


class Trouble(Protocol):
    """A fault of a data folder that begins and ends."""

    def begin(self, folder: Path) -> None: ...

    def end(self, folder: Path) -> None: ...


class RemovedFolder:
    """The data folder is removed and returns."""

    def begin(self, folder: Path) -> None:
        _ = folder.rename(folder.with_suffix(".away"))

    def end(self, folder: Path) -> None:
        _ = folder.with_suffix(".away").rename(folder)


def readiness(running: Node) -> tuple[int, str]:
    reply = running.call("GET", "/health/ready")
    return reply.status, reply.body["reason"]


def check_that_it_leads_after(tmp_path: Path, folder: Path, trouble: Trouble) -> None:
    """Kills the head while the other node cannot store a term."""
    log = tmp_path / "second.log"
    with node(tmp_path / "first", "--no-mdns") as first:
        (folder / "cluster.key").write_bytes((tmp_path / "first" / "cluster.key").read_bytes())
        with node(
            folder, "--no-mdns", "--peer", grpc_address(first), log=log, sound=False
        ) as second:
            eventually(lambda: sees(first, 2) and sees(second, 2), 120)
            trouble.begin(folder)
            first.process.kill()
            eventually(lambda: "cannot be stored" in readiness(second)[1], 120)
            assert readiness(second)[0] == 503
            assert second.call("GET", "/health/live").status == 200
            assert "cannot be stored" in second.call("GET", "/v1/cluster").body["trouble"]
            trouble.end(folder)
            eventually(lambda: readiness(second)[0] == 200, 120)
            assert second.chat("Who are you?", max_tokens=4)["choices"]
            text = log.read_text()
            assert text.count("the head's term cannot be stored") == 1
            assert text.count("can be stored again") == 1
            assert "Traceback" not in text
            assert second.call("GET", "/v1/cluster").body["trouble"] is None


def test_a_node_leads_once_its_removed_data_folder_returns(tmp_path: Path) -> None:
    folder = tmp_path / "second"
    folder.mkdir()
    check_that_it_leads_after(tmp_path, folder, RemovedFolder())


def test_a_node_leads_once_its_full_disk_has_space(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    with small_disk(folder):
        check_that_it_leads_after(tmp_path, folder, FilledDisk())


def test_a_model_is_placed_and_answers_while_the_data_folders_disk_is_full(
    tmp_path: Path,
) -> None:
    folder, log = tmp_path / "small", tmp_path / "log"
    with small_disk(folder), node(folder, "--no-mdns", log=log, sound=False) as running:
        FilledDisk().begin(folder)
        placement = running.call("POST", "/v1/placements", {"model": "demo"})
        assert placement.status == 200, placement
        assert running.chat("Who are you?", max_tokens=4)["usage"]["completion_tokens"] == 4
        path = f"/v1/placements/{placement.body['id']}"
        assert running.call("DELETE", path).body["deleted"] is True
        text = log.read_text()
        assert "could not be saved: No space left on device" in text
        assert "Traceback" not in text
