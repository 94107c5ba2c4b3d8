"""`exo-node token` creates, lists and revokes tokens on a data folder, with no node."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from exo_node.node.cli.main import app
from exo_node.node.machine.settings import load_settings
from exo_node.node.trust.api_tokens import ApiTokens
from exo_node.node.trust.token_file import TOKENS_FILE, create_token, has_token
from exo_node.placement.errors import InvalidSettings


def token(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["token", *arguments, "--data-dir", str(folder)])


def only_token(folder: Path) -> dict[str, Any]:
    [entry] = json.loads(token(folder, "list", "--json").stdout)["data"]
    return entry


def test_a_token_is_printed_once_listed_and_revoked(tmp_path: Path) -> None:
    created = token(tmp_path, "create", "laptop")
    assert created.exit_code == 0
    text = created.stdout.strip()
    assert created.stdout == f"{text}\n" and "not shown again" in created.stderr
    tokens = ApiTokens(tmp_path)
    listed = token(tmp_path, "list").stdout
    assert listed.splitlines()[1].startswith("laptop  ") and listed.endswith("  never\n")
    assert tokens.accepts([text.encode()])
    while "never" in (listed := token(tmp_path, "list").stdout):
        time.sleep(0.01)  # the use is written beside the loop
    assert text not in listed
    revoked = token(tmp_path, "revoke", "laptop")
    assert (revoked.exit_code, revoked.stdout) == (0, "")
    assert "no token is left, and clients need a key still; `exo-node token off`" in revoked.stderr
    asyncio.run(tokens.refresh())
    assert not tokens.accepts([text.encode()])
    assert "there is no token" in token(tmp_path, "list").stderr


def test_the_same_as_json(tmp_path: Path) -> None:
    created = json.loads(token(tmp_path, "create", "a", "--json").stdout)
    assert created["name"] == "a" and ApiTokens(tmp_path).accepts([created["token"].encode()])
    while not (entry := only_token(tmp_path))["last_used"]:
        time.sleep(0.01)  # the use is written beside the loop
    assert entry["name"] == "a" and entry["last_used"].endswith("Z")
    assert json.loads(token(tmp_path, "revoke", "a", "--json").stdout) == {
        "revoked": "a",
        "left": 0,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("create", "a"), "there is a token with the name 'a'"),
        (("create", "b\x1b[2J"), "1 to 64 printable"),
        (("create", "x" * 100_000), "1 to 64 printable"),
        (("revoke", "b"), "no token with the name 'b'"),
    ],
    ids=["taken", "control", "long", "unknown"],
)
def test_a_refusal_is_a_line_and_an_exit_code(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    _ = create_token(tmp_path, "a")
    before = (tmp_path / TOKENS_FILE).read_bytes()
    refused = token(tmp_path, *arguments)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert message in refused.stderr and len(refused.stderr) < 200
    assert (tmp_path / TOKENS_FILE).read_bytes() == before


def test_a_name_is_checked_before_what_its_token_changes_is_said(tmp_path: Path) -> None:
    refused = token(tmp_path, "create", "b\x1b[2J")
    assert refused.exit_code == 1 and "1 to 64 printable" in refused.stderr
    assert "first token" not in refused.stderr
    assert "first token" in token(tmp_path, "create", "b").stderr


@pytest.mark.parametrize("command", [("create", "b"), ("list",), ("revoke", "a")])
def test_a_damaged_file_is_an_error_and_stays(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / TOKENS_FILE
    _ = path.write_bytes(b"{")
    path.chmod(0o600)
    refused = token(tmp_path, *command)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"{path} cannot be used: it is damaged" in refused.stderr
    assert path.read_bytes() == b"{"


def test_what_somebody_wrote_into_the_file_cannot_draw(tmp_path: Path) -> None:
    _ = create_token(tmp_path, "plain")
    path = tmp_path / TOKENS_FILE
    _ = path.write_text(path.read_text().replace("plain", "a\\u001b[2J"))
    assert r"a\x1b[2J" in token(tmp_path, "list").stdout


def test_a_token_lets_a_node_listen_beyond_loopback(tmp_path: Path) -> None:
    flags = {"host": "0.0.0.0", "data_dir": str(tmp_path)}
    with pytest.raises(InvalidSettings, match="`exo-node token create NAME`"):
        _ = load_settings(flags, {}, has_token)
    _ = create_token(tmp_path, "laptop")
    assert load_settings(flags, {}, has_token).host == "0.0.0.0"
    _ = (tmp_path / TOKENS_FILE).write_bytes(b"{")
    with pytest.raises(InvalidSettings, match="cannot be used"):
        _ = load_settings(flags, {}, has_token)
    assert load_settings(flags, {"EXO_API_KEY": "k"}, has_token).host == "0.0.0.0"
    assert load_settings(flags | {"host": "127.0.0.1"}, {}, has_token).host == "127.0.0.1"


def test_a_token_that_cannot_be_stored_announces_nothing(tmp_path: Path) -> None:
    (tmp_path / f"{TOKENS_FILE}.lock").mkdir()
    refused = token(tmp_path, "create", "a")
    assert "nothing was changed" in refused.stderr
    assert refused.exit_code == 1
    assert "every client" not in refused.stderr and not has_token(tmp_path)


def test_what_a_first_token_does_is_said_and_off_undoes_it(tmp_path: Path) -> None:
    running = ApiTokens(tmp_path)
    first = token(tmp_path, "create", "a")
    assert "every client of the node needs one" in first.stderr.splitlines()[0]
    assert "every client" not in token(tmp_path, "create", "b").stderr, "it is so already"
    asyncio.run(running.refresh())
    assert running.is_required
    refused = token(tmp_path, "off")
    assert refused.exit_code == 2 and "Revoke a, b" in refused.stderr
    asyncio.run(running.refresh())
    assert running.is_required
    assert token(tmp_path, "off", "--yes").exit_code == 0
    asyncio.run(running.refresh())
    assert not running.is_required and not running.accepts([first.stdout.strip().encode()])
    assert not ApiTokens(tmp_path).is_required and ApiTokens(tmp_path, always=True).is_required
    assert not has_token(tmp_path)
    assert "every client of the node needs one" in token(tmp_path, "create", "c").stderr
    asyncio.run(running.refresh())
    assert running.is_required
    (tmp_path / TOKENS_FILE).unlink()
    asyncio.run(running.refresh())
    assert running.is_required, "a removed file is no decision"


def test_off_without_tokens_writes_nothing(tmp_path: Path) -> None:
    assert token(tmp_path / "none", "off").exit_code == 0
    assert not (tmp_path / "none").exists()
