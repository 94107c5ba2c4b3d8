"""The rules of joining without a network: which side asks, the rounds, the limits."""

import itertools
import random
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from joiners import party

from exo_node.node.join.handshake import (
    NONCE_BYTES,
    ROUNDS,
    Passkey,
    PeerIdentity,
    Role,
    Step,
    commitment,
    new_code,
    parse_code,
    relation,
    spaced,
    transcript,
)
from exo_node.node.join.requests import (
    BURST,
    BURST_OF_ONE,
    MAX_PENDING,
    REFILL_OF_ONE_S,
    REFILL_S,
    GuessLimit,
    PendingRequest,
    PendingRequests,
    largest_crowd,
)
from exo_node.node.rpc.control_server import PROTOCOL
from exo_node.placement.errors import DigitsDiffer, JoinRequestNotFound, Untrusted
from exo_node.placement.ids import NodeId

CODES = st.integers(0, 10**6 - 1).map(lambda number: str(number).zfill(6))


JOINER, APPROVER = party("b"), party("a", fresh=False)
SHARED = transcript(JOINER, APPROVER)


def side(role: Role, code: str, transcript_hash: bytes = SHARED) -> Passkey:
    return Passkey(role, transcript_hash, code, secrets.token_bytes)


Tamper = Callable[[int, Step, bytes], bytes]
"""Maps (round, the step that sent a message, the message) to the message that arrives."""


def run(
    joiner: Passkey, approver: Passkey, tamper: Tamper = lambda _n, _s, message: message
) -> None:
    """Runs all rounds in the order of a connection."""
    for number in range(ROUNDS):
        approver.receive(tamper(number, "commit", joiner.commit()))
        joiner.receive(tamper(number, "receive", approver.commit()))
        approver.check(tamper(number, "reveal", joiner.reveal()))
        joiner.check(tamper(number, "check", approver.reveal()))


# ---------------------------------------------------------------------------- the rounds


@settings(deadline=None)
@given(CODES)
def test_the_same_digits_prove_both_sides_to_each_other(code: str) -> None:
    joiner, approver = side("joiner", code), side("approver", code)
    run(joiner, approver)
    assert joiner.proven and approver.proven
    assert joiner.next is approver.next is None


@settings(deadline=None)
@given(CODES, CODES)
@example("000000", "524288")  # the last bit alone differs
def test_other_digits_never_do(code: str, other: str) -> None:
    joiner, approver = side("joiner", code), side("approver", other)
    if code == other:
        return
    with pytest.raises(DigitsDiffer):
        run(joiner, approver)
    assert not joiner.proven and not approver.proven
    first_bit_that_differs = (int(code) ^ int(other)).bit_length() and (
        (int(code) ^ int(other)) & -(int(code) ^ int(other))
    ).bit_length() - 1
    assert approver.round == first_bit_that_differs, "no further bit is revealed"


@settings(deadline=None)
@given(CODES, st.integers(0, ROUNDS - 1), st.sampled_from(["commit", "receive", "reveal", "check"]))
def test_one_tampered_message_of_any_round_ends_the_attempt(
    code: str, number: int, step: Step
) -> None:
    def tamper(at: int, sender: Step, message: bytes) -> bytes:
        is_target = (at, sender) == (number, step)
        return bytes([message[0] ^ 1]) + message[1:] if is_target else message

    joiner, approver = side("joiner", code), side("approver", code)
    with pytest.raises(DigitsDiffer):
        run(joiner, approver, tamper)
    assert not joiner.proven and not (joiner.proven and approver.proven)


@settings(deadline=None)
@given(CODES, st.integers(1, ROUNDS - 1))
def test_messages_of_an_earlier_round_are_no_use_in_a_later_one(code: str, number: int) -> None:
    """An attacker who has recorded a round replays it."""
    recorded: dict[tuple[int, Step], bytes] = {}

    def replay(at: int, sender: Step, message: bytes) -> bytes:
        recorded[at, sender] = message
        from_approver = sender in ("receive", "check")
        return recorded[at - 1, sender] if at >= number and from_approver else message

    joiner, approver = side("joiner", code), side("approver", code)
    with pytest.raises(DigitsDiffer):
        run(joiner, approver, replay)
    assert not joiner.proven


@settings(deadline=None)
@given(CODES)
def test_a_whole_attempt_cannot_be_replayed_on_another_connection(code: str) -> None:
    recorded: list[bytes] = []

    def record(_at: int, sender: Step, message: bytes) -> bytes:
        if sender in ("receive", "check"):
            recorded.append(message)
        return message

    run(side("joiner", code), side("approver", code), record)
    later = transcript(replace(JOINER, nonce=b"n" * 32), APPROVER)
    again = iter(recorded)
    joiner = side("joiner", code, later)
    with pytest.raises(DigitsDiffer):
        _ = joiner.commit()
        joiner.receive(next(again))
        _ = joiner.reveal()
        joiner.check(next(again))


@settings(deadline=None)
@given(CODES)
def test_a_sides_own_messages_sent_back_at_it_prove_nothing(code: str) -> None:
    """A reflection needs no digits; the role in the hash prevents it."""
    joiner = side("joiner", code)
    with pytest.raises(DigitsDiffer):
        while joiner.next is not None:
            joiner.receive(joiner.commit())
            joiner.check(joiner.reveal())
    assert not joiner.proven


@settings(deadline=None)
@given(CODES)
def test_the_same_digits_under_swapped_keys_prove_nothing(code: str) -> None:
    """An attacker between the two, who shows each of them keys of its own."""
    middle = party("c", fresh=False)
    joiner = side("joiner", code, transcript(JOINER, replace(APPROVER, **_keys_of(middle))))
    approver = side("approver", code, transcript(replace(JOINER, **_keys_of(middle)), APPROVER))
    with pytest.raises(DigitsDiffer):
        run(joiner, approver)
    assert joiner.round == approver.round == 0


def _keys_of(other: PeerIdentity) -> dict[str, Any]:
    return {"node": other.node, "public_key": other.public_key}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["joiner", "approver"]), st.integers(0, 78), st.data())
def test_a_step_out_of_turn_ends_the_attempt_for_good(role: Role, steps: int, data: Any) -> None:
    """Neither side opens its bit before the other has committed to one."""
    other: Role = "approver" if role == "joiner" else "joiner"
    one, two = side(role, "123456"), side(other, "123456")
    count = 0
    while count < steps:
        for each, partner in ((one, two), (two, one)):
            if each.next == "commit" and partner.next == "receive":
                partner.receive(each.commit())
            elif each.next == "reveal" and partner.next == "check":
                partner.check(each.reveal())
            else:
                continue
            count += 1
    due = one.next
    wrong = data.draw(
        st.sampled_from([s for s in ("commit", "receive", "reveal", "check") if s != due])
    )
    with pytest.raises(Untrusted):
        _ = _take(one, wrong)
    assert one.next is None and not one.proven
    with pytest.raises(Untrusted):
        _ = _take(one, due or "commit")


def _take(one: Passkey, step: Step) -> object:
    match step:
        case "commit":
            return one.commit()
        case "receive":
            return one.receive(bytes(32))
        case "reveal":
            return one.reveal()
        case "check":
            return one.check(bytes(NONCE_BYTES))


def test_an_attempt_that_stops_before_the_last_round_proves_nothing() -> None:
    joiner, approver = side("joiner", "000000"), side("approver", "000000")
    for number in range(ROUNDS - 1):
        assert not joiner.proven and joiner.round == number
        approver.receive(joiner.commit())
        joiner.receive(approver.commit())
        approver.check(joiner.reveal())
        joiner.check(approver.reveal())
    assert not joiner.proven and not approver.proven


def test_guesses_succeed_as_often_as_chance_predicts() -> None:
    """About one in 2^k of 2,000 guessed attempts passes k rounds."""
    chance = random.Random(1)
    passed = [0] * (ROUNDS + 1)
    for _ in range(2000):
        code = new_code(chance.randrange)
        joiner = side("joiner", code)
        guess = (int(code) + chance.randrange(1, 2**ROUNDS)) % 2**ROUNDS
        approver = side("approver", str(guess))
        with pytest.raises(DigitsDiffer):
            run(joiner, approver)
        for rounds in range(joiner.round + 1):
            passed[rounds] += 1
    assert passed[0] == 2000
    assert 850 < passed[1] < 1150 and 400 < passed[2] < 600 and 30 < passed[5] < 110


def test_a_commitment_is_of_32_bytes_and_a_nonce_too() -> None:
    joiner = side("joiner", "123456")
    _ = joiner.commit()
    with pytest.raises(Untrusted, match="no commitment"):
        joiner.receive(b"")
    joiner = side("joiner", "123456")
    _ = joiner.commit()
    joiner.receive(commitment("approver", SHARED, 0, b"", 0))
    _ = joiner.reveal()
    with pytest.raises(DigitsDiffer):
        joiner.check(b"")


def test_the_transcript_depends_on_every_field_of_either_side() -> None:
    variants = [
        {"node": NodeId("c" * 20)},
        {"public_key": b"other"},
        {"cluster": "c" * 16},
        {"name": "other"},
        {"chip": "other"},
        {"version": "9"},
        {"protocol": PROTOCOL + 1},
        {"address": "10.0.0.2:52416"},
        {"fresh": True},
        {"nonce": b"other"},
    ]
    one, two = party("b", fresh=False), party("a", fresh=False)
    pairs = [
        (one, two),
        (two, one),
        *((replace(one, **changed), two) for changed in variants),
        *((one, replace(two, **changed)) for changed in variants),
        (replace(one, name="bc", chip="hip"), two),
        (replace(one, name="b", chip="chip"), replace(two, name="x")),
    ]
    assert len({transcript(*each) for each in pairs}) == len(pairs)


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


@settings(deadline=None)
@given(CODES)
def test_digits_are_read_as_they_are_shown(code: str) -> None:
    assert parse_code(spaced(code)) == code


# ------------------------------------------------------------------------ which side asks


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (party("a"), party("b"), "both"),
        (party("b"), party("a", fresh=False), "ask"),
        (party("a", fresh=False), party("b"), "asked"),
        (party("a", fresh=False), party("b", fresh=False), "apart"),
        (party("a", cluster="f" * 16), party("b", cluster="f" * 16), "same"),
        (party("a", fresh=False, cluster="f" * 16), party("b", cluster="f" * 16), "same"),
    ],
)
def test_who_asks_whom(own: PeerIdentity, other: PeerIdentity, expected: str) -> None:
    assert relation(own, other) == expected


def test_both_sides_always_come_to_the_opposite_result() -> None:
    nodes = [party(letter, fresh=fresh) for letter in "abc" for fresh in (True, False)]
    opposite = {"ask": "asked", "asked": "ask", "apart": "apart", "same": "same", "both": "both"}
    for one, two in itertools.permutations(nodes, 2):
        if one.node != two.node:
            assert relation(one, two) == opposite[relation(two, one)]


# ------------------------------------------------------------------------------ the limits


def request(number: int, address: str) -> PendingRequest:
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    node = letters[number // 32] + letters[number % 32] * 19
    return PendingRequest(str(number), replace(party("b"), node=NodeId(node)), address)


def test_a_node_has_one_request_and_a_decided_one_is_gone() -> None:
    requests = PendingRequests()
    assert requests.add(request(1, "10.0.0.2")) == []
    again = replace(request(1, "10.0.0.2"), id="again")
    assert requests.add(again) == ["1"]
    assert requests.pending() == [again] and requests.get("again") == again
    requests.remove("again")
    with pytest.raises(JoinRequestNotFound):
        _ = requests.get("again")


def test_a_crowd_from_one_address_keeps_no_other_address_out() -> None:
    requests = PendingRequests()
    honest = request(0, "10.0.0.7")
    assert requests.add(honest) == []
    for number in range(1, 200):
        _ = requests.add(request(number, "10.0.0.66"))
    assert len(requests.pending()) == MAX_PENDING and honest in requests.pending()
    late = request(201, "10.0.0.8")
    [evicted_id] = requests.add(late)
    assert (
        requests.pending()[-1] == late and honest in requests.pending() and evicted_id != honest.id
    )


def test_a_crowd_from_many_addresses_evicts_no_node_that_waits_already() -> None:
    """With one or two from each address, the newest is evicted, even where it is the latest."""
    for each in (1, 2):
        requests = PendingRequests()
        honest = request(0, "10.0.0.7")
        assert requests.add(honest) == []
        for number in range(1, 900):
            _ = requests.add(request(number, f"10.0.1.{number // each}"))
            assert honest in requests.pending()
        assert len(requests.pending()) == MAX_PENDING


def test_a_crowd_has_the_entries_of_the_addresses_with_the_most() -> None:
    assert largest_crowd(["a", "b", "b", "c"]) == [1, 2]
    assert largest_crowd(["a", "b", "c"]) == [0, 1, 2]
    assert largest_crowd(["a", "b", "a", "b", "c"]) == [0, 1, 2, 3]


def test_attempts_come_back_one_by_one_and_one_address_has_not_all_of_them() -> None:
    attempts, now = GuessLimit(), 1000.0
    began = [attempts.wait_s("10.0.0.66", now) for _ in range(BURST)]
    assert began.count(0.0) == BURST_OF_ONE
    assert began[-1] == pytest.approx(REFILL_OF_ONE_S)
    assert attempts.wait_s("10.0.0.7", now) == 0.0, "others are not kept out"
    crowd = [attempts.wait_s(f"10.0.1.{n}", now) for n in range(BURST)]
    assert crowd.count(0.0) == BURST - BURST_OF_ONE - 1
    assert attempts.wait_s("10.0.0.8", now) == pytest.approx(REFILL_S)
    assert attempts.wait_s("10.0.0.8", now + REFILL_S) == 0.0


def test_attempts_in_an_hour_are_bounded_whatever_is_tried() -> None:
    attempts = GuessLimit()
    began = sum(attempts.wait_s(f"10.0.{n % 9}.{n % 250}", n * 0.1) == 0.0 for n in range(36_000))
    assert began <= BURST + 3600 / REFILL_S + 1
