"""A disk that takes no term: the node does not lead, says why, and leads once it does."""

import json
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path
from typing import Protocol

import kept_profiles
import pytest
from nodes import Node, eventually, node, start_process
from simulated import Disk
from test_cluster import grpc_address, sees

from exo_node.node.cluster.election import (
    MAX_TERM,
    Claimed,
    Election,
    Gone,
    HeadChanged,
    LeaderClaim,
    TermNotStored,
    TermRaised,
    TermStored,
    Tick,
)
from exo_node.node.cluster.term_file import TermFile
from exo_node.node.machine.timing import LAN
from exo_node.placement.errors import InvalidSettings
from exo_node.placement.ids import NodeId, Term

A, B = NodeId("a"), NodeId("b")


class FullDisk(Disk):
    """Takes nothing while it is full."""

    full = True
    tries = 0

    def save(self, term: Term) -> None:
        self.tries += 1
        if self.full:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        super().save(term)


def test_a_node_does_not_lead_under_a_term_that_is_not_stored() -> None:
    disk = FullDisk(7)
    election = Election(B, disk, 0.0, LAN.cluster, wait_s=0.0)
    told = election.apply(Tick(), (), 0.0)
    assert told == (TermNotStored("No space left on device"),)
    assert (election.head, election.term, election.claim(0.0)) == (
        None,
        7,
        LeaderClaim(Term(7), None),
    )
    assert election.apply(Tick(), (), 0.25) == ()  # tried again, told once
    assert disk.tries >= 2
    disk.full = False
    assert set(election.apply(Tick(), (), 0.5)) == {HeadChanged(B, Term(8), None), TermStored()}
    assert (election.head, disk.term, election.not_stored) == (B, 8, "")


def test_a_node_follows_a_head_whatever_its_own_disk_says() -> None:
    """The head has its term on its own disk; this node stores it as soon as it can."""
    disk = FullDisk(7)
    election = Election(B, disk, 0.0, LAN.cluster, wait_s=100.0)
    claim = Claimed(A, LeaderClaim(Term(20), A, followers=1))
    assert HeadChanged(A, Term(20), None) in election.apply(claim, (A,), 0.0)
    assert election.not_stored
    _ = election.apply(Gone(A), (), 1.0)
    _ = election.apply(Tick(), (), 200.0)
    assert (election.head, disk.term) == (None, 7)  # but it leads under no term above it
    disk.full = False
    told = election.apply(Tick(), (), 200.25)
    assert HeadChanged(B, Term(21), A) in told
    assert disk.term == 21


def test_a_head_that_cannot_rise_above_another_one_gives_way() -> None:
    """Two heads for as long as the disk is full would be worse."""
    disk = FullDisk(7)
    disk.full = False
    election = Election(B, disk, 0.0, LAN.cluster, wait_s=0.0)
    _ = election.apply(Tick(), (), 0.0)
    _ = election.apply(Claimed(NodeId("c"), LeaderClaim(Term(8), B)), (A, NodeId("c")), 1.0)
    disk.full = True
    other = Claimed(A, LeaderClaim(Term(30), A))
    assert HeadChanged(A, Term(30), B) in election.apply(other, (A,), 2.0)


def test_a_head_stays_though_its_disk_is_full() -> None:
    disk = FullDisk(7)
    disk.full = False
    election = Election(B, disk, 0.0, LAN.cluster, wait_s=0.0)
    _ = election.apply(Tick(), (), 0.0)
    disk.full = True
    assert election.apply(Tick(), (), 0.25) == ()
    assert election.head == B


def test_terms_end_without_ending_the_cluster() -> None:
    """A wrong term at the limit: both go on, and the higher id leads."""
    one, two = (Election(node, Disk(MAX_TERM), 0.0, LAN.cluster, wait_s=0.0) for node in (A, B))
    assert one.apply(Tick(), (), 0.0) == (HeadChanged(A, MAX_TERM, None),)
    assert two.apply(Tick(), (), 0.0) == (HeadChanged(B, MAX_TERM, None),)
    for now in (1.0, 2.0):
        _ = two.apply(Claimed(A, one.claim(now)), (A,), now)
        _ = one.apply(Claimed(B, two.claim(now)), (B,), now)
    assert (one.head, two.head, one.term) == (B, B, MAX_TERM)
    low = Election(A, Disk(), 0.0, LAN.cluster, wait_s=0.0)
    _ = low.apply(Tick(), (), 0.0)
    followed = Claimed(NodeId("c"), LeaderClaim(Term(1), A))
    assert low.apply(followed, (B,), 1.0) == ()
    assert TermRaised(MAX_TERM) not in low.apply(Claimed(B, LeaderClaim(MAX_TERM, B)), (B,), 1.0)
    assert low.head == B


@pytest.mark.parametrize("text", [str(MAX_TERM + 1), "9" * 5000, "-1", "x", "\x00"])
def test_a_term_file_that_holds_no_term_has_a_remedy(tmp_path: Path, text: str) -> None:
    _ = (tmp_path / "term").write_text(text)
    with pytest.raises(InvalidSettings, match="then remove the file"):
        _ = TermFile(tmp_path).load()
    _ = (tmp_path / "term").write_text(f"{MAX_TERM}\n")
    assert TermFile(tmp_path).load() == MAX_TERM


# ------------------------------------------------------------------------- real processes


class Trouble(Protocol):
    """Breaks a data folder, and mends it."""

    def begin(self, folder: Path) -> None: ...

    def end(self, folder: Path) -> None: ...


class Removed:
    """The data folder is gone, and comes back."""

    def begin(self, folder: Path) -> None:
        _ = folder.rename(folder.with_suffix(".away"))

    def end(self, folder: Path) -> None:
        _ = folder.with_suffix(".away").rename(folder)


class Full:
    """The data folder's own small disk is full."""

    def begin(self, folder: Path) -> None:
        with (folder / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError as fault:
                assert fault.errno == ENOSPC

    def end(self, folder: Path) -> None:
        (folder / "filler").unlink()


@contextmanager
def small_disk(folder: Path) -> Generator[None]:
    """Skips the test where this user may not mount one."""
    folder.mkdir(parents=True)
    mount = shutil.which("mount") or "mount"
    command = [mount, "-t", "tmpfs", "-o", "size=512k", "exo-test", str(folder)]
    try:
        made = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk with")
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        _ = subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


@contextmanager
def started(folder: Path, log: Path, *flags: str) -> Generator[Node]:
    """As `nodes.node`, with the log beside the data folder."""
    kept_profiles.seed(folder, source=False)
    process = start_process(folder, *flags, log=log)
    try:
        record = folder / "node.json"
        eventually(lambda: record.exists() or process.poll() is not None, 120)
        assert process.poll() is None, log.read_text()
        yield Node(process, folder, json.loads(record.read_text())["http_port"], log)
    finally:
        process.kill()
        _ = process.wait()


def readiness(running: Node) -> tuple[int, str]:
    reply = running.call("GET", "/health/ready")
    return reply.status, reply.body["reason"]


def survives(tmp_path: Path, folder: Path, trouble: Trouble) -> None:
    """The head dies while the other node's disk takes nothing."""
    log = tmp_path / "second.log"
    with node(tmp_path / "first", "--no-mdns") as first:
        (folder / "cluster.key").write_bytes((tmp_path / "first" / "cluster.key").read_bytes())
        with started(folder, log, "--no-mdns", "--peer", grpc_address(first)) as second:
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


def test_a_data_folder_that_is_gone_for_a_while(tmp_path: Path) -> None:
    folder = tmp_path / "second"
    folder.mkdir()
    survives(tmp_path, folder, Removed())


def test_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    with small_disk(folder):
        survives(tmp_path, folder, Full())
