"""Elections and the file that stores the term, on disks that take no term."""

import os
from errno import ENOSPC
from pathlib import Path

import pytest
from simulated import Disk

from exo_node.node.cluster.election import (
    MAX_TERM,
    Election,
    HeadChanged,
    LeaderClaim,
    TermNotStored,
    TermRaised,
    TermStored,
)
from exo_node.node.cluster.term_file import TermFile
from exo_node.node.machine.timing import LAN
from exo_node.placement.errors import InvalidSettings
from exo_node.placement.ids import NodeId, Term

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


class FullDisk(Disk):
    """A disk that raises ENOSPC while it is full."""

    full = True
    tries = 0

    def save(self, term: Term) -> None:
        self.tries += 1
        if self.full:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        super().save(term)


def test_a_node_does_not_lead_under_a_term_that_is_not_stored() -> None:
    disk = FullDisk(7)
    election = Election(B, disk, 0.0, LAN, wait_s=0.0)
    changes = election.tick((), 0.0)
    assert changes == (TermNotStored("No space left on device"),)
    assert (election.head, election.term, election.claim(0.0)) == (
        None,
        7,
        LeaderClaim(Term(7), None),
    )
    assert election.tick((), 0.25) == ()  # it tries again and reports once
    assert disk.tries >= 2
    disk.full = False
    assert set(election.tick((), 0.5)) == {HeadChanged(B, Term(8), None), TermStored()}
    assert (election.head, disk.term, election.not_stored) == (B, 8, "")


def test_a_node_follows_a_head_although_its_own_disk_is_full() -> None:
    """The head has its term on its own disk; this node stores it as soon as it can."""
    disk = FullDisk(7)
    election = Election(B, disk, 0.0, LAN, wait_s=100.0)
    claim = LeaderClaim(Term(20), A, followers=1)
    assert HeadChanged(A, Term(20), None) in election.record_claim(A, claim, (A,), 0.0)
    assert election.not_stored
    _ = election.remove(A, (), 1.0)
    _ = election.tick((), 200.0)
    assert (election.head, disk.term) == (None, 7)  # but it leads under no higher term
    disk.full = False
    changes = election.tick((), 200.25)
    assert HeadChanged(B, Term(21), A) in changes
    assert disk.term == 21


def test_a_head_that_cannot_store_a_higher_term_follows_the_other_head() -> None:
    """Two heads for as long as the disk is full would be worse."""
    disk = FullDisk(7)
    disk.full = False
    election = Election(B, disk, 0.0, LAN, wait_s=0.0)
    _ = election.tick((), 0.0)
    _ = election.record_claim(C, LeaderClaim(Term(8), B), (A, C), 1.0)
    disk.full = True
    other = LeaderClaim(Term(30), A)
    assert HeadChanged(A, Term(30), B) in election.record_claim(A, other, (A,), 2.0)


def test_a_head_keeps_leading_on_a_full_disk() -> None:
    disk = FullDisk(7)
    disk.full = False
    election = Election(B, disk, 0.0, LAN, wait_s=0.0)
    _ = election.tick((), 0.0)
    disk.full = True
    assert election.tick((), 0.25) == ()
    assert election.head == B


def test_at_the_highest_term_the_higher_id_leads() -> None:
    """A wrong term at the limit ends no cluster: both nodes continue."""
    one, two = (Election(node, Disk(MAX_TERM), 0.0, LAN, wait_s=0.0) for node in (A, B))
    assert one.tick((), 0.0) == (HeadChanged(A, MAX_TERM, None),)
    assert two.tick((), 0.0) == (HeadChanged(B, MAX_TERM, None),)
    for now in (1.0, 2.0):
        _ = two.record_claim(A, one.claim(now), (A,), now)
        _ = one.record_claim(B, two.claim(now), (B,), now)
    assert (one.head, two.head, one.term) == (B, B, MAX_TERM)
    low = Election(A, Disk(), 0.0, LAN, wait_s=0.0)
    _ = low.tick((), 0.0)
    assert low.record_claim(C, LeaderClaim(Term(1), A), (B,), 1.0) == ()
    highest = LeaderClaim(MAX_TERM, B)
    assert TermRaised(MAX_TERM) not in low.record_claim(B, highest, (B,), 1.0)
    assert low.head == B


@pytest.mark.parametrize("text", [str(MAX_TERM + 1), "9" * 5000, "-1", "x", "\x00"])
def test_a_term_file_without_a_valid_term_has_a_remedy(tmp_path: Path, text: str) -> None:
    _ = (tmp_path / "term").write_text(text)
    with pytest.raises(InvalidSettings, match="then remove the file"):
        _ = TermFile(tmp_path).load()
    _ = (tmp_path / "term").write_text(f"{MAX_TERM}\n")
    assert TermFile(tmp_path).load() == MAX_TERM
