"""`exo-node token`: keys for clients, each with a name and revoked alone; no node has to run."""

import json
import sys
from typing import Annotated, Any, Final

from ..trust.token_file import (
    check_new_name,
    create_token,
    read_tokens,
    read_uses,
    revoke_token,
    turn_off,
)
from .client import client_settings
from .flags import AsJson, DataDir, Yes, argument, group
from .output import confirm, minute, note, print_json, print_result, print_table

token = group("Make and revoke keys for clients.")

_Name = Annotated[str, argument("NAME", "What you call the token.")]


_FIRST: Final = (
    "with this first token, every client of the node needs one, or EXO_API_KEY, from now on; "
    "`exo-node token off` undoes that."
)


@token.command()
def create(
    name: _Name, yes: Yes = False, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Make a token and print it, this once.

    Clients send it as their API key. From the first one on, the node asks every client for a token
    or for EXO_API_KEY, until `exo-node token off`. A running node knows it at once.
    """
    folder = client_settings(None, data_dir).data_dir
    check_new_name(name)
    is_first = read_tokens(folder) is None
    if asks := is_first and sys.stdin.isatty() and not (yes or as_json):
        confirm(f"{_FIRST} Make it?")
    text = create_token(folder, name)
    if is_first and not asks:
        note(_FIRST)
    if as_json:
        print(json.dumps({"name": name, "token": text}))
        return
    print(text)
    note("keep it: it is stored nowhere and not shown again")


@token.command("list")
def list_tokens(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the tokens by name, with the minute of their last use."""
    folder = client_settings(None, data_dir).data_dir
    uses = read_uses(folder)
    tokens: list[dict[str, Any]] = [
        {
            "name": each.name,
            "created": minute(each.created),
            "last_used": minute(uses[each.id]) if each.id in uses else None,
        }
        for each in read_tokens(folder) or ()
    ]
    if as_json:
        print_json({"data": tokens})
    elif not tokens:
        note("there is no token; `exo-node token create NAME` makes one")
    else:
        rows = [(each["name"], each["created"], each["last_used"] or "never") for each in tokens]
        print_table(("NAME", "CREATED", "LAST USED"), rows)


@token.command()
def revoke(name: _Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Take a token back. A running node refuses the next request with it."""
    folder = client_settings(None, data_dir).data_dir
    remaining = revoke_token(folder, name)
    if as_json:
        print(json.dumps({"revoked": name, "left": remaining}))
        return
    note(f"revoked '{name}'")
    if not remaining:
        note("no token is left, and clients need a key still; `exo-node token off` ends that")


@token.command()
def off(yes: Yes = False, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Revoke all tokens, and ask clients for none.

    A running node knows it at once. EXO_API_KEY and a node that listens beyond loopback still ask.
    """
    folder = client_settings(None, data_dir).data_dir
    if (names := [each.name for each in read_tokens(folder) or ()]) and not yes:
        confirm(f"Revoke {', '.join(names)}, and ask clients for no key?")
    revoked = turn_off(folder)
    text = "clients need no token now; EXO_API_KEY and --host beyond loopback still ask for one"
    print_result({"off": True, "revoked": revoked}, text, as_json=as_json)
