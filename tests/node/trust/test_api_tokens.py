"""API tokens: on disk as digests, changed by commands, read again by a node that runs."""

import asyncio
import json
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from exo_node.node.machine import private_files
from exo_node.node.trust import api_tokens
from exo_node.node.trust.api_tokens import ApiTokens
from exo_node.node.trust.token_file import (
    TOKENS_FILE,
    USES_FILE,
    create_token,
    has_token,
    read_tokens,
    read_uses,
    revoke_token,
    write_uses,
)
from exo_node.placement.errors import ExoNodeError, InvalidRequest, InvalidSettings


def names(folder: Path) -> list[str]:
    return [each.name for each in read_tokens(folder) or ()]


def accepts(tokens: ApiTokens, *texts: str) -> bool:
    result = fresh(tokens).accepts(each.encode() for each in texts)
    for thread in threading.enumerate():
        if thread.name == USES_FILE:  # its last use is written beside the loop
            thread.join()
    return result


def fresh(tokens: ApiTokens) -> ApiTokens:
    """The tokens after the refresh that each request causes."""
    asyncio.run(tokens.refresh())
    return tokens


def test_a_token_is_random_and_only_its_digest_is_on_disk(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        created = [create_token(tmp_path / "new", name) for name in ("laptop", "phone")]
    finally:
        _ = os.umask(old)
    folder = tmp_path / "new"
    assert len(set(created)) == 2
    assert {len(each) for each in created} == {len("exo-") + 43}, "256 bits in base64"
    assert names(folder) == ["laptop", "phone"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert not any(each[4:].encode() in path.read_bytes() for each in created), path


def test_what_is_wrong_with_the_file_is_told_until_it_is_put_right(tmp_path: Path) -> None:
    tokens = ApiTokens(tmp_path)
    assert fresh(tokens).trouble == ""
    token = create_token(tmp_path, "laptop")
    assert fresh(tokens).trouble == ""
    path = tmp_path / TOKENS_FILE
    whole = path.read_bytes()
    _ = path.write_bytes(whole[:-3])
    assert f"{path} cannot be used: it is damaged" in fresh(tokens).trouble
    assert not accepts(tokens, token)
    _ = path.write_bytes(whole)
    assert fresh(tokens).trouble == ""
    assert accepts(tokens, token)


def test_only_whole_tokens_are_accepted(tmp_path: Path) -> None:
    token = create_token(tmp_path, "laptop")
    tokens = ApiTokens(tmp_path)
    assert accepts(tokens, token)
    assert accepts(tokens, "wrong", token)
    stored = next(iter(read_tokens(tmp_path) or ()))
    for wrong in ("", token[:-1], token + "x", token.upper(), token[4:], stored.sha256, "laptop"):
        assert not accepts(tokens, wrong), wrong
    assert not accepts(tokens)
    assert not tokens.accepts([b"\xff" * 64])


def test_the_same_name_again_is_another_token(tmp_path: Path) -> None:
    old = create_token(tmp_path, "laptop")
    tokens = ApiTokens(tmp_path)
    assert accepts(tokens, old)
    assert revoke_token(tmp_path, "laptop") == 0
    new = create_token(tmp_path, "laptop")
    assert not accepts(tokens, old)
    stored = next(iter(read_tokens(tmp_path) or ()))
    assert stored.id not in read_uses(tmp_path), "it was never used"
    assert accepts(tokens, new)


def test_keys_stay_wanted_when_the_last_token_or_the_file_is_gone(tmp_path: Path) -> None:
    token = create_token(tmp_path, "laptop")
    tokens = ApiTokens(tmp_path)
    assert fresh(tokens).is_required
    assert revoke_token(tmp_path, "laptop") == 0
    assert fresh(tokens).is_required
    assert ApiTokens(tmp_path).is_required, "after a restart too"
    (tmp_path / TOKENS_FILE).unlink()
    assert fresh(tokens).is_required and not accepts(tokens, token)
    assert not ApiTokens(tmp_path).is_required, "removed, and started anew"
    assert ApiTokens(tmp_path, always=True).is_required


def swapped(path: Path) -> None:
    other = path.with_name("other")
    path.replace(other)
    path.symlink_to(other)


def is_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def is_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def holding(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        _ = path.write_bytes(content)

    return write


ENTRY = {"name": "a", "sha256": "0" * 64, "created": 1}
BROKEN: dict[str, Callable[[Path], None]] = {
    "empty": holding(b""),
    "no JSON": holding(b"\x00\xff" * 9),
    "cut off": holding(b'{"format":1,"tokens":['),
    "another format": holding(b'{"format":2,"tokens":[]}'),
    "no digest": holding(json.dumps({"tokens": [ENTRY | {"sha256": "0"}]}).encode()),
    "another field": holding(json.dumps({"tokens": [ENTRY | {"scope": "all"}]}).encode()),
    "too many": holding(json.dumps({"tokens": [ENTRY] * 257}).encode()),
    "huge": holding(b" " * 2**21),
    "readable by others": lambda path: path.chmod(0o644),
    "writable by others": lambda path: path.chmod(0o602),
    "a link": swapped,
    "a pipe": is_pipe,
    "a folder": is_folder,
}


@pytest.mark.parametrize("break_", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_told_once_and_lets_nobody_in(
    tmp_path: Path, break_: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    token = create_token(tmp_path, "laptop")
    tokens = ApiTokens(tmp_path)
    assert accepts(tokens, token)
    caplog.clear()
    break_(tmp_path / TOKENS_FILE)
    for at in range(3):
        os.utime(tmp_path / TOKENS_FILE, (at, at), follow_symlinks=False)
        assert not accepts(tokens, token)
        assert fresh(tokens).is_required
    assert ApiTokens(tmp_path).is_required
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 2, "once by each of the two"
    assert str(tmp_path / TOKENS_FILE) in errors[0] and "cannot be used" in errors[0]
    for change in (lambda: create_token(tmp_path, "b"), lambda: revoke_token(tmp_path, "laptop")):
        with pytest.raises(InvalidSettings, match="cannot be used"):
            _ = change()
    if break_ in (is_pipe, is_folder):
        assert "it is no file" in errors[0]
    with pytest.raises(InvalidSettings):
        _ = has_token(tmp_path)


def test_a_file_of_another_user_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = create_token(tmp_path, "laptop")
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    tokens = ApiTokens(tmp_path)
    assert fresh(tokens).is_required and not accepts(tokens, token)
    with pytest.raises(InvalidSettings, match="another user's"):
        _ = create_token(tmp_path, "phone")
    with pytest.raises(InvalidSettings, match="another user's"):
        _ = create_token(tmp_path / "..", "phone")


@pytest.mark.parametrize(
    "name",
    ["", " ", " a", "a ", "a\nb", "a\x1b[2J", "\x00", "a\u202eb", "\udcff", "x" * 65, "x" * 2**20],
    ids=lambda name: repr(name[:8]),
)
def test_a_bad_name_is_refused_and_not_repeated(tmp_path: Path, name: str) -> None:
    for change in (create_token, revoke_token):
        with pytest.raises(InvalidRequest, match="1 to 64 printable") as caught:
            _ = change(tmp_path, name)
        assert len(caught.value.message) < 200
        assert caught.value.param == "NAME"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../../x", "a/b", ".hidden", "-rf", "a;b", "a\\b"])
def test_a_new_name_is_none_that_a_path_or_a_command_would_read_otherwise(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(InvalidRequest, match="begins with a letter or digit"):
        _ = create_token(tmp_path, name)
    _ = create_token(tmp_path, "Büro 2.a_b-c@d+e")


def test_a_name_is_taken_once_and_revoked_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no token with the name 'lap top'"):
        _ = revoke_token(tmp_path / "none", "lap top")
    assert not (tmp_path / "none").exists()
    _ = create_token(tmp_path, "lap top")
    with pytest.raises(InvalidRequest, match="there is a token with the name 'lap top'"):
        _ = create_token(tmp_path, "lap top")
    assert revoke_token(tmp_path, "lap top") == 0
    with pytest.raises(InvalidRequest, match="no token with the name 'lap top'"):
        _ = revoke_token(tmp_path, "lap top")


def test_tokens_made_at_once_are_all_there(tmp_path: Path) -> None:
    created: list[str] = []
    begin = threading.Barrier(8)

    def create(number: int) -> None:
        _ = begin.wait(30)
        created.extend(create_token(tmp_path, f"{number}-{each}") for each in range(4))

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    tokens = ApiTokens(tmp_path)
    assert len(created) == len(names(tmp_path)) == 32
    assert all(accepts(tokens, each) for each in created)


def test_there_is_a_bound_of_tokens(tmp_path: Path) -> None:
    _ = create_token(tmp_path, "one")
    path = tmp_path / TOKENS_FILE
    many = [ENTRY | {"name": f"n{number}"} for number in range(256)]
    _ = path.write_text(json.dumps({"tokens": many}))
    with pytest.raises(InvalidRequest, match="revoke one first"):
        _ = create_token(tmp_path, "two")
    assert len(names(tmp_path)) == 256


def test_a_full_disk_changes_nothing_and_gives_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = create_token(tmp_path, "laptop")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_files, "write_atomic", full)
    for change in (lambda: create_token(tmp_path, "b"), lambda: revoke_token(tmp_path, "laptop")):
        with pytest.raises(ExoNodeError, match="No space left on device; nothing was changed"):
            _ = change()
    tokens = ApiTokens(tmp_path)
    assert accepts(tokens, token), "the use is not written, and the answer does not depend on it"
    assert names(tmp_path) == ["laptop"]


def test_the_last_use_is_written_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = create_token(tmp_path, "laptop")
    other = create_token(tmp_path, "phone")
    first, second = (each.id for each in read_tokens(tmp_path) or ())
    now, writes = [1000.0], list[dict[str, int]]()

    def counted(folder: Path, uses: dict[str, int]) -> None:
        writes.append(uses)
        write_uses(folder, uses)

    monkeypatch.setattr(api_tokens, "write_uses", counted)
    tokens = ApiTokens(tmp_path, clock=lambda: now[0])
    assert not accepts(tokens, "wrong") and read_uses(tmp_path) == {}
    for now[0] in (1000, 1001, 1059.9):
        assert accepts(tokens, token)
    assert (len(writes), read_uses(tmp_path)) == (1, {first: 1000})
    assert accepts(tokens, other)
    now[0] = 1060
    assert accepts(tokens, token)
    assert (len(writes), read_uses(tmp_path)) == (3, {first: 1060, second: 1059})
    now[0] = 500  # the clock was set back
    assert accepts(tokens, token) and accepts(tokens, token)
    assert (len(writes), read_uses(tmp_path)) == (4, {first: 500, second: 1059})
    assert revoke_token(tmp_path, "phone") == 1
    now[0] = 600
    again = ApiTokens(tmp_path, clock=lambda: now[0])
    assert accepts(again, token)
    assert read_uses(tmp_path) == {first: 600}, "a revoked token's goes with it"
    assert token not in (tmp_path / USES_FILE).read_text()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a":"b"}', b'{"a":-1}', b"\xff"])
def test_damaged_uses_are_none_and_stop_nobody(tmp_path: Path, content: bytes) -> None:
    token = create_token(tmp_path, "laptop")
    _ = (tmp_path / USES_FILE).write_bytes(content)
    assert read_uses(tmp_path) == {}
    assert accepts(ApiTokens(tmp_path), token)
    assert len(read_uses(tmp_path)) == 1


def test_a_thousand_wrong_tokens_write_and_log_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = create_token(tmp_path, "laptop")
    tokens = ApiTokens(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert not any(accepts(tokens, f"exo-{number:043}") for number in range(1_000))
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert caplog.records == []
    assert accepts(tokens, token)
