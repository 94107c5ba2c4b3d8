"""That two nodes have the same --open NAME, and that nothing of it can be searched for later."""

import random
import secrets

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_node.node.join.open_proof import PRIME, SECRET_BYTES, SHARE_BYTES, SameName
from exo_node.placement.errors import DigitsDiffer, Untrusted

NAMES = st.text(min_size=1, max_size=20)


def sides(one: str, two: str, seen: bytes = b"t", other: bytes = b"t") -> tuple[SameName, SameName]:
    return (
        SameName("joiner", seen, one, secrets.token_bytes(SECRET_BYTES)),
        SameName("approver", other, two, secrets.token_bytes(SECRET_BYTES)),
    )


def meet(joiner: SameName, approver: SameName) -> None:
    approver.meet(joiner.share)
    joiner.meet(approver.share)


@settings(max_examples=20, deadline=None)
@given(NAMES)
def test_the_same_name_proves_both_sides(name: str) -> None:
    joiner, approver = sides(name, name)
    meet(joiner, approver)
    approver.check(joiner.proof())
    joiner.check(approver.proof())


@settings(max_examples=20, deadline=None)
@given(NAMES, NAMES)
def test_another_name_does_not(name: str, other: str) -> None:
    joiner, approver = sides(name, other)
    if name == other:
        return
    meet(joiner, approver)
    with pytest.raises(DigitsDiffer):
        approver.check(joiner.proof())
    with pytest.raises(DigitsDiffer):
        joiner.check(approver.proof())


def test_a_proof_is_for_one_role_and_one_connection() -> None:
    joiner, approver = sides("lab", "lab")
    meet(joiner, approver)
    with pytest.raises(DigitsDiffer):
        approver.check(approver.proof())
    joiner, approver = sides("lab", "lab", b"one", b"two")
    meet(joiner, approver)
    with pytest.raises(DigitsDiffer):
        approver.check(joiner.proof())


@pytest.mark.parametrize("number", [0, 1, PRIME - 1, PRIME, PRIME + 1])
def test_a_share_whose_powers_are_known_is_refused(number: int) -> None:
    joiner, _ = sides("lab", "lab")
    with pytest.raises(Untrusted):
        joiner.meet(number.to_bytes(SHARE_BYTES + 1, "big")[-SHARE_BYTES:])


def test_a_sides_own_share_is_refused_and_so_is_a_short_one() -> None:
    joiner, _ = sides("lab", "lab")
    for share in (joiner.share, b"", b"\2"):
        with pytest.raises(Untrusted):
            joiner.meet(share)
    with pytest.raises(Untrusted, match="out of turn"):
        _ = joiner.proof()


def test_what_is_sent_does_not_tell_which_of_two_names_it_is() -> None:
    """Every share is a square, whatever the name: a member of the same group of prime order."""
    for name in ("lab", "other", "", "x" * 500):
        share = int.from_bytes(sides(name, name)[0].share, "big")
        assert pow(share, (PRIME - 1) // 2, PRIME) == 1


def test_the_group_is_that_of_a_safe_prime() -> None:
    assert PRIME.bit_length() == 2048
    draws = random.Random(7)
    for number in (PRIME, (PRIME - 1) // 2):
        assert all(pow(draws.randrange(2, number), number - 1, number) == 1 for _ in range(8))
