"""The rules of joining without any network: digits, commitments, who asks whom, what is refused."""

import itertools
import random
from dataclasses import replace

import pytest

from exo_node.node.join import (
    Handshake,
    Party,
    code_of,
    commitment,
    is_open_proof,
    open_proof,
    parse_code,
    relation,
    spaced,
    transcript,
)
from exo_node.node.join_requests import (
    MAX_PENDING,
    MAX_PENDING_PER_ADDRESS,
    PENDING_S,
    TRIES,
    TRIES_PER_ADDRESS,
    Desk,
)
from exo_node.placement.errors import JoinRequestNotFound, Untrusted
from exo_node.placement.ids import NodeId


def party(letter: str, *, fresh: bool = True, cluster: str = "", open: bool = False) -> Party:
    """A node whose id, key, name and (unless given) cluster follow from a letter a-f."""
    return Party(
        node=NodeId(letter * 20),
        public_key=letter.encode() * 91,
        cluster=cluster or letter * 16,
        name=letter,
        chip="chip",
        version="0.1.0",
        protocol=1,
        address="10.0.0.1:52416",
        fresh=fresh,
        open=open,
    )


def nonce(seed: int) -> bytes:
    return random.Random(seed).randbytes(32)


def shake(joiner: Handshake, approver: Handshake) -> None:
    """An honest attempt, in the order of the protocol."""
    approver.meet(joiner.own, joiner.commitment)
    joiner.meet(approver.own, approver.commitment)
    approver.check(joiner.reveal())
    joiner.check(approver.reveal())


# ---------------------------------------------------------------------------- the digits


def test_both_sides_show_the_same_six_digits() -> None:
    joiner = Handshake("joiner", party("b"), nonce(1))
    approver = Handshake("approver", party("a"), nonce(2))
    shake(joiner, approver)
    assert joiner.code == approver.code
    assert parse_code(spaced(joiner.code)) == joiner.code
    assert len(joiner.code) == 6


def test_the_digits_depend_on_everything_that_either_side_said() -> None:
    one, two = party("b"), party("a")
    variants = [
        {"node": NodeId("c" * 20)},
        {"public_key": b"other"},
        {"cluster": "c" * 16},
        {"name": "other"},
        {"chip": "other"},
        {"version": "9"},
        {"protocol": 2},
        {"address": "10.0.0.2:52416"},
        {"fresh": False},
        {"open": True},
    ]
    said = [
        (one, two, nonce(1), nonce(2)),
        (two, one, nonce(1), nonce(2)),
        (one, two, nonce(2), nonce(1)),
        (one, two, nonce(1), nonce(3)),
        *((replace(one, **changed), two, nonce(1), nonce(2)) for changed in variants),
        *((one, replace(two, **changed), nonce(1), nonce(2)) for changed in variants),
    ]
    assert len({transcript(*each) for each in said}) == len(said)


def test_no_two_lists_of_fields_have_the_same_transcript() -> None:
    one, two = party("b"), party("a")
    moved = replace(one, name="bc", chip="hip")
    assert transcript(replace(one, chip="chip", name="b"), two, b"", b"") != transcript(
        moved, two, b"", b""
    )


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("123456", "123456"),
        ("123 456", "123456"),
        ("123-456", "123456"),
        ("000000", "000000"),
        ("12345", None),
        ("1234567", None),
        ("12345a", None),
        ("१२३४५६", None),
        ("", None),
    ],
)
def test_digits_are_read_as_a_person_types_them(text: str, code: str | None) -> None:
    assert parse_code(text) == code


# ------------------------------------------------------------------------ the commitment


def test_a_nonce_that_was_searched_for_after_the_commitment_is_refused() -> None:
    """Whoever is in the middle knows all of one screen's digits before its own nonce is due, and
    finds one that makes the other screen agree (here in three of six digits): only the
    commitment stops it."""
    attacker, approver = party("c"), Handshake("approver", party("a"), nonce(2))
    shown_to_the_joiner = "042137"
    approver.meet(attacker, commitment("joiner", attacker.public_key, nonce(3)))
    # It cannot learn the approver's nonce before it reveals its own; suppose that it did.
    theirs = nonce(2)
    searched = (number.to_bytes(32, "big") for number in itertools.count())
    matching = next(
        guess
        for guess in searched
        if code_of(transcript(attacker, approver.own, guess, theirs))[:3] == shown_to_the_joiner[:3]
    )
    with pytest.raises(Untrusted, match="committed"):
        approver.check(matching)
    approver.check(nonce(3))
    assert approver.code == code_of(transcript(attacker, approver.own, nonce(3), theirs))


def test_no_side_reveals_its_nonce_before_the_other_has_committed() -> None:
    with pytest.raises(Untrusted, match="before it has fixed"):
        _ = Handshake("joiner", party("b"), nonce(1)).reveal()
    approver = Handshake("approver", party("a"), nonce(2))
    approver.meet(party("b"), commitment("joiner", party("b").public_key, nonce(1)))
    with pytest.raises(Untrusted, match="before it has fixed"):
        _ = approver.reveal()


def test_anothers_commitment_is_no_use_under_another_key_or_role() -> None:
    honest = Handshake("joiner", party("b"), nonce(1))
    approver = Handshake("approver", party("a"), nonce(2))
    approver.meet(party("c"), honest.commitment)
    with pytest.raises(Untrusted):
        approver.check(nonce(1))
    echoed = Handshake("joiner", party("b"), nonce(1))
    echoed.meet(party("b"), echoed.commitment)
    with pytest.raises(Untrusted):
        echoed.check(nonce(1))


def test_an_attempt_has_one_hello_and_one_nonce() -> None:
    joiner, approver = (
        Handshake("joiner", party("b"), nonce(1)),
        Handshake("approver", party("a"), nonce(2)),
    )
    with pytest.raises(Untrusted):
        _ = joiner.transcript
    shake(joiner, approver)
    with pytest.raises(Untrusted, match="twice"):
        approver.meet(party("c"), commitment("joiner", party("c").public_key, nonce(3)))
    with pytest.raises(Untrusted, match="out of turn"):
        approver.check(nonce(1))
    with pytest.raises(Untrusted, match="no commitment"):
        Handshake("joiner", party("b"), nonce(1)).meet(party("a"), b"")


def test_the_proof_of_an_open_name_is_good_for_one_transcript() -> None:
    proof = open_proof("lab", b"transcript")
    assert is_open_proof(proof, "lab", b"transcript")
    assert not is_open_proof(proof, "lab", b"another")
    assert not is_open_proof(proof, "other", b"transcript")
    assert not is_open_proof(b"", "lab", b"transcript")
    assert b"lab" not in proof


# --------------------------------------------------------------------------- who asks whom


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (party("a"), party("b"), "asked"),
        (party("b"), party("a"), "ask"),
        (party("a"), party("b", fresh=False), "ask"),
        (party("a", fresh=False), party("b"), "asked"),
        (party("a", fresh=False), party("b", fresh=False), "apart"),
        (party("a", fresh=False, open=True), party("b", fresh=False), "apart"),
        (party("b", fresh=False, open=True), party("a", fresh=False, open=True), "ask"),
        (party("a", cluster="f" * 16), party("b", cluster="f" * 16), "same"),
        (party("a", fresh=False, cluster="f" * 16), party("b", cluster="f" * 16), "same"),
    ],
)
def test_who_asks_whom(own: Party, other: Party, expected: str) -> None:
    assert relation(own, other) == expected


def test_both_sides_always_come_to_the_opposite_result() -> None:
    nodes = [
        party(letter, fresh=fresh, open=open)
        for letter in "abc"
        for fresh in (True, False)
        for open in (True, False)
    ]
    opposite = {"ask": "asked", "asked": "ask", "apart": "apart", "same": "same"}
    for one, two in itertools.permutations(nodes, 2):
        if one.node != two.node:
            assert relation(one, two) == opposite[relation(two, one)]


# ------------------------------------------------------------------------------ requests


def test_the_right_digits_approve_a_request_once() -> None:
    desk = Desk()
    _ = desk.add("1", party("b"), "10.0.0.2", "123456", 0.0)
    assert [request.id for request in desk.pending(1.0)] == ["1"]
    assert desk.approve("1", "123456", 1.0) == "approved"
    with pytest.raises(JoinRequestNotFound):
        _ = desk.approve("1", "123456", 1.0)


def test_wrong_digits_end_the_request() -> None:
    desk = Desk()
    _ = desk.add("1", party("b"), "10.0.0.2", "123456", 0.0)
    assert desk.approve("1", "123457", 1.0) == "wrong_code"
    with pytest.raises(JoinRequestNotFound):
        _ = desk.approve("1", "123456", 1.0)


def test_a_request_expires_after_ten_minutes() -> None:
    desk = Desk()
    _ = desk.add("1", party("b"), "10.0.0.2", "123456", 5.0)
    assert desk.pending(5.0 + PENDING_S - 0.1)
    assert not desk.pending(5.0 + PENDING_S)
    with pytest.raises(JoinRequestNotFound):
        _ = desk.approve("1", "123456", 5.0 + PENDING_S)


def test_a_node_has_one_request_and_a_denied_one_is_gone() -> None:
    desk = Desk()
    _ = desk.add("1", party("b"), "10.0.0.2", "123456", 0.0)
    _ = desk.add("2", party("b"), "10.0.0.2", "654321", 1.0)
    assert [request.code for request in desk.pending(1.0)] == ["654321"]
    assert desk.deny("2", 1.0) == "denied"
    assert not desk.pending(1.0)


def test_waiting_requests_are_bounded_in_all_and_for_each_address() -> None:
    desk, letters = Desk(), "abcdefghijklmnopqrstuvwxyz234567"[:MAX_PENDING]
    for number, letter in enumerate(letters[:MAX_PENDING_PER_ADDRESS]):
        assert desk.admits("10.0.0.1", 0.0)
        _ = desk.add(str(number), party(letter), "10.0.0.1", "000000", 0.0)
    assert not desk.admits("10.0.0.1", 0.0)
    for number, letter in enumerate(letters[MAX_PENDING_PER_ADDRESS:], MAX_PENDING_PER_ADDRESS):
        assert desk.admits(f"10.0.1.{number}", 0.0)
        _ = desk.add(str(number), party(letter), f"10.0.1.{number}", "000000", 0.0)
    assert len(desk.pending(0.0)) == MAX_PENDING
    assert not desk.admits("10.0.2.1", 0.0)


def test_attempts_are_bounded_in_time_whether_or_not_they_wait() -> None:
    desk = Desk()
    assert [desk.admits("10.0.0.1", 0.0) for _ in range(TRIES_PER_ADDRESS + 1)].count(True) == (
        TRIES_PER_ADDRESS
    )
    others = [desk.admits(f"10.1.0.{n}", 1.0) for n in range(TRIES)]
    assert others.count(True) == TRIES - TRIES_PER_ADDRESS
    assert not desk.admits("10.0.0.1", PENDING_S - 1)
    assert desk.admits("10.0.0.1", PENDING_S + 1)
