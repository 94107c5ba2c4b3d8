"""The proof of the same --open NAME, which reveals nothing to try names on later."""

import random
import secrets

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_node.node.join.open_proof import PRIME, SECRET_BYTES, SHARE_BYTES, NameProof
from exo_node.placement.errors import DigitsDiffer, Untrusted

NAMES = st.text(min_size=1, max_size=20)


def sides(
    one: str, two: str, transcript: bytes = b"t", other: bytes = b"t"
) -> tuple[NameProof, NameProof]:
    return (
        NameProof("joiner", transcript, one, secrets.token_bytes(SECRET_BYTES)),
        NameProof("approver", other, two, secrets.token_bytes(SECRET_BYTES)),
    )


def exchange(joiner: NameProof, approver: NameProof) -> None:
    approver.receive(joiner.share)
    joiner.receive(approver.share)


@settings(max_examples=20, deadline=None)
@given(NAMES)
def test_the_same_name_proves_both_sides(name: str) -> None:
    joiner, approver = sides(name, name)
    exchange(joiner, approver)
    approver.check(joiner.proof())
    joiner.check(approver.proof())


@settings(max_examples=20, deadline=None)
@given(NAMES, NAMES)
def test_another_name_does_not(name: str, other: str) -> None:
    joiner, approver = sides(name, other)
    if name == other:
        return
    exchange(joiner, approver)
    with pytest.raises(DigitsDiffer):
        approver.check(joiner.proof())
    with pytest.raises(DigitsDiffer):
        joiner.check(approver.proof())


def test_a_proof_is_for_one_role_and_one_connection() -> None:
    joiner, approver = sides("lab", "lab")
    exchange(joiner, approver)
    with pytest.raises(DigitsDiffer):
        approver.check(approver.proof())
    joiner, approver = sides("lab", "lab", b"one", b"two")
    exchange(joiner, approver)
    with pytest.raises(DigitsDiffer):
        approver.check(joiner.proof())


@pytest.mark.parametrize("number", [0, 1, PRIME - 1, PRIME, PRIME + 1])
def test_a_share_whose_powers_are_known_is_refused(number: int) -> None:
    joiner, _ = sides("lab", "lab")
    with pytest.raises(Untrusted):
        joiner.receive(number.to_bytes(SHARE_BYTES + 1, "big")[-SHARE_BYTES:])


def test_a_sides_own_share_is_refused_and_so_is_a_short_one() -> None:
    joiner, _ = sides("lab", "lab")
    for share in (joiner.share, b"", b"\2"):
        with pytest.raises(Untrusted):
            joiner.receive(share)
    with pytest.raises(Untrusted, match="out of turn"):
        _ = joiner.proof()


def test_a_share_does_not_reveal_which_of_two_names_it_is() -> None:
    """Every share is a square, whatever the name: a member of the same group of prime order."""
    for name in ("lab", "other", "", "x" * 500):
        share = int.from_bytes(sides(name, name)[0].share, "big")
        assert pow(share, (PRIME - 1) // 2, PRIME) == 1


def test_the_group_is_that_of_a_safe_prime() -> None:
    assert PRIME.bit_length() == 2048
    draws = random.Random(7)
    for number in (PRIME, (PRIME - 1) // 2):
        assert all(pow(draws.randrange(2, number), number - 1, number) == 1 for _ in range(8))
