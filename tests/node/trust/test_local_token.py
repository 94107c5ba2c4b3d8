"""The token of the data folder: its mode, the secrets it accepts, and tickets for browsers."""

import os
import secrets
from pathlib import Path

import pytest

from exo_node.node.trust.local_token import TICKET_S, TOKEN_FILE, LocalToken, read_token
from exo_node.placement.errors import InvalidRequest, InvalidSettings

needs_another_user = pytest.mark.skipif(os.geteuid() == 0, reason="root reads everybody's files")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_first_start_makes_a_token_that_only_its_owner_reads(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        token = LocalToken.load(tmp_path / "new" / "folder")
    finally:
        _ = os.umask(old)
    path = tmp_path / "new" / "folder" / TOKEN_FILE
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert [each.name for each in path.parent.iterdir()] == [TOKEN_FILE]
    assert token.text == read_token(path.parent)
    assert len(bytes.fromhex(token.text)) == 32


def test_later_starts_keep_it_and_close_it_to_others(tmp_path: Path) -> None:
    first = LocalToken.load(tmp_path)
    (tmp_path / TOKEN_FILE).chmod(0o644)
    assert LocalToken.load(tmp_path).text == first.text
    assert mode(tmp_path / TOKEN_FILE) == 0o600
    assert LocalToken.load(tmp_path / "other").text != first.text


DAMAGED = {
    "empty": b"",
    "half": b"ab" * 16 + b"\n",
    "longer": b"ab" * 40,
    "no ASCII": "ä".encode() * 32,
    "no digits": b"xy" * 32,
    "two lines": b"ab" * 16 + b"\n" + b"ab" * 15 + b"a",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_token_ends_the_start_with_the_remedy(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / TOKEN_FILE
    _ = path.write_bytes(content)
    with pytest.raises(InvalidSettings, match="is damaged; remove it") as caught:
        _ = LocalToken.load(tmp_path)
    assert caught.value.param == str(path)
    assert path.read_bytes() == content, "a person may want to see it"
    assert read_token(tmp_path) is None, "in a command it would be no valid header line"


def test_a_token_that_is_no_file_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / TOKEN_FILE).mkdir()
    with pytest.raises(InvalidSettings, match=r"cannot be used: .*; check who owns"):
        _ = LocalToken.load(tmp_path)
    assert read_token(tmp_path) is None


@needs_another_user
def test_a_token_of_another_user_is_none_to_a_command(tmp_path: Path) -> None:
    _ = LocalToken.load(tmp_path)
    (tmp_path / TOKEN_FILE).chmod(0)
    assert read_token(tmp_path) is None


def test_where_no_node_ever_ran_there_is_no_token(tmp_path: Path) -> None:
    assert read_token(tmp_path) is None
    assert read_token(tmp_path / "missing") is None
    assert not (tmp_path / "missing").exists(), "a command makes nothing"


def test_only_the_token_and_its_session_are_accepted(tmp_path: Path) -> None:
    token = LocalToken.load(tmp_path)
    ticket = token.ticket()
    session = token.redeem(ticket)
    right = token.text.encode()
    for candidates in ([right], [b"wrong", right], [session.encode()]):
        assert token.accepts(candidates)
    others = (b"", right[:-1], right + b"0", right.upper(), ticket.encode(), b"\xff" * 64)
    for wrong in others:
        assert not token.accepts([wrong]), wrong
    assert not token.accepts([])
    assert not LocalToken(secrets.token_hex(32)).accepts([right, session.encode()])
    assert LocalToken(token.text).accepts([session.encode()]), "a page outlives a restart"


def test_a_ticket_serves_once_and_for_a_while() -> None:
    now = [0.0]
    token = LocalToken(secrets.token_hex(32), lambda: now[0])
    once, late, valid = token.ticket(), token.ticket(), token.ticket()
    _ = token.redeem(once)
    now[0] = TICKET_S - 1
    _ = token.redeem(valid)
    now[0] = TICKET_S
    for invalid in (once, late, valid, "unknown", ""):
        with pytest.raises(InvalidRequest, match="`exo-node dashboard` prints another"):
            _ = token.redeem(invalid)


def test_tickets_are_bounded_and_the_oldest_goes_first() -> None:
    token = LocalToken(secrets.token_hex(32))
    tickets = [token.ticket() for _ in range(20)]
    assert len(set(tickets)) == 20
    with pytest.raises(InvalidRequest):
        _ = token.redeem(tickets[0])
    assert {token.redeem(each) for each in tickets[-8:]} != {""}
